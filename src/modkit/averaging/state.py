"""Read and validate the states that ``EMA.load_state_dict`` accepts.

These are the states of ``modkit.EMA``, of other libraries, and plain averaged weights. An invalid
state is a ``ValueError``, raised before anything changes.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from modkit.averaging import schedules as decays
from modkit.averaging.foreign_states import Converted, State, added, convert
from modkit.averaging.named_tensors import Member, NamedTensors
from modkit.averaging.names import check_match, shapes_of
from modkit.averaging.options import Options
from modkit.averaging.precision import first_nonfinite, is_averaged
from modkit.averaging.schedules import Schedule
from modkit.averaging.state_checks import (
    AVERAGE,
    COPY,
    OWN,
    CheckedMapping,
    described,
    invalid_state,
)


# The version of the format. States of version 1 hold the keys that ``_read_own`` requires, and
# since later releases "raw", "stepped" and "statistics" if there are any.
VERSION: Final = 1


@dataclass
class LoadedState:
    """A valid state, whose names and shapes :func:`matched` compares with the model.

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
        foreign: True for states of other libraries, which may hold tensors that are not averaged.
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


def stored_average(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a state holds of an average without random generators.

    Args:
        tensors: The averages by name.

    Returns:
        A dict like :meth:`Average.state_dict`.
    """
    return {"tensors": tensors, "generators": {}}


def read(
    state: State,
    model: torch.nn.Module,
    *,
    schedules: list[Schedule],
    update_every: int,
    update_after_step: int,
    on_nonfinite: str = "ignore",
    step: int | None = None,
) -> LoadedState:
    """Read and validate a state for an ``EMA`` that averages ``model`` with these options.

    An empty state starts anew, with a warning.

    Args:
        state: The state.
        model: The model that is averaged.
        schedules: The schedule of each average. Those of the state take precedence, with a warning.
        update_every: The option, as ``schedules``.
        update_after_step: The option, as ``schedules``.
        on_nonfinite: The option; values that are not finite are refused unless it is ``"ignore"``.
        step: Number of calls of ``update()`` so far, for a state without a counter.

    Returns:
        The valid state. Its names and shapes are not compared with the model yet.

    Raises:
        ValueError: If the state is of another kind, version or number of averages, if an entry is
            missing or invalid, or not finite unless ``on_nonfinite`` is ``"ignore"``, or if
            ``step`` is given for a state that has its own counter.
        NameMismatchError: If the training weights in the state do not fit the model.
    """  # noqa: DOC501 - invalid_state() makes a ValueError
    CheckedMapping(OWN, state)
    if not state:
        if step is not None:
            raise invalid_state(f"load_state_dict() got step={step} and an empty state")
        warnings.warn("EMA: the state is empty, so averaging starts anew", stacklevel=3)
        nothing = Converted("nothing", {}, n_averaged=0)
        return _started(nothing, schedules, every=update_every, after=update_after_step)

    # A state of ``EMA`` without its version is corrupt, and not of another library.
    foreign = "version" not in state and not {"averages", "schedules"} <= state.keys()
    if foreign:
        converted = convert(state, model)
        loaded = _started(
            converted, schedules, every=update_every, after=update_after_step, step=step
        )
        if step is None and not converted.has_counter:
            _warn_of_no_counter(converted.source, loaded)
    elif step is not None:
        raise invalid_state(
            f"load_state_dict() got step={step}, but a state of {OWN} holds its own counter. Load "
            "it without step"
        )
    else:
        loaded = _read_own(CheckedMapping(OWN, _with_empty_parts(state)), model, schedules)

    if on_nonfinite != "ignore" and loaded.start is not None:
        _check_finite(loaded.averages, on_nonfinite)
    if foreign:
        return loaded

    options: list[tuple[str, object, object]] = [
        ("the schedule", saved, given)
        for saved, given in zip(loaded.schedules, schedules, strict=True)
    ]
    options.append(("update_every", loaded.update_every, update_every))
    options.append(("update_after_step", loaded.update_after_step, update_after_step))
    for name, saved, given in options:
        if saved != given:
            warnings.warn(
                f"EMA: {name} is {saved} from here on, as in the loaded state, and not {given}",
                stacklevel=3,
            )
    return loaded


def _read_own(
    checked: CheckedMapping, model: torch.nn.Module, schedules: list[Schedule]
) -> LoadedState:
    """Read a state of ``EMA``: every number, name and tensor in it is validated."""
    state = checked.values
    least = {"step": 0, "n_averaged": 0, "update_every": 1, "update_after_step": 0}
    checked.require(("version", *least, "start", "schedules", "averages", "buffers"))
    version = checked.integer("version", 1)
    if version > VERSION:
        raise invalid_state(f"the state has version {version}, newer than {VERSION}; update modkit")

    # The average began at call ``start``, and has at most one model of each call from there on.
    counts: dict[str, Any] = {name: checked.integer(name, least[name]) for name in least}
    start: int | None = None
    if counts["n_averaged"]:
        start = checked.integer("start", 1, counts["step"])
        checked.integer("n_averaged", 0, counts["step"] - start + 1)
    elif state["start"] is not None:
        checked.refuse("start", "None, as n_averaged is 0")

    configs = checked.each("schedules")
    averages = checked.each("averages")
    if not configs:
        checked.refuse("schedules", "a list that is not empty")
    if len(configs) != len(schedules):
        raise invalid_state(
            f"the state holds {len(configs)} averages, and this object {len(schedules)}"
        )
    if len(averages) != len(schedules):
        checked.refuse("averages", f"a list of {len(schedules)}, one for each schedule")

    return LoadedState(
        **counts,
        start=start,
        schedules=[_schedule(*pair) for pair in zip(configs, schedules, strict=True)],
        averages=list(map(_average, averages)),
        buffers=checked.inside("buffers").tensors(COPY),
        raw=_raw(checked.inside("raw"), model) if "raw" in state else {},
        stepped=_stepped(checked) if "stepped" in state else frozenset(),
    )


def _stepped(checked: CheckedMapping) -> frozenset[int]:
    """Return the indices of attached optimizers that had stepped in an unfinished training step."""
    indices = checked.get("stepped", "a list")
    if any(type(index) is not int or index < 0 for index in indices):
        checked.refuse("stepped", "a list of indices of optimizers")
    if len(set(indices)) != len(indices):
        checked.refuse("stepped", "a list without duplicates")
    return frozenset(indices)


def _plain(value: object) -> object:
    """Return the value as JSON has it: lists for tuples, dicts for mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _schedule(checked: CheckedMapping, current: Schedule) -> Schedule:
    """Return the ``EMA``'s schedule if the state has an equal one, or else that of the state.

    Functions and subclasses cannot be made from a state: code is never taken from a file.

    Args:
        checked: The configuration of the schedule in the state.
        current: The schedule of the ``EMA``.

    Returns:
        ``current`` if its configuration is equal, else a schedule created from the state.

    Raises:
        ValueError: If they differ and no equal schedule can be created from the state.
    """  # noqa: DOC501 - invalid_state() makes a ValueError
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
    """Return what a state holds of an average."""
    checked.require(("tensors", "generators"))
    tensors = checked.inside("tensors").tensors(AVERAGE)
    # Earlier versions kept what rounding had lost of an average beside it.
    rests = checked.inside("rests").tensors(AVERAGE) if "rests" in checked.values else {}
    average = {
        "tensors": added(tensors, rests, checked.path),
        "generators": _generators(checked.inside("generators")),
    }
    # Only states that were saved after ``update_bn`` have the entry.
    if "statistics" in checked.values:
        average["statistics"] = checked.inside("statistics").tensors()
    return average


def _generators(checked: CheckedMapping) -> dict[str, Tensor]:
    """Return the states of random generators, without those of devices that do not exist here."""
    states: dict[str, Tensor] = {}
    for name, value in checked.tensors().items():
        if value.dtype != torch.uint8 or value.dim() != 1:
            checked.refuse(name, "a one-dimensional tensor of dtype torch.uint8")
        try:
            device = torch.device(name)
        except RuntimeError:
            checked.refuse(name, "under the name of a device")

        try:
            generator = torch.Generator(device=device)
        except RuntimeError:
            # A state that was saved on a machine with an accelerator loads on one without it.
            continue
        try:
            generator.set_state(value.cpu())
        except RuntimeError as error:
            checked.refuse(name, f"the state of a generator ({str(error).splitlines()[0]})")
        states[name] = value
    return states


def _raw(checked: CheckedMapping, model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the training weights of a state from inside ``applied``, which go into the model."""
    weights = checked.tensors(COPY)
    # Not all of a model is swapped, so the state may hold fewer names, but no others.
    members = NamedTensors(model).all() if weights else {}
    members = {name: members[name] for name in weights if name in members}

    shapes = {name: member.required_shape() for name, member in members.items()}
    problem = "EMA: the training weights of the state do not fit the model"
    check_match(problem, shapes, shapes_of(weights))
    for name, member in members.items():
        if weights[name].is_complex() != member.tensor.is_complex():
            checked.refuse(name, f"of a dtype like {member.tensor.dtype}")
    _check_layouts(weights, members.values())
    return weights


def _with_empty_parts(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Restore the empty dicts and lists of a state, which ``torch.distributed.checkpoint`` drops.

    Args:
        state: A state of ``EMA`` that was read from such a checkpoint, or something else.

    Returns:
        A new state, or ``state`` itself if it is invalid.
    """
    schedules = state.get("schedules")
    if not isinstance(schedules, list):
        # ``_read_own`` says what is wrong with it.
        return state

    # Before the first update nothing is stored of any average.
    averages: Any = state.get("averages", [{}] * len(schedules))
    if not isinstance(averages, list):
        return state
    empty = stored_average({})
    filled = [{**empty, **a} if isinstance(a, Mapping) else a for a in averages]
    return {"buffers": {}, **state, "averages": filled}


def matched(
    loaded: LoadedState, members: NamedTensors, options: Options
) -> tuple[dict[str, Tensor], set[str], list[dict[str, Tensor]]]:
    """Compare the names and shapes of a state with those of a model.

    A lazy model has no shapes yet, and takes every name of the state.

    Args:
        loaded: A valid state with averages.
        members: The tensors of the model.
        options: The options of the averages, which select tensors.

    Returns:
        The model's averaged tensors by name, or the saved ones for a lazy model; the names of
        copied buffers; and the tensors of each average.

    Raises:
        NameMismatchError: If names or shapes of an average, or of its statistics, are not those of
            the model.
        ValueError: If an average is complex and its parameter real, or the other way round, or if
            a buffer has another layout than that of the model.
    """  # noqa: DOC501 - invalid_state() makes a ValueError
    averaged: dict[str, Tensor] = dict(loaded.averages[0]["tensors"])
    copied = set(loaded.buffers)
    if not members.has_lazy():
        averaged, others = options.split(members, averaged)
        copied = {member.name for member in others}
        _check_layouts(loaded.buffers, others)

    tensors_of_each = [dict(average["tensors"]) for average in loaded.averages]
    for tensors in tensors_of_each:
        if loaded.foreign:
            # Other libraries save tied tensors under each name, and tensors that are not averaged.
            for alias, name in members.aliases.items():
                if alias in tensors:
                    tensors.setdefault(name, tensors[alias])
            for name in tensors.keys() & (members.names() - averaged.keys()):
                del tensors[name]

        check_match(
            "EMA: the state does not fit the model", shapes_of(averaged), shapes_of(tensors)
        )
        for name, member in averaged.items():
            average = tensors[name]
            is_like = is_averaged(average) and average.is_complex() == member.is_complex()
            if not is_like or average.layout != torch.strided:
                raise invalid_state(
                    f"the state does not fit the model: the average of {name} must be of a dtype "
                    f"like {member.dtype} and dense, got {described(average)}"
                )

    if not members.has_lazy():
        for stored in loaded.averages:
            _check_statistics(stored.get("statistics", {}), members)
    return averaged, copied, tensors_of_each


def _check_layouts(tensors: Mapping[str, Tensor], members: Iterable[Member]) -> None:
    """Raise ValueError unless saved tensors are sparse where those of the model are."""
    for member in members:
        saved = tensors.get(member.name, member.tensor)
        if saved.layout != member.tensor.layout:
            raise invalid_state(
                f"the state does not fit the model: {member.name} must be of layout "
                f"{member.tensor.layout}, got {described(saved)}"
            )


def _check_statistics(statistics: Mapping[str, Tensor], members: NamedTensors) -> None:
    """Raise NameMismatchError unless statistics have the shapes of the model's buffers."""
    # The model may have lost a layer since; its statistics are dropped.
    present = {name: value for name, value in statistics.items() if name in members.buffers}
    expected = {name: members.buffers[name].tensor.shape for name in present}
    check_match("EMA: the state does not fit the model", expected, shapes_of(present))


def _check_finite(averages: list[Mapping[str, Any]], on_nonfinite: str) -> None:
    """Raise ValueError, with the path in the state, if a value is not finite."""
    tensors = {
        f"averages[{index}]['tensors'][{name!r}]": tensor
        for index, average in enumerate(averages)
        for name, tensor in average["tensors"].items()
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

    Args:
        converted: The averages, and what their state says about the updates so far.
        schedules: The schedule of each average, which a decay in the state replaces.
        every: The option ``update_every``.
        after: The option ``update_after_step``, which that of the state replaces.
        step: Number of calls of ``update()`` so far, if the user has given it. It takes precedence
            over the counters of the state.
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
        averages=[stored_average(converted.averages)] * len(schedules),
        buffers=converted.averages,
        foreign=True,
    )


def _warn_of_no_counter(source: str, loaded: LoadedState) -> None:
    """Warn if the number of updates so far matters, and the state does not hold it."""
    after = loaded.update_after_step
    if not after and all(map(decays.is_constant, loaded.schedules)):
        return

    state_holds = "plain weights hold" if source == "weights" else f"the state of {source} holds"
    schedules = ", ".join(map(str, loaded.schedules))
    warnings.warn(
        f"EMA: {state_holds} no counter, so it is taken for that of the first update "
        f"(step={after + 1}), from which {schedules} continues. After more updates pass the "
        "number of calls of update(), as in load_state_dict(state, step=1000).",
        stacklevel=4,
    )
