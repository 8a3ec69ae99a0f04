"""Read the states that ``EMA.load_state_dict`` accepts, and match them with a model.

These are the states of ``modkit.EMA``, of other libraries, and plain averaged weights. Version,
counts, names and shapes are checked; everything else is built, and the engine commits it at the
end. What nothing can be made of is a ``ValueError`` with its path, before anything changes.
"""

import operator
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from modkit._messages import add_note, warn_user
from modkit.averaging import schedules as decays
from modkit.averaging.foreign_states import Converted, State, convert
from modkit.averaging.options import Options
from modkit.averaging.precision import first_nonfinite, is_averaged
from modkit.averaging.schedules import Schedule
from modkit.averaging.state_checks import (
    OWN,
    CheckedMapping,
    constructing,
    described,
    invalid_state,
)
from modkit.averaging.tensors import Member, NamedTensors, canonical_name, check_match, shapes_of
from modkit.errors import MigrationError, NameMismatchError


# The version of the format. States of version 1 hold the keys that ``_read_own`` requires, and
# since later releases "raw", "stepped" and "statistics" if there are any.
VERSION: Final = 1
_MISFIT: Final = "EMA: the state does not fit the model"


@dataclass
class LoadedState:
    """A state, whose names and shapes :func:`matched` compares with the model.

    Attributes:
        step: Number of calls of ``EMA.update()`` so far.
        start: The call that copied the model, or None before it.
        n_averaged: Number of models in the average, including the initial copy.
        schedules: The schedule of each average.
        averages: What is stored of each, as :func:`stored_average` has it; not used if ``start`` is
            None.
        update_every: Number of calls between averaged models.
        update_after_step: Number of calls before the first one.
        buffers: Copied tensors by name.
        raw: Training weights, if the state was saved while the model held an average.
        stepped: Indices of the attached optimizers that had stepped in an unfinished training step.
        foreign: True for states of other libraries, whose precision is not that of the average.
        mixed: True if the averages may hold tensors that are not averaged.
        versions: The versions of the model's modules by path, as a state dict's ``_metadata``, or
            without those that are 1; None if they are unknown.
        first_shares: The weight of the first model in each average; None if it is unknown.
    """

    step: int
    start: int | None
    n_averaged: int
    schedules: list[Schedule]
    averages: list[Mapping[str, Any]]
    update_every: int = 1
    update_after_step: int = 0
    buffers: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    raw: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    stepped: frozenset[int] = frozenset()
    foreign: bool = False
    mixed: bool = False
    versions: Mapping[str, Any] | None = None
    first_shares: list[float] | None = None


def versions_of(model: torch.nn.Module) -> dict[str, int]:
    """Return the versions of a model's modules by path, without those that are 1 but its own."""
    versions: dict[str, int] = {"": 1}
    for path, module in model.named_modules(remove_duplicate=False):
        # Of a wrapper and its module, which have one path, the module comes last.
        if module._version != 1:
            versions[_path(path)] = module._version
    return versions


def _path(path: str) -> str:
    """Return the canonical path of a module, from the name that a tensor of it would have."""
    return canonical_name(f"{path}._".lstrip(".")).rpartition(".")[0]


@contextmanager
def migrated(loaded: LoadedState, model: torch.nn.Module) -> Generator[LoadedState]:
    """Yield a state after the migrations that classes of the model declare, for a block to load."""
    if not any(hasattr(type(module), "__migrations__") for module in model.modules()):
        yield loaded
        return
    # Canonical names are those below such a wrapper.
    while [*model._modules] == ["module"]:
        model = model.get_submodule("module")

    # Declaring imports that package, which nothing else may.
    migrations: Any = sys.modules["modkit.migrations"]
    state: dict[str, Any] = {
        "version": VERSION,
        "schedules": [],
        "averages": [
            {**stored, "tensors": {**stored["tensors"], **_sums(index, stored)}, "rests": {}}
            for index, stored in enumerate(loaded.averages)
        ],
        "buffers": {} if loaded.foreign else loaded.buffers,
        "raw": loaded.raw,
        "versions": loaded.versions,
    }
    new = migrations.migrate(model, state)
    averages = new["averages"]
    buffers = averages[0]["tensors"] if loaded.foreign else new["buffers"]
    try:
        yield replace(loaded, averages=averages, buffers=buffers, raw=new["raw"], mixed=True)
    except NameMismatchError as error:
        with suppress(MigrationError):
            changes = migrations.plan(model, {**state, "versions": None})
            if changes and loaded.versions is not None:
                add_note(
                    error,
                    f"The names are of an older version than the state says: {changes[0]}. Load "
                    "what modkit.migrations.migrate(model, state, versions=...) returns.",
                )
        raise


def stored_average(
    tensors: Mapping[str, Tensor], rests: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return what a state holds of an average without generators and statistics."""
    return {"tensors": tensors, "generators": {}, "statistics": {}, "rests": rests or {}}


def read(
    state: State,
    model: torch.nn.Module,
    *,
    schedules: list[Schedule],
    update_every: int,
    update_after_step: int,
    n_averaged: int = 0,
    step: int | None = None,
) -> LoadedState:
    """Read a state for an ``EMA`` of ``model`` with these options and this number of models.

    Schedules of the state take precedence, with a warning. ``step`` is the number of calls of
    ``update()`` so far, for a state without a counter. An invalid state is a ValueError.
    """
    CheckedMapping(OWN, state)
    if not state:
        if step is not None:
            raise invalid_state(f"load_state_dict() got step={step} and an empty state")
        warn_user("EMA: the state is empty, so averaging starts anew")
        nothing = Converted("nothing", {}, n_averaged=0)
        return _started(nothing, schedules, every=update_every, after=update_after_step)

    # A state of ``EMA`` without its version is corrupt, and not of another library.
    if "version" not in state and not {"averages", "schedules"} <= state.keys():
        converted = convert(state, model)
        loaded = _started(
            converted, schedules, every=update_every, after=update_after_step, step=step
        )
        with constructing("_metadata"):
            metadata = getattr(state.get("state_dict", state), "_metadata", None)
            if metadata is not None:
                known = {_path(path): entry.get("version") for path, entry in metadata.items()}
                loaded.versions = {path: known[path] for path in known if known[path] is not None}
        if step is None and not converted.has_counter:
            _warn_of_no_counter(converted.source, loaded, n_averaged)
        return loaded

    if step is not None:
        raise invalid_state(
            f"load_state_dict() got step={step}, but a state of {OWN} holds its own counter. Load "
            "it without step"
        )
    loaded = _read_own(CheckedMapping(OWN, _with_empty_parts(state)), schedules)

    options: list[tuple[str, object, object]] = [
        ("the schedule", saved, given)
        for saved, given in zip(loaded.schedules, schedules, strict=True)
    ]
    options.append(("update_every", loaded.update_every, update_every))
    options.append(("update_after_step", loaded.update_after_step, update_after_step))
    for name, saved, given in options:
        if saved != given:
            warn_user(
                f"EMA: {name} is {saved} from here on, as in the loaded state, and not {given}"
            )
    return loaded


def _read_own(checked: CheckedMapping, schedules: list[Schedule]) -> LoadedState:
    """Read a state of ``EMA``."""
    version = checked.integer("version", 1)
    if version > VERSION:
        raise invalid_state(f"the state has version {version}, newer than {VERSION}; update modkit")

    # The average began at call ``start``, and has at most one model of each call from there on.
    least = {"step": 0, "n_averaged": 0, "update_every": 1, "update_after_step": 0}
    counts: dict[str, Any] = {name: checked.integer(name, least[name]) for name in least}
    start: int | None = None
    if counts["n_averaged"]:
        start = checked.integer("start", 1, counts["step"])
        checked.integer("n_averaged", 0, counts["step"] - start + 1)
    elif checked.get("start") is not None:
        checked.refuse("start", "None, as n_averaged is 0")

    configs = checked.each("schedules")
    averages = checked.each("averages")
    if not len(configs) == len(averages) == len(schedules):
        raise invalid_state(
            f"the state holds {len(averages)} averages with {len(configs)} schedules, and this "
            f"object {len(schedules)}"
        )

    values = checked.values
    with constructing("stepped"):
        stepped = frozenset(index for index in values.get("stepped", ()) if index >= 0)
    with constructing("versions"):
        versions = values.get("versions")
        if versions is not None:
            versions = {str(path): operator.index(version) for path, version in versions.items()}
    with constructing("first_shares"):
        shares = [float(share) for share in values.get("first_shares") or ()]
        if len(shares) not in (0, len(schedules)):
            raise ValueError(f"there are {len(schedules)} averages")

    return LoadedState(
        **counts,
        start=start,
        schedules=[_schedule(*pair) for pair in zip(configs, schedules, strict=True)],
        averages=list(map(_average, averages)),
        buffers=checked.inside("buffers").tensors(),
        raw=checked.inside("raw").tensors() if "raw" in values else {},
        versions=versions,
        stepped=stepped,
        first_shares=shares or None,
    )


def _plain(value: object) -> object:
    """Return the value as JSON has it: lists for tuples, dicts for mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _schedule(checked: CheckedMapping, current: Schedule) -> Schedule:
    """Return ``current``, the schedule of the ``EMA``, if the state has an equal one, or its own.

    Functions and subclasses cannot be made from a state: code is never taken from a file.
    """
    config = _plain(checked.values)
    try:
        if config == _plain(current.to_config()):
            return current

        saved = decays.from_config(checked.values)
        error: object = f"its fields must be those of {saved}"
        if config == _plain(saved.to_config()):
            return saved
    except (TypeError, ValueError, OverflowError, RuntimeError) as failed:
        # A tensor has no truth value, and an int may be too large for a float.
        error = failed

    raise invalid_state(
        f"{checked.path} of the state, {described(dict(checked.values))}, cannot be created: "
        f"{error}. If it was a function or a subclass of Schedule, pass an equal one to EMA as "
        f"schedule=; this one has {current}"
    )


def _average(checked: CheckedMapping) -> dict[str, Any]:
    """Return what a state holds of an average; of its parts, only those that are needed exist."""
    parts = {
        part: checked.inside(part).tensors() if part in checked.values else {}
        for part in stored_average({})
    }
    return {**parts, "generators": _generators(checked.key("generators"), parts["generators"])}


def _generators(path: str, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the states of random generators, without those of devices that do not exist here."""
    present: dict[str, Tensor] = {}
    for name, state in states.items():
        with constructing(f"{path}[{name!r}]"):
            device = torch.device(name)
            try:
                generator = torch.Generator(device=device)
            except RuntimeError:
                # A state that was saved on a machine with an accelerator loads on one without it.
                continue
            generator.set_state(state.cpu())
        present[name] = state
    return present


def check_raw(raw: Mapping[str, Tensor], named: NamedTensors) -> None:
    """Check the training weights of a state from inside ``applied``, which go into the model."""
    # Not all of a model is swapped, so the state may hold fewer names, but no others.
    members = {name: member for name, member in named.all().items() if name in raw}
    shapes = {name: member.required_shape() for name, member in members.items()}
    problem = "EMA: the training weights of the state do not fit the model"
    check_match(problem, shapes, shapes_of(raw))
    _check_copies("raw", raw, members.values())


def _with_empty_parts(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Restore the empty dicts and lists of a state, which ``torch.distributed.checkpoint`` drops.

    Before the first update nothing is stored of any average.
    """
    schedules = state.get("schedules")
    count = len(schedules) if isinstance(schedules, list) else 0
    return {"buffers": {}, "averages": [{}] * count, **state}


def matched(
    loaded: LoadedState, members: NamedTensors, options: Options
) -> tuple[dict[str, Tensor], set[str], list[dict[str, Tensor]]]:
    """Compare the names and shapes of a state with those of a model.

    A lazy model has no shapes yet, and takes every name of the state. It returns the model's
    averaged tensors by name, or the saved ones for a lazy model; the names of copied buffers; and
    the tensors of each average.
    """
    # Nothing is computed over a tensor whose shape has not been compared: a file of a few bytes may
    # expand one to any size.
    averaged: dict[str, Tensor] = dict(loaded.averages[0]["tensors"])
    copied = set(loaded.buffers)
    if not members.has_lazy():
        averaged, others = options.split(members, averaged)
        copied = {member.name for member in others}
        _check_copies("buffers", loaded.buffers, others)

    tensors_of_each = [dict(stored["tensors"]) for stored in loaded.averages]
    for index, tensors in enumerate(tensors_of_each):
        if loaded.mixed:
            # Other libraries save tied tensors under each name, and tensors that are not averaged.
            for alias, name in members.aliases.items():
                if alias in tensors:
                    tensors.setdefault(name, tensors[alias])
            for name in tensors.keys() & (members.names() - averaged.keys()):
                del tensors[name]

        stored = loaded.averages[index]
        check_match(_MISFIT, shapes_of(averaged), shapes_of(tensors))
        if not members.has_lazy():
            # The model may have lost a layer since; its statistics are dropped.
            statistics = {n: t for n, t in stored["statistics"].items() if n in members.buffers}
            present = {name: members.buffers[name].tensor.shape for name in statistics}
            check_match(_MISFIT, present, shapes_of(statistics))

        for name, member in averaged.items():
            average = tensors[name]
            is_like = is_averaged(average) and average.is_complex() == member.is_complex()
            if not is_like or average.layout != torch.strided:
                raise invalid_state(
                    f"averages[{index}]['tensors'][{name!r}] of the state must be of a dtype like "
                    f"{member.dtype} and dense, got {described(average)}"
                )
        tensors.update(_sums(index, stored))

    if options.on_nonfinite != "ignore":
        _check_finite(tensors_of_each, options.on_nonfinite)
    return averaged, copied, tensors_of_each


def _sums(index: int, stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return averages with what earlier versions kept beside them: what rounding had lost."""
    sums: dict[str, Tensor] = {}
    for name, rest in stored["rests"].items():
        average = stored["tensors"].get(name)
        path = f"averages[{index}]['rests'][{name!r}]"
        if average is None or average.shape != rest.shape:
            raise invalid_state(f"{path} of the state does not belong to an average")
        # More bits than both have, so that the sum loses nothing.
        with constructing(path):
            wide = torch.promote_types(average.dtype, torch.float64)
            sums[name] = average.to(wide).add(rest)
    return sums


def _check_copies(path: str, tensors: Mapping[str, Tensor], members: Iterable[Member]) -> None:
    """Raise ValueError for a saved tensor that cannot be copied in place of that of the model."""
    for member in members:
        like = member.tensor
        saved = tensors.get(member.name, like)
        is_like = saved.layout == like.layout and saved.is_complex() == like.is_complex()
        # Buffers may have had another shape, but a state has memory for each element.
        has_memory = (
            saved.shape == like.shape or saved.layout != torch.strided or 0 not in saved.stride()
        )
        if not (is_like and has_memory):
            raise invalid_state(
                f"{path}[{member.name!r}] of the state must be like {described(like)}, got "
                f"{described(saved)}"
            )


def _check_finite(tensors_of_each: list[dict[str, Tensor]], on_nonfinite: str) -> None:
    """Raise ValueError, with the path in the state, if a value is not finite."""
    tensors = {
        f"averages[{index}]['tensors'][{name!r}]": tensor
        for index, average in enumerate(tensors_of_each)
        for name, tensor in average.items()
    }

    # One test of all tensors, in which all ranks of a sharded model take part.
    path = first_nonfinite(tensors)
    if path is not None:
        raise invalid_state(
            f"the loaded averages must be finite with on_nonfinite={on_nonfinite!r}: {path} "
            "contains inf or nan"
        )


def _started(
    converted: Converted,
    schedules: list[Schedule],
    *,
    every: int,
    after: int,
    step: int | None = None,
) -> LoadedState:
    """Return the state of an ``EMA`` that continues averages of another library.

    ``every`` and ``after`` are the options, and ``step`` the number of calls of ``update()`` so far
    if the user has given it, which takes precedence over the counters of the state.
    """
    if converted.update_after_step is not None:
        after = converted.update_after_step
    first = after + 1

    def count_at(calls: int) -> int:
        # One model of call ``first``, and one every ``every`` calls from there on.
        return max(0, 1 + (calls - first) // every)

    # The number of the user counts first, then the library's counter of calls, unless its count of
    # models says something else; then its count of models alone.
    if step is not None:
        calls = step
    elif converted.step is not None and converted.n_averaged in (None, count_at(converted.step)):
        calls = converted.step
    else:
        # Lightning saves both numbers, and its steps are not calls where a ``should_update()`` of
        # the user skips some.
        models = 1 if converted.n_averaged is None else converted.n_averaged
        calls = first + (models - 1) * every if models else 0

    count = count_at(calls)
    return LoadedState(
        step=calls,
        # Until the first update there is no average: what the library holds is a copy of the
        # weights.
        start=first if count else None,
        n_averaged=count,
        update_every=every,
        update_after_step=after,
        schedules=[converted.schedule or schedule for schedule in schedules],
        averages=[stored_average(converted.averages, converted.rests)] * len(schedules),
        buffers=converted.averages,
        foreign=True,
        mixed=True,
    )


def _warn_of_no_counter(source: str, loaded: LoadedState, n_averaged: int) -> None:
    """Warn if a state without a counter ends an average, or the number of updates matters."""
    after = loaded.update_after_step
    is_constant = not after and all(map(decays.is_constant, loaded.schedules))
    if is_constant and not n_averaged:
        return

    state_holds = "plain weights hold" if source == "weights" else f"the state of {source} holds"
    schedules = ", ".join(map(str, loaded.schedules))
    replaced = f" It replaces an average of {n_averaged} models." if n_averaged else ""
    warn_user(
        f"EMA: {state_holds} no counter, so it is taken for that of the first update "
        f"(step={after + 1}), from which {schedules} continues.{replaced} After more updates pass "
        "the number of calls of update(), as in load_state_dict(state, step=1000)."
    )
