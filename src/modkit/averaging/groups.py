"""Groups of tensors that the kernels take together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from modkit._upstream import PLAIN
from modkit.averaging import precision
from modkit.averaging.averages import Average, Tensors
from modkit.averaging.sharding import is_sharded_alike, local_shard


@dataclass
class Group:
    """Tensors that the kernels take together: of one device and dtype in averages and model.

    Attributes:
        owners: The averages that the group is a part of, several with several decays.
        averages: The averaged tensors, in a list for each owner.
        currents: The tensors of the model, in the order of each of these lists.
        has_average: Whether the averages are floating-point or complex: integers have no average.
    """

    owners: Sequence[Average]
    averages: list[list[Tensor]]
    currents: list[Tensor] = field(default_factory=list)
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
        for owner, tensors in zip(self.owners, self.averages, strict=True):
            tensors.append(part(owner.tensors[name]))

    def parts(self) -> Iterator[tuple["Group", "Group"]]:
        """Cut the group into groups of a bounded number of elements.

        Yields:
            A group whose tensors share the memory of this one, and the group to compute with: the
            same tensors as :func:`precision.gathered` returns them. :meth:`take` copies its values
            back.
        """
        for lists in precision.parts(*self._lists()):
            yield self._with(lists), self._with(precision.gathered(*lists))

    def take(self, gathered: "Group") -> None:
        """Take the averages of the group that :meth:`parts` has gathered."""
        for tensors, source in zip(self._lists()[:-1], gathered._lists()[:-1], strict=True):
            precision.scatter_(tensors, source)

    def _lists(self) -> list[list[Tensor]]:
        return [*self.averages, self.currents]

    def _with(self, lists: Sequence[list[Tensor]]) -> "Group":
        return replace(self, averages=list(lists[:-1]), currents=lists[-1])


def grouped(owners: Sequence[Average], currents: Tensors, *, alone: bool = False) -> list[Group]:
    """Group tensors of a model, and their averages, by device and dtype.

    Args:
        owners: The averages, which have the same names.
        currents: The tensors of the model by name.
        alone: Whether each tensor is a group of its own, in the order of the model.

    Returns:
        The groups. Each tensor is in one of them.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    first = owners[0]
    for name, current in currents.items():
        average = first.tensors[name]
        key: tuple[Any, ...] = (
            *(average.device, average.dtype, current.device, current.dtype),
            # Subclasses may have arithmetic of their own, or no kernels for lists.
            *(_kind(average), _kind(current), name if alone else None),
            is_sharded_alike(average, current),
        )
        if key not in groups:
            groups[key] = Group.like(owners, average)
        groups[key].add(name, current)

    return list(groups.values())


def _kind(tensor: Tensor) -> type[Tensor]:
    """Return the subclass that a tensor, or its local shard, is of; plain types are one."""
    kind = type(local_shard(tensor))
    return Tensor if kind in PLAIN else kind
