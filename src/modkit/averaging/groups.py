"""Groups of tensors that the kernels take together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modkit._upstream import PLAIN
from modkit.averaging import precision
from modkit.averaging.averages import Average, Tensors, can_share
from modkit.averaging.sharding import is_sharded_alike, local_shard


# ``torch.cat`` or ``torch.stack``, the tensors that it gathers, and the memory that it gathers them
# in.
Gather: TypeAlias = tuple[Callable[..., Any], list[Tensor], Tensor]


@dataclass
class Group:
    """Tensors that the kernels take together: of one device and dtype in averages and model.

    Attributes:
        owners: The averages that the group is a part of, several with several decays.
        averages: The averaged tensors, in a list for each owner.
        errors: Their error terms, in a list for each owner; empty lists without error terms.
        currents: The tensors of the model, in the order of each of these lists. In the group of a
            flat buffer it is one tensor, which ``gathers`` fill.
        gathers: Calls that copy the tensors of the model into the one tensor in ``currents``.
        has_average: Whether the averages are floating-point or complex: integers have no average.
    """

    owners: Sequence[Average]
    averages: list[list[Tensor]]
    errors: list[list[Tensor]]
    currents: list[Tensor] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    has_average: bool = True

    @classmethod
    def like(cls, owners: Sequence[Average], average: Tensor) -> "Group":
        """Return a group without tensors.

        Args:
            owners: The averages.
            average: A tensor of an average; integers have none.
        """
        return cls(
            owners,
            averages=[[] for _ in owners],
            errors=[[] for _ in owners],
            has_average=precision.is_averaged(average),
        )

    def add(self, name: str, current: Tensor) -> None:
        """Add a tensor of the model and its averages.

        Args:
            name: The name of both.
            current: The tensor of the model. If the averages are sharded like it, local shards are
                added; otherwise torch combines it with them, or refuses to.
        """
        is_local = is_sharded_alike(self.owners[0].tensors[name], current)
        part: Callable[[Tensor], Tensor] = local_shard if is_local else Tensor.detach
        self.currents.append(part(current))
        for owner, tensors, errors in zip(self.owners, self.averages, self.errors, strict=True):
            tensors.append(part(owner.tensors[name]))
            if name in owner.errors:
                errors.append(part(owner.errors[name]))

    def parts(self) -> Iterator[tuple["Group", "Group"]]:
        """Cut the group into groups of a bounded number of elements.

        Yields:
            A group whose tensors share the memory of this one, and the group to compute with: the
            same tensors as :func:`precision.gathered` returns them. :meth:`take` copies its values
            back. Neither has ``gathers``: values are gathered before.
        """
        for lists in precision.parts(*self._lists()):
            yield self._with(lists), self._with(precision.gathered(*lists))

    def take(self, gathered: "Group") -> None:
        """Take the averages and error terms of the group that :meth:`parts` has gathered."""
        for tensors, source in zip(self._lists()[:-1], gathered._lists()[:-1], strict=True):
            precision.scatter_(tensors, source)

    def _lists(self) -> list[list[Tensor]]:
        # The lists are parallel, so empty lists of error terms are left out.
        return [*self.averages, *(terms for terms in self.errors if terms), self.currents]

    def _with(self, lists: Sequence[list[Tensor]]) -> "Group":
        count = len(self.owners)
        return Group(
            self.owners,
            averages=list(lists[:count]),
            errors=list(lists[count:-1]) or [[] for _ in self.owners],
            currents=lists[-1],
            has_average=self.has_average,
        )


def grouped(
    owners: Sequence[Average], currents: Tensors, *, flat: bool, alone: bool = False
) -> list[Group]:
    """Group tensors of a model, and their averages, by device and dtype.

    Args:
        owners: The averages, which have the same names.
        currents: The tensors of the model by name.
        flat: Whether tensors whose averages are in flat buffers are gathered.
        alone: Whether each tensor is a group of its own, in the order of the model.

    Returns:
        The groups, those of flat buffers first. Each tensor is in one of them.
    """
    flat_groups = _flat_groups(owners, currents) if flat else []
    taken = {name for names, _ in flat_groups for name in names}

    groups: dict[tuple[Any, ...], Group] = {}
    first = owners[0]
    for name, current in currents.items():
        if name in taken:
            continue
        average = first.tensors[name]
        has_error = name in first.errors
        key: tuple[Any, ...] = (
            *(average.device, average.dtype, current.device, current.dtype, has_error),
            # Subclasses may have arithmetic of their own, or no kernels for lists.
            *(_kind(average), _kind(current), name if alone else None),
            is_sharded_alike(average, current),
        )
        if key not in groups:
            groups[key] = Group.like(owners, average)
        groups[key].add(name, current)

    return [group for _, group in flat_groups] + list(groups.values())


def _kind(tensor: Tensor) -> type[Tensor]:
    """Return the subclass that a tensor, or its local shard, is of; plain types are one."""
    kind = type(local_shard(tensor))
    return Tensor if kind in PLAIN else kind


def _flat_groups(owners: Sequence[Average], currents: Tensors) -> list[tuple[list[str], Group]]:
    """Return the groups of flat buffers, each with the names of its tensors.

    A buffer is left out unless all averages, and the model, still have the tensors that it was made
    for: a lerp of the buffer would miss the others. Those are averaged one by one then.
    """
    groups: list[tuple[list[str], Group]] = []
    for index, flat in enumerate(owners[0].flats):
        names = flat.names
        sources = [currents[name] for name in names if name in currents]
        alike = all(map(can_share, sources)) and len({source.dtype for source in sources}) == 1
        if len(sources) < len(names) or not alike:
            continue

        # Averages of one model are alike, but each may have lost its buffers by a copy or a move.
        owned = [(owner.flats[index], owner) for owner in owners if index < len(owner.flats)]
        usable = all(buf.names == names and buf.holds(owner.tensors) for buf, owner in owned)
        if usable and len(owned) == len(owners):
            group = Group.like(owners, flat.data)
            group.averages = [[buffer.data] for buffer, _ in owned]
            data, group.gathers = _gathers(sources)
            group.currents = [data]
            groups.append((names, group))
    return groups


def _gathers(sources: Sequence[Tensor]) -> tuple[Tensor, list[Gather]]:
    """Return a flat tensor, and the calls that gather small tensors in it.

    One ``torch.cat`` takes all tensors of a trailing shape, one ``torch.stack`` all scalars. That
    is the order of a flat buffer, whose tensors are in runs of the same trailing shape.
    """
    runs: dict[tuple[bool, torch.Size], list[Tensor]] = {}
    for source in sources:
        runs.setdefault((source.dim() == 0, source.shape[1:]), []).append(source)

    # ``cat`` and ``stack`` write into views of one tensor, which the kernels then take whole.
    total = sum(map(Tensor.numel, sources))
    data = torch.empty(total, dtype=sources[0].dtype, device="cpu")
    gathers: list[Gather] = []
    start = 0
    for (is_scalar, trailing), run in runs.items():
        stop = start + sum(map(Tensor.numel, run))
        view = data[start:stop].view((-1,) if is_scalar else (-1, *trailing))
        gathers.append((torch.stack if is_scalar else torch.cat, run, view))
        start = stop
    return data, gathers
