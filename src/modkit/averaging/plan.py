"""How averages follow a model: their tensors grouped for the kernels, and the steps of the groups.

A plan is made once and reused until something changes. ``EMA`` and ``AveragedModel`` differ in where the
averages live: in tensors of their own, or in the parameters of a copy of the model.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import Self, override

from modkit.averaging import precision
from modkit.averaging.averages import Average, Tensors, can_share
from modkit.averaging.copies import Copies
from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.precision import OnNonfinite, Weight
from modkit.averaging.sharding import local_shard, meshes_of, true_everywhere
from modkit.averaging.watch import Watch


_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class _Gather:
    """Copies small tensors into one flat tensor, with one ``torch.cat`` for each trailing shape."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        runs: dict[tuple[bool, torch.Size], list[Tensor]] = {}
        for source in sources:
            runs.setdefault((source.dim() == 0, source.shape[1:]), []).append(source)
        total = sum(map(Tensor.numel, sources))
        self.data: Tensor = torch.empty(total, dtype=sources[0].dtype, device="cpu")
        self._calls: list[tuple[Any, list[Tensor], Tensor]] = []
        start = 0
        for (is_scalar, trailing), run in runs.items():
            stop = start + sum(map(Tensor.numel, run))
            view = self.data[start:stop].view((-1,) if is_scalar else (-1, *trailing))
            self._calls.append((torch.stack if is_scalar else torch.cat, run, view))
            start = stop

    def __call__(self) -> None:
        with torch.inference_mode():
            for gather, sources, view in self._calls:
                gather(sources, out=view)


@dataclass
class Group:
    """Tensors that the kernels take together: of one device and dtype in averages and model."""

    owners: list[Average]
    averages: list[list[Tensor]]
    errors: list[list[Tensor]]
    currents: list[Tensor] = field(default_factory=list)
    gather: _Gather | None = None

    def add(self, name: str, current: Tensor) -> None:
        """Add a tensor of the model and its averages."""
        self.currents.append(local_shard(current))
        for owner, tensors, errors in zip(self.owners, self.averages, self.errors, strict=True):
            tensors.append(local_shard(owner.tensors[name]))
            if name in owner.errors:
                errors.append(local_shard(owner.errors[name]))

    def step(
        self, weights: Sequence[Weight], taken: Tensor | None, first: Tensor | None = None
    ) -> None:
        """Move each average by its weight towards the current values; a weight of 1 copies.

        Flags in the memory of an accelerator decide there what is done: where ``first`` is True, the
        values are copied, and else, where ``taken`` is False, nothing changes.
        """
        if taken is None:
            self._step(weights)
            return
        undone = ~taken.to(self.averages[0][0].device)
        for part in precision.parts(
            *self.averages, *(one for one in self.errors if one), self.currents
        ):
            # An unwanted step is undone, because not taking it would need a host sync.
            kept = [tensor for tensors in part[:-1] for tensor in tensors]
            before = [tensor.clone() for tensor in kept]
            count = len(self.owners)
            errors = list(part[count:-1]) or [[] for _ in self.owners]
            Group(self.owners, list(part[:count]), errors, part[-1])._step(weights)
            precision.where_(undone, kept, before)
            if first is not None:
                for averages in part[:count]:
                    precision.where_(first, averages, part[-1])
                for error in chain.from_iterable(errors):
                    error.masked_fill_(first, 0)

    def _step(self, weights: Sequence[Weight]) -> None:
        lerped: list[tuple[list[Tensor], Weight]] = []
        for owner, averages, errors, weight in zip(
            self.owners, self.averages, self.errors, weights, strict=True
        ):
            first = averages[0]
            if isinstance(weight, float) and weight == 1.0:
                precision.copy_(averages, errors, self.currents)
            elif errors:
                precision.compensated_(averages, errors, self.currents, weight)
            elif owner.options.precision == "stochastic" and precision.is_rounded(first.dtype):
                precision.stochastic_(
                    averages, self.currents, weight, owner.generator(first.device)
                )
            else:
                lerped.append((averages, weight))
        if lerped:
            precision.lerp_(
                [one for one, _ in lerped], self.currents, [weight for _, weight in lerped]
            )


def _grouped(owners: list[Average], currents: Tensors, *, flat: bool) -> list[Group]:
    """Group tensors of a model, and their averages, by device and dtype."""
    found = _flat_groups(owners, currents) if flat else []
    taken = {name for names, _ in found for name in names}
    groups: dict[tuple[Any, ...], Group] = {}
    first = owners[0]
    for name, current in currents.items():
        if name not in taken:
            mine = first.tensors[name]
            key = (mine.device, mine.dtype, current.device, current.dtype, name in first.errors)
            if key not in groups:
                groups[key] = Group(owners, [[] for _ in owners], [[] for _ in owners])
            groups[key].add(name, current)
    return [group for _, group in found] + list(groups.values())


def _flat_groups(owners: list[Average], currents: Tensors) -> list[tuple[list[str], Group]]:
    found: list[tuple[list[str], Group]] = []
    for index, flat in enumerate(owners[0].flats):
        names = flat.names
        sources = [currents[name] for name in names if name in currents]
        alike = all(map(can_share, sources)) and len({source.dtype for source in sources}) == 1
        if len(sources) < len(names) or not alike:
            continue
        pairs = [(one.flats[index], one.tensors) for one in owners if index < len(one.flats)]
        usable = all(flat.names == names and flat.holds(own) for flat, own in pairs)
        if usable and len(pairs) == len(owners):
            gather = _Gather(sources)
            memory = [[flat.data] for flat, _ in pairs]
            group = Group(owners, memory, [[] for _ in owners], [gather.data], gather)
            found.append((names, group))
    return found


class Plan:
    """One model's tensors with their averages, grouped; valid until something about them changes.

    It does not keep the model alive. Replaced tensors of ``models`` end it, buffers too with
    ``buffers``, changed metadata of ``currents`` and ``more``, and ``frozen`` parameters that
    require gradients. With ``flat``, small tensors are gathered into flat buffers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        averages: list[Average],
        currents: Tensors,
        copies: Copies,
        models: Sequence[NamedTensors],
        *,
        more: Iterable[Tensor] = (),
        flat: bool = True,
        buffers: bool = False,
        frozen: Iterable[Tensor] = (),
    ) -> None:
        self.copies = copies
        self.currents = currents
        self.groups: list[Group] = _grouped(averages, currents, flat=flat)
        self._meshes = meshes_of(currents.values())
        self._model = weakref.ref(model)
        self._flats = [flat_ for one in averages for flat_ in one.flats if flat_.holds(one.tensors)]
        names = set(currents)
        self._buffers = [m for one in models for m in one.buffers.values() if m.name in names]
        flat_ones = {id(one) for each in self._flats for one in each.tensors}
        watched = [one for one in more if id(one) not in flat_ones]
        self._watch = Watch(models, [*currents.values(), *watched], buffers=buffers)
        self._frozen = [tensor for tensor in frozen if not tensor.requires_grad]

    def is_for(self, model: torch.nn.Module) -> bool:
        """Return True if the plan can still be used for a model."""
        return (
            self._model() is model
            and not self._watch.changed()
            and all(member.current() is member.tensor for member in self._buffers)
            and all(flat.intact() for flat in self._flats)
            and not any(map(_REQUIRES_GRAD, self._frozen))
        )

    def mark_written(self) -> None:
        """Count a write to the tensors in flat buffers, which autograd and guards compare."""
        for flat in self._flats:
            increment_version(flat.tensors)

    def step(
        self, take: Callable[[Group, Tensor | None], None], on_nonfinite: OnNonfinite
    ) -> bool | Tensor:
        """Take one step of all groups: ``take`` gets a group, and a flag that masks it if given.

        Returns:
            Whether the step was taken: a flag in device memory where reading it is a host sync.
        """
        for group in self.groups:
            if group.gather is not None:
                group.gather()
        finite: Tensor | None = None
        if on_nonfinite == "skip":
            flag = precision.all_finite(
                [tensor for group in self.groups for tensor in group.currents]
            )
            finite = true_everywhere(flag, self._meshes)
            if precision.reads_are_free(finite.device):
                if not finite:
                    return False
                finite = None
        for group in self.groups:
            take(group, finite)
        return True if finite is None else finite


class Cache:
    """A value cached for the latest model, without keeping that model alive. Copies are empty."""

    def __init__(self) -> None:
        self._value: Any = None
        self._key: object = None
        self._model: object = None

    def get(self, model: torch.nn.Module, key: object, make: Callable[[], Any]) -> Any:
        """Return the cached value, made anew if the model, or the key, has changed."""
        value = self._value
        if value is None or self._key != key or not value.is_for(model):
            self._value = None
            self._value = value = make()
            self._key = key
            # A method as the callback would make a cycle, which keeps the averages until collected.
            self._model = weakref.ref(model, partial(_clear, weakref.ref(self)))
        return value

    @override
    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def _clear(cache: weakref.ref[Cache], _: object) -> None:
    # No global name: as the interpreter exits, those of this module may be None before the model dies.
    found = cache()
    if found is not None:
        found._value = found._key = found._model = None
