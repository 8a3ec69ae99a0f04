"""The averaging engine: named tensors are matched, grouped for the kernels, and stepped.

``EMA`` and ``AveragedModel`` are two faces of it. They differ in where the averages live: in tensors of
their own, or in the parameters of a copy of the model.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import Self, override

from modkit._messages import MSG_NOTHING_CHOSEN, MSG_REBIND, add_note
from modkit.averaging import precision, state as ema_state
from modkit.averaging.averages import Average, Tensors, can_share
from modkit.averaging.named_tensors import (
    Copies,
    NamedTensors,
    Options,
    Watch,
    check_match,
    shapes_of,
)
from modkit.averaging.precision import OnNonfinite, Weight
from modkit.averaging.sharding import local_shard, meshes_of, reshard, true_everywhere
from modkit.averaging.swap import Pairs, Registered, pairs_for
from modkit.errors import NameMismatchError


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


class Pairing:
    """The pairs of an average with the tensors of a model, valid while neither changes."""

    def __init__(self, named: NamedTensors, model: torch.nn.Module, values: Tensors) -> None:
        self.pairs: Pairs = pairs_for(named, values)
        self.registered: Registered = Registered(named)
        self._model = weakref.ref(model)
        tensors = [tensor for _, tensor, _ in self.pairs]
        self._lazy = named.has_lazy()
        self._watch = Watch([named], () if self._lazy else tensors, buffers=True)

    def is_for(self, model: torch.nn.Module) -> bool:
        """Return True if the pairs are still those of the model."""
        return self._model() is model and not self._lazy and not self._watch.changed()


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


class Engine:
    """The averages of an ``EMA``, in tensors of their own; ``begun`` is True once they hold values."""

    def __init__(self, model: torch.nn.Module, count: int, options: Options) -> None:
        self.model = model
        self.options: Options = options
        self.begun: bool = False
        self.averages: list[Average] = [Average(options) for _ in range(count)]
        self._copies: dict[str, Any] = {}
        self._plans, self._swaps = Cache(), Cache()
        # The model's tensors when they were last seen under these names, each with its address.
        self._seen: dict[str, tuple[Tensor, int]] = {}

    def bind(self, model: torch.nn.Module) -> Plan:
        """Return the plan for a model's tensors, which must be those that are averaged."""
        plan: Plan = self._plans.get(model, None, lambda: self._plan(model))
        if self.options.on_nonfinite == "raise":
            precision.check_finite("EMA", plan.currents)
        return plan

    def _named(self, model: torch.nn.Module) -> NamedTensors:
        """Return the tensors of a model under the names of those that are averaged."""
        like = None if model is self.model else NamedTensors(self.model)
        return NamedTensors(model, like=like)

    def _plan(self, model: torch.nn.Module) -> Plan:
        named = self._named(model)
        _check_materialized(named)
        known = self.averages[0].tensors
        averaged, copied = self.options.split(named, known)
        _check_strided(averaged)
        if known:
            self._check_known(averaged)
        else:
            _check_any(averaged)
            self.options.check_globs(model)
        for average in self.averages:
            if not known:
                average.start(averaged)
            average.place(averaged)
        self._see(averaged)
        # Buffers may come and go.
        names = {member.name for member in copied}
        for name in self._copies.keys() - names:
            del self._copies[name]
        copies = Copies([(self._copies, one.name, one) for one in copied], self.options.device)
        parameters = named.parameters.items() if self.options.trainable_only else ()
        frozen = [one.tensor for name, one in parameters if name not in averaged]
        return Plan(model, self.averages, averaged, copies, [named], frozen=frozen)

    def _check_known(self, averaged: Tensors) -> None:
        """Raise NameMismatchError unless these tensors are those that are averaged."""
        what = "EMA: the model is not the one that is averaged"
        try:
            check_match(what, shapes_of(self.averages[0].tensors), shapes_of(averaged))
        except NameMismatchError as error:
            add_note(error, MSG_REBIND)
            raise

    def begin(self, plan: Plan) -> bool:
        """Copy the values; return False if that would copy values that are to be skipped."""
        skips = self.options.on_nonfinite == "skip"
        # This is the only host sync of an update.
        if skips and precision.first_nonfinite(plan.currents) is not None:
            return False
        self.begun = True
        plan.step(lambda group, _: group.step([1.0] * len(self.averages), None), "ignore")
        self._copy_rest(plan)
        return True

    def step(self, plan: Plan, weights: Sequence[float]) -> bool:
        """Move each average by its weight towards the present values.

        Returns:
            False if the step is known to be skipped; an accelerator keeps that to itself.
        """
        policy = self.options.on_nonfinite
        taken = plan.step(lambda group, finite: group.step(weights, finite), policy)
        self._copy_rest(plan)
        return taken is not False

    def _copy_rest(self, plan: Plan) -> None:
        plan.copies.run()
        for average in self.averages:
            average.statistics = {}

    def check_index(self, index: int) -> None:
        """Raise IndexError unless there is an average of this index, and TypeError unless it is an int."""
        if isinstance(index, bool) or not isinstance(cast("object", index), SupportsIndex):
            raise TypeError(f"EMA: index must be an int, got {index!r}")
        if not 0 <= index < len(self.averages):
            count = len(self.averages)
            raise IndexError(
                f"EMA: index is {index}, and there are {count} averages, numbered from 0"
            )

    def named(self, index: int) -> dict[str, Tensor]:
        """Return an average, the copies and its statistics by name; nothing before the first step."""
        self.check_index(index)
        average = self.averages[index]
        return {**average.values(), **self._copied(), **average.statistics} if self.begun else {}

    def _copied(self) -> dict[str, Tensor]:
        return {name: copy for name, copy in self._copies.items() if copy is not None}

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors that hold what ``named`` returns, without their error terms."""
        average = self.averages[index]
        return {**average.tensors, **self._copied(), **average.statistics} if self.begun else {}

    def names(self) -> dict[str, None]:
        """Return the names of what any average replaces in the model."""
        return {name: None for index in range(len(self.averages)) for name in self.tensors(index)}

    def pairing(self, model: torch.nn.Module, index: int) -> Pairing:
        """Pair an average with the tensors of a model."""
        # Only then can it be seen whether the tensors are others.
        reshard(model.modules())
        values = self.named(index)
        # The pairing keeps the tensors alive, so no other tensor can get the id of one.
        key = (*values, *map(id, values.values()))
        pairing: Pairing = self._swaps.get(
            model, key, lambda: Pairing(self._named(model), model, values)
        )
        return pairing

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the copies. Tensors are not copied."""
        averages = [one.state_dict() for one in self.averages]
        return {"averages": averages, "buffers": self._copied()}

    def load(self, loaded: ema_state.LoadedState, named: NamedTensors) -> None:
        """Load a state; it is checked before anything is changed."""
        bound, wanted, found = ema_state.matched(loaded, named, self.options)
        averages = [Average(self.options) for _ in self.averages]
        self._see({} if named.has_lazy() else bound)
        for average, state, tensors in zip(averages, loaded.averages, found, strict=True):
            average.start(bound)
            average.load_state_dict({**state, "tensors": tensors})
            statistics = state.get("statistics", {}).items()
            average.set_statistics({n: one.clone() for n, one in statistics if n in named.buffers})
        buffers = {name: value for name, value in loaded.buffers.items() if name in wanted}
        device = self.options.device
        self._copies = {name: one.to(device, copy=True) for name, one in buffers.items()}
        self._plans, self.averages, self.begun = Cache(), averages, True

    def reset(self) -> None:
        """Drop all values, so that the next step is the first one."""
        self._plans, self._copies, self._seen, self.begun = Cache(), {}, {}, False
        for average in self.averages:
            average.reset()

    def rebind(self) -> None:
        """Take in parameters that the model has got, and drop those that it has lost."""
        named = NamedTensors(self.model)
        _check_materialized(named)
        if not self.begun:
            self.reset()
            return
        former = self._former_names(named)
        averaged, _ = self.options.split(named, former)
        _check_any(averaged)
        if self.options.on_nonfinite != "ignore":
            known = shapes_of(self.averages[0].tensors)
            new = {
                n: one for n, one in averaged.items() if known.get(former.get(n, "")) != one.shape
            }
            precision.check_finite("EMA", new)
        self._plans = Cache()
        self.averages = [one.resized(averaged, self.options, former) for one in self.averages]
        self._see(averaged)
        names = named.names()
        self._copies = {name: copy for name, copy in self._copies.items() if name in names}
        for average in self.averages:
            average.statistics = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The tensors of a copy have addresses of their own.
        self._see({name: tensor for name, (tensor, _) in self._seen.items()})

    def _see(self, averaged: Tensors) -> None:
        """Remember which tensors are averaged under these names."""
        self._seen = {name: (tensor, _address(tensor)) for name, tensor in averaged.items()}

    def _former_names(self, named: NamedTensors) -> dict[str, str]:
        """Map names of the model to those that their averages have.

        The same tensor may have another name now: adapters and parametrizations wrap its layer, and
        removing a layer of a list renumbers the others. If it also has other memory, it may hold
        something else (the original of a parametrization is what ``right_inverse`` returns), so only
        an equal name counts. A name whose tensor is elsewhere in the model now is a new one.
        """
        former_of = {id(tensor): name for name, (tensor, _) in self._seen.items()}
        members = named.all()
        present = {id(member.tensor) for member in members.values()}
        found: dict[str, str] = {}
        for name, member in members.items():
            former = former_of.get(id(member.tensor))
            if former is None:
                seen = self._seen.get(name)
                if name in self.averages[0].tensors and (
                    seen is None or id(seen[0]) not in present
                ):
                    found[name] = name
            elif former == name or self._seen[former][1] == _address(member.tensor):
                found[name] = former
        return found

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Move and cast the averages, and keep later ones there."""
        options = self.options
        options = replace(options, device=device or options.device, dtype=dtype or options.dtype)
        averaged: dict[str, Tensor] = {}
        if known := self.averages[0].tensors:
            averaged, _ = options.split(NamedTensors(self.model), known)
            self._check_known(averaged)
        names = {name: name for name in averaged}
        self.averages = [one.resized(averaged, options, names) for one in self.averages]
        self.options = options
        self._plans = Cache()
        if device is not None:
            self._copies = {name: copy.to(device) for name, copy in self._copied().items()}


def _address(tensor: Tensor) -> int:
    """Return where the elements of a tensor are, or 0 if it has no memory of its own."""
    try:
        return local_shard(tensor).data_ptr()
    except RuntimeError:
        return 0


def _check_any(averaged: Tensors) -> None:
    if not averaged:
        raise ValueError(f"EMA: {MSG_NOTHING_CHOSEN}")


def _check_strided(averaged: Tensors) -> None:
    for name, tensor in averaged.items():
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                f"EMA: {name} has the layout {tensor.layout}, for which torch has no kernels that "
                f"average. Leave it out with exclude={name!r}, or buffers={{{name!r}: 'copy'}} if it "
                "is a buffer. Nothing has been changed."
            )


def _check_materialized(named: NamedTensors) -> None:
    if named.has_lazy():
        raise RuntimeError("EMA: a parameter is uninitialized; call the model once before update()")
    for name, member in named.parameters.items():
        if member.tensor.is_meta:
            raise RuntimeError(
                f"EMA: {name} is on the meta device and has no values; call model.to_empty() and "
                "initialize or load the model before update(). Nothing has been changed."
            )
