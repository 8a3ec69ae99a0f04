"""The averaging engine: named tensors are matched, grouped for the kernels, and stepped.

``EMA`` and ``AveragedModel`` are two faces of it. They differ in where the averages live: in tensors of
their own, or in the parameters of a copy of the model.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import Self

from modkit._messages import (
    MSG_NOTHING_CHOSEN,
    MSG_REBIND,
    add_note,
)
from modkit.averaging import state as ema_state
from modkit.averaging.averages import Average, Options, Tensors, average_for, can_share
from modkit.averaging.named_tensors import (
    Copies,
    IdentityOnly,
    NamedTensors,
    Watch,
    check_match,
)
from modkit.averaging.offload import Staging, Worker, events_on
from modkit.averaging.precision import (
    OnNonfinite,
    Weight,
    all_finite,
    compensated_,
    copy_,
    first_nonfinite,
    is_rounded,
    lerp_,
    parts,
    reads_are_free,
    stochastic_,
)
from modkit.averaging.schedules import Schedule
from modkit.averaging.sharding import is_sharded, local_shard, meshes_of, reshard, true_everywhere
from modkit.averaging.swap import Pairs, pairs_for
from modkit.errors import NameMismatchError


_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class _Gather:
    """Copies small tensors into one flat tensor, with one ``torch.cat`` for each trailing shape."""

    def __init__(self, sources: Iterable[Tensor]) -> None:
        runs: dict[tuple[bool, torch.Size], list[Tensor]] = {}
        for source in sources:
            runs.setdefault((source.dim() == 0, source.shape[1:]), []).append(source)
        lists = list(runs.values())
        total = sum(tensor.numel() for run in lists for tensor in run)
        self.data = torch.empty(total, dtype=lists[0][0].dtype, device="cpu")
        self._calls: list[tuple[Any, list[Tensor], Tensor]] = []
        start = 0
        for (is_scalar, trailing), run in runs.items():
            stop = start + sum(tensor.numel() for tensor in run)
            shape = (-1,) if is_scalar else (-1, *trailing)
            view = self.data[start:stop].view(shape)
            self._calls.append((torch.stack if is_scalar else torch.cat, run, view))
            start = stop

    def __call__(self) -> Tensor:
        with torch.inference_mode():
            for gather, sources, view in self._calls:
                gather(sources, out=view)
        return self.data


@dataclass
class Group:
    """Tensors that the kernels take together: one device and dtype of averages, and one of the model.

    Attributes:
        owners: The averages.
        averages: Tensors of each of them; of sharded ones the local shards.
        errors: Error terms of each, or empty lists.
        currents: Tensors of the model.
        gather: Fills the one tensor in ``currents`` from the small tensors of the model.
    """

    owners: list[Average]
    averages: list[list[Tensor]]
    errors: list[list[Tensor]]
    currents: list[Tensor] = field(default_factory=list)
    gather: _Gather | None = None

    @classmethod
    def empty(cls, owners: list[Average]) -> Self:
        """Return a group without tensors."""
        return cls(owners, [[] for _ in owners], [[] for _ in owners])

    def add(self, name: str, current: Tensor) -> None:
        """Add a tensor of the model and its averages."""
        self.currents.append(local_shard(current))
        for owner, tensors, errors in zip(self.owners, self.averages, self.errors, strict=True):
            tensors.append(local_shard(owner.tensors[name]))
            if name in owner.errors:
                errors.append(local_shard(owner.errors[name]))

    def fetch(self) -> None:
        """Gather the present values, where that is needed."""
        if self.gather is not None:
            self.gather()

    def step(self, weights: Sequence[Weight], finite: Tensor | None) -> None:
        """Move each average by its weight towards the current values.

        Args:
            weights: One for each average; 1 copies.
            finite: On accelerators, a flag; where it is False, nothing changes.
        """
        if finite is None:
            self._step(weights)
            return
        flag = finite.to(self.averages[0][0].device)
        for part in parts(*self.averages, *(one for one in self.errors if one), self.currents):
            # A step that is not wanted is undone, because not taking it would need a host sync.
            kept = [tensor for tensors in part[:-1] for tensor in tensors]
            before = [tensor.clone() for tensor in kept]
            count = len(self.owners)
            errors = list(part[count:-1]) or [[] for _ in self.owners]
            Group(self.owners, list(part[:count]), errors, part[-1])._step(weights)
            for tensor, old in zip(kept, before, strict=True):
                tensor.copy_(torch.where(flag, tensor, old))

    def _step(self, weights: Sequence[Weight]) -> None:
        lerped: list[tuple[list[Tensor], Weight]] = []
        for owner, averages, errors, weight in zip(
            self.owners, self.averages, self.errors, weights, strict=True
        ):
            first = averages[0]
            if isinstance(weight, float) and weight == 1.0:
                copy_(averages, errors, self.currents)
            elif errors:
                compensated_(weight)(averages, errors, self.currents)
            elif owner.options.precision == "stochastic" and is_rounded(first.dtype):
                stochastic_(weight, owner.generator(first.device))(averages, errors, self.currents)
            else:
                lerped.append((averages, weight))
        if lerped:
            lerp_([one for one, _ in lerped], self.currents, [weight for _, weight in lerped])


def grouped(averages: Sequence[Average], currents: Tensors, *, flat: bool) -> list[Group]:
    """Group tensors of a model, and their averages, by device and dtype.

    Args:
        averages: The averages, all of the same tensors.
        currents: The tensors of the model by name.
        flat: Whether small tensors are gathered into flat buffers.
    """
    owners = list(averages)
    if not owners:
        return []
    groups: dict[tuple[Any, ...], Group] = {}
    taken: set[str] = set()
    if flat:
        flats = _flat_groups(owners, currents)
        taken = {name for names, _ in flats for name in names}
        groups = {("flat", index): group for index, (_, group) in enumerate(flats)}
    first = owners[0]
    for name, current in currents.items():
        if name not in taken:
            mine = first.tensors[name]
            key = (mine.device, mine.dtype, current.device, current.dtype, name in first.errors)
            groups.setdefault(key, Group.empty(owners)).add(name, current)
    return list(groups.values())


def _flat_groups(owners: list[Average], currents: Tensors) -> list[tuple[list[str], Group]]:
    found: list[tuple[list[str], Group]] = []
    for index, flat in enumerate(owners[0].flats):
        names = list(flat.tensors)
        errors: list[list[Tensor]] = [[] for _ in owners]
        if not all(
            len(one.flats) == len(owners[0].flats)
            and list(one.flats[index].tensors) == names
            and one.flats[index].holds(one.tensors)
            for one in owners
        ):
            continue
        if names[0] in owners[0].errors:
            kept = [one.error_flats[index] for one in owners if index < len(one.error_flats)]
            if len(kept) < len(owners) or not all(
                list(one.tensors) == names and one.holds(owner.errors)
                for one, owner in zip(kept, owners, strict=True)
            ):
                continue
            errors = [[one.data] for one in kept]
        sources = [currents[name] for name in names if name in currents]
        if len(sources) < len(names) or not all(map(can_share, sources)):
            continue
        if len({source.dtype for source in sources}) > 1:
            continue
        gather = _Gather(sources)
        flats = [[one.flats[index].data] for one in owners]
        found.append((names, Group(owners, flats, errors, [gather.data], gather)))
    return found


class Plan:
    """One model's tensors with their averages, grouped; valid until something about them changes.

    Args:
        model: The model. It is not kept alive.
        averages: The averages, all of the same tensors.
        currents: The tensors of the model that are averaged, by name.
        copies: What is copied.
        models: The models whose changes end the plan.
        flat: Whether small tensors are gathered into flat buffers.
        more: Further tensors whose shape, dtype or device must stay.
        buffers: Whether replacing a buffer ends the plan.
        staging: Host copies to average instead of ``currents``.
        frozen: Parameters that end the plan when they require gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        averages: Sequence[Average],
        currents: Tensors,
        copies: Copies,
        *,
        models: Sequence[NamedTensors],
        more: Iterable[Tensor] = (),
        flat: bool = True,
        buffers: bool = False,
        staging: Staging | None = None,
        frozen: Iterable[Tensor] = (),
    ) -> None:
        self.copies = copies
        self.staging = staging
        self.shards = {name: local_shard(tensor) for name, tensor in currents.items()}
        self.taken = self.shards if staging is None else staging.copies
        moved = [one.moved for one in averages if one.moved is not None]
        self.groups = grouped(moved, self.taken, flat=flat)
        self.meshes = meshes_of(currents.values())
        self._model = weakref.ref(model)
        self._flats = [
            flat_
            for one in moved
            for flat_ in (*one.flats, *one.error_flats)
            if flat_.holds({**one.tensors, **one.errors})
        ]
        names = set(currents)
        self._buffers = [m for one in models for m in one.buffers.values() if m.name in names]
        flat_ones = {id(one) for each in self._flats for one in each.tensors.values()}
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

    def fetch(self) -> None:
        """Gather the present values of small tensors."""
        for group in self.groups:
            group.fetch()

    def mark_written(self) -> None:
        """Count a write to the tensors in flat buffers, which autograd and guards compare."""
        for flat in self._flats:
            increment_version(flat.tensors.values())

    def finite(self) -> Tensor:
        """Return whether all current values are finite; the values have been fetched."""
        flag = all_finite([tensor for group in self.groups for tensor in group.currents])
        return true_everywhere(flag, self.meshes)


class _Cache:
    """A cache whose copies, deep ones and pickles, are empty."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def _reference(self, model: torch.nn.Module) -> weakref.ref[torch.nn.Module]:
        """Return a reference that empties the cache when the model is gone.

        A method as the callback would make a cycle, which keeps the averages until it is collected.
        """
        return weakref.ref(model, partial(_empty, weakref.ref(self)))


def _empty(cache: weakref.ref[_Cache], _: object) -> None:
    found = cache()
    if found is not None:
        vars(found).update(vars(type(found)()))


class PlanCache(_Cache):
    """Keeps the plan of the last model, without keeping that model alive."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self._key: object = None
        self._model: object = None

    def get(self, model: torch.nn.Module, make: Callable[[], Plan], key: object = None) -> Plan:
        """Return the plan for a model, made anew if anything has changed."""
        if self.plan is None or self._key != key or not self.plan.is_for(model):
            self.plan = None
            self.plan = make()
            self._key = key
            self._model = self._reference(model)
        return self.plan


def step(
    plan: Plan, take: Callable[[Group, Tensor | None], None], on_nonfinite: OnNonfinite
) -> Tensor | None:
    """Take one step of all groups of a plan.

    Args:
        plan: The tensors.
        take: Takes the step of a group, given a flag that is False where nothing may change.
        on_nonfinite: The policy for values that are not finite.

    Returns:
        None if the step was taken. Otherwise the flag: on CPU it is False, and nothing was done.
    """
    plan.fetch()
    finite: Tensor | None = None
    if on_nonfinite == "skip":
        finite = plan.finite()
        if reads_are_free(finite.device):
            if not bool(finite):
                return finite
            finite = None
    for group in plan.groups:
        take(group, finite)
    return finite


# The engine of ``EMA``: averages in tensors of their own.


class Engine:
    """Averages that follow the tensors of a model by name.

    Args:
        model: The model.
        schedules: One for each average.
        options: Options of all of them.

    Attributes:
        begun: Whether the averages hold values.
    """

    def __init__(
        self, model: torch.nn.Module, schedules: Sequence[Schedule], options: Options
    ) -> None:
        self.model = model
        self.options = options
        self.begun = False
        self.averages = [average_for(schedule, options) for schedule in schedules]
        self._copies: dict[str, Any] = {}
        self._worker = Worker() if options.asynchronous else None
        self._cache = PlanCache()
        self._swaps = PairCache()

    def flush(self) -> None:
        """Wait for the step that the worker thread is taking, if there is one."""
        if self._worker is not None:
            self._worker.flush()

    # Averaging.

    def bind(self, model: torch.nn.Module) -> Plan:
        """Return the plan for a model's tensors.

        Raises:
            NameMismatchError: They are not those that are averaged. Nothing has been changed.
            RuntimeError: A parameter is uninitialized, or is not finite where that is to be raised.
        """
        plan = self._cache.get(model, lambda: self._plan(model))
        if self.options.on_nonfinite == "raise":
            bad = first_nonfinite_of(plan)
            if bad is not None:
                raise RuntimeError(f"EMA: {bad} is not finite. Nothing has been changed.")
        return plan

    def _plan(self, model: torch.nn.Module) -> Plan:
        self.flush()
        named = NamedTensors(model)
        _check_materialized(named)
        known = self.averages[0].tensors
        averaged, copied = self.options.split(named, known)
        if self.options.asynchronous and self.options.on_nonfinite == "skip":
            _check_not_sharded(averaged)
        if known:
            self._check_known(averaged)
        elif not averaged:
            raise ValueError(f"{self.options.owner}: {MSG_NOTHING_CHOSEN}")
        else:
            for average in self.averages:
                average.start(averaged)
        for average in self.averages:
            average.place(averaged)
        staging = None
        if self.options.asynchronous:
            staging = Staging({name: local_shard(tensor) for name, tensor in averaged.items()})
        pairs = [(self._copies, member.name, member) for member in copied]
        for name in self._copies.keys() - {member.name for member in copied}:
            # Buffers may come and go.
            del self._copies[name]
        copies = Copies(pairs, self.options.device)
        frozen = [one.tensor for name, one in named.parameters.items() if name not in averaged]
        return Plan(
            model,
            self.averages,
            averaged,
            copies,
            models=[named],
            staging=staging,
            frozen=frozen if self.options.trainable_only else (),
        )

    def _check_known(self, averaged: Tensors) -> None:
        """Raise NameMismatchError unless these tensors are those that are averaged."""
        expected = {name: tensor.shape for name, tensor in self.averages[0].tensors.items()}
        found = {name: tensor.shape for name, tensor in averaged.items()}
        what = f"{self.options.owner}: the model is not the one that is averaged"
        try:
            check_match(what, expected, found)
        except NameMismatchError as error:
            add_note(error, MSG_REBIND)
            raise

    def begin(self, plan: Plan) -> bool:
        """Copy the values; return False if that would copy values that are to be skipped."""
        if self.options.on_nonfinite == "skip" and first_nonfinite_of(plan) is not None:
            # This is the only host sync of an update.
            return False
        self.begun = True
        self.step(plan, [1.0] * len(self.averages), 0)
        return True

    def step(self, plan: Plan, weights: Sequence[float], n: int) -> None:
        """Move each average by its weight towards the present values.

        Args:
            plan: The tensors.
            weights: One for each average.
            n: Number of the step; 0 is the copy.
        """
        if self._worker is None or plan.staging is None:
            self._step(plan, weights, n)
            plan.copies.run()
            return
        self._worker.flush()
        found = {
            key: source
            for (_, key, _), source in zip(plan.copies.pairs, plan.copies.sources(), strict=True)
            if source is not None
        }
        host = {
            key: source.detach().to("cpu", copy=True, non_blocking=True)
            for key, source in found.items()
        }
        events = plan.staging.fill() + events_on({source.device for source in found.values()})

        def task() -> None:
            for event in events:
                event.synchronize()
            self._step(plan, weights, n)
            self._copies.update(host)

        self._worker.submit(task)

    def _step(self, plan: Plan, weights: Sequence[float], n: int) -> None:
        moves = [
            weight
            for average, weight in zip(self.averages, weights, strict=True)
            if average.moved is not None
        ]
        policy = self.options.on_nonfinite if n else "ignore"
        finite = step(plan, lambda group, flag: group.step(moves, flag), policy)
        if finite is not None and reads_are_free(finite.device):
            return
        for average in self.averages:
            average.observe(plan.taken, n, finite)

    # Reading.

    def named(self, index: int) -> dict[str, Tensor]:
        """Return an average and the copies by name; nothing before the first step."""
        self.flush()
        if not self.begun:
            return {}
        copies = {name: copy for name, copy in self._copies.items() if copy is not None}
        return {**self.averages[index].values(), **copies}

    def pairs(self, model: torch.nn.Module, index: int) -> Pairs:
        """Pair an average with the tensors of a model."""
        # Only then can it be seen whether the tensors are others.
        reshard(model.modules())
        return self._swaps.get(model, self.named(index))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the copies. Tensors are not copied."""
        self.flush()
        copies = {name: copy for name, copy in self._copies.items() if copy is not None}
        return {"averages": [one.state_dict() for one in self.averages], "buffers": copies}

    # Changes.

    def load(self, loaded: ema_state.LoadedState, named: NamedTensors) -> None:
        """Load a state; it is checked before anything is changed."""
        bound, wanted, found = ema_state.matched(loaded, named, self.options)
        # The kind of an average depends on its schedule.
        averages = [average_for(schedule, self.options) for schedule in loaded.schedules]
        for average, state, tensors in zip(averages, loaded.averages, found, strict=True):
            average.start(bound)
            average.load_state_dict({**state, "tensors": tensors})
        copies = {
            name: value.to(self.options.device, copy=True)
            for name, value in loaded.buffers.items()
            if name in wanted
        }
        self.reset()
        self.averages, self._copies, self.begun = averages, copies, True

    def reset(self) -> None:
        """Forget everything, so that the next step is the first one."""
        if self._worker is not None:
            self._worker.forget()
        self._cache = PlanCache()
        self.begun, self._copies = False, {}
        for average in self.averages:
            average.reset()

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Move and cast the averages, and those to come."""
        self.flush()
        options = replace(
            self.options,
            device=device if device is not None else self.options.device,
            dtype=dtype if dtype is not None else self.options.dtype,
        )
        known = self.averages[0].tensors
        averaged, _ = options.split(NamedTensors(self.model), known)
        if known:
            self._check_known(averaged)
        self.options, self._cache = options, PlanCache()
        for average in self.averages:
            if known:
                average.cast(options, averaged)
            else:
                average.set_options(options)
        if device is not None:
            self._copies = {
                name: None if copy is None else copy.to(device)
                for name, copy in self._copies.items()
            }

    def rebind(self) -> None:
        """Take in parameters that the model has got, and drop those that it has lost."""
        self.flush()
        named = NamedTensors(self.model)
        _check_materialized(named)
        if not self.begun:
            self.reset()
            return
        averaged, _ = self.options.split(named, self.averages[0].tensors)
        if not averaged:
            raise ValueError(f"{self.options.owner}: {MSG_NOTHING_CHOSEN}")
        self._check_new(averaged)
        names = named.names()
        self._cache = PlanCache()
        for average in self.averages:
            average.resize(averaged)
        self._copies = {name: copy for name, copy in self._copies.items() if name in names}

    def _check_new(self, averaged: Tensors) -> None:
        """Raise if a parameter is not finite whose average would start as a copy of it."""
        if self.options.on_nonfinite == "ignore":
            return
        known = self.averages[0].tensors
        new = {
            name: tensor
            for name, tensor in averaged.items()
            if name not in known or known[name].shape != tensor.shape
        }
        bad = _first_bad({n: local_shard(t) for n, t in new.items()}, meshes_of(new.values()))
        if bad is not None:
            raise RuntimeError(f"EMA: {bad} is not finite. Nothing has been changed.")

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: all but the worker thread."""
        self.flush()
        return {**vars(self), "_worker": None if self._worker is None else Worker()}


class PairCache(_Cache):
    """Keeps the pairs of an average with the tensors of a model while neither has changed."""

    def __init__(self) -> None:
        self._model: Any = None
        self._watch: Watch | None = None
        self._values: Mapping[str, Tensor] = {}
        self._pairs = Pairs()

    def get(self, model: torch.nn.Module, values: Mapping[str, Tensor]) -> Pairs:
        """Return the pairs.

        Raises:
            NameMismatchError: The averages do not fit the model.
        """
        with IdentityOnly():
            known = values == self._values
        same = known and self._model is not None and self._model() is model
        if not same or self._watch is None or self._watch.changed():
            self._watch = None
            named = NamedTensors(model)
            self._pairs, self._values = pairs_for(named, values), values
            if not named.has_lazy():
                self._watch = Watch([named], [one for _, one, _ in self._pairs], buffers=True)
            self._model = self._reference(model)
        return self._pairs


def _check_materialized(named: NamedTensors) -> None:
    if named.has_lazy():
        raise RuntimeError("EMA: a parameter is uninitialized; call the model once before update()")
    for name, member in named.parameters.items():
        if member.tensor.is_meta:
            raise RuntimeError(
                f"EMA: {name} is on the meta device and has no values; call model.to_empty() and "
                "initialize or load the model before update(). Nothing has been changed."
            )


def first_nonfinite_of(plan: Plan) -> str | None:
    """Return the first name with values that are not finite; all ranks see that together."""
    return _first_bad(plan.shards, plan.meshes)


def _first_bad(shards: Tensors, meshes: Iterable[Any]) -> str | None:
    bad = first_nonfinite(list(shards.items()))
    fine = true_everywhere(torch.tensor(bad is None, device="cpu"), meshes)
    return None if fine else bad or "a parameter on another rank"


def _check_not_sharded(averaged: Mapping[str, Tensor]) -> None:
    sharded = next((name for name, tensor in averaged.items() if is_sharded(tensor)), None)
    if sharded is not None:
        raise ValueError(
            f"EMA: {sharded} is sharded, so on_nonfinite='skip' needs a collective, which cannot run "
            "in a thread (asynchronous=True). Use on_nonfinite='raise' or asynchronous=False."
        )
