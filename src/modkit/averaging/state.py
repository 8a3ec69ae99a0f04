"""Read and validate the states that ``EMA.load_state_dict`` accepts.

These are the states of ``modkit.EMA``, of other libraries, and plain averaged weights. An invalid state
is a ``ValueError``, raised before anything changes.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from modkit.averaging import schedules as decays
from modkit.averaging.foreign_states import Converted, State, convert
from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.names import check_match, shapes_of
from modkit.averaging.options import Options
from modkit.averaging.precision import first_nonfinite, is_averaged
from modkit.averaging.schedules import Schedule
from modkit.averaging.state_checks import AVERAGE, OWN, CheckedMapping, described, invalid_state


VERSION: Final = 1


@dataclass
class LoadedState:
    """A valid state, whose names and shapes :func:`matched` compares with the model."""

    step: int
    start: int | None
    n_averaged: int
    update_every: int
    update_after_step: int
    schedules: list[Schedule]
    averages: list[Mapping[str, Any]]
    buffers: Mapping[str, Tensor]
    raw: Mapping[str, Tensor]
    stepped: frozenset[int] = frozenset()
    foreign: bool = False


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
    """Read and validate a state for an ``EMA`` that averages ``model`` with these options."""
    if not isinstance(cast("object", state), Mapping):
        raise invalid_state(f"the state must be a mapping, got {described(state)}")
    foreign = "version" not in state and not {"averages", "schedules"} <= state.keys()
    if foreign:
        found = convert(state, model)
        loaded = _started(found, schedules, update_every, update_after_step, step)
        if step is None and not found.has_counter:
            _warn_of_no_counter(found.source, loaded)
    elif step is not None:
        raise invalid_state(
            f"load_state_dict() got step={step}, but a state of {OWN} holds its own counter. Load it "
            "without step"
        )
    else:
        loaded = _read_own(state, model, schedules)
    if on_nonfinite != "ignore" and loaded.start is not None:
        _check_finite(loaded.averages, on_nonfinite)
    pairs: list[tuple[str, Any, Any]] = [
        *(("the schedule", *pair) for pair in zip(loaded.schedules, schedules, strict=True)),
        ("update_every", loaded.update_every, update_every),
        ("update_after_step", loaded.update_after_step, update_after_step),
    ]
    for name, new, old in pairs:
        if new != old and not foreign:
            text = f"EMA: {name} is {new} from here on, as in the loaded state, and not {old}"
            warnings.warn(text, stacklevel=3)
    return loaded


def _read_own(state: State, model: torch.nn.Module, schedules: list[Schedule]) -> LoadedState:
    part = CheckedMapping(OWN, state)
    counts = {"step": 0, "n_averaged": 0, "update_every": 1, "update_after_step": 0}
    part.require(("version", *counts, "start", "schedules", "averages", "buffers"))
    version = part.integer("version", 1)
    if version > VERSION:
        raise invalid_state(f"the state has version {version}, newer than {VERSION}; update modkit")
    values: dict[str, Any] = {name: part.integer(name, least) for name, least in counts.items()}
    start: int | None = None
    if values["n_averaged"]:
        start = part.integer("start", 1, values["step"])
        part.integer("n_averaged", 0, values["step"] - start + 1)
    elif state["start"] is not None:
        part.refuse("start", "None, as n_averaged is 0")
    configs, averages = part.each("schedules"), part.each("averages")
    if not configs:
        part.refuse("schedules", "a list that is not empty")
    if len(configs) != len(schedules):
        raise invalid_state(
            f"the state holds {len(configs)} averages, and this object {len(schedules)}"
        )
    if len(averages) != len(schedules):
        part.refuse("averages", f"a list of {len(schedules)}, one for each schedule")
    saved = [_schedule(*pair) for pair in zip(configs, schedules, strict=True)]
    return LoadedState(
        **values,
        start=start,
        schedules=saved,
        averages=[_average(one) for one in averages],
        buffers=part.inside("buffers").tensors(),
        raw=_raw(part.inside("raw"), model) if "raw" in state else {},
        stepped=_stepped(part) if "stepped" in state else frozenset(),
    )


def _stepped(part: CheckedMapping) -> frozenset[int]:
    """Return the indices of attached optimizers that had stepped in an unfinished training step."""
    indices = part.get("stepped", "a list")
    if any(type(index) is not int or index < 0 for index in indices):
        part.refuse("stepped", "a list of indices of optimizers")
    if len(set(indices)) != len(indices):
        part.refuse("stepped", "a list without duplicates")
    return frozenset(indices)


def _plain(value: object) -> object:
    """Return the value as JSON has it: lists for tuples, dicts for mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _schedule(part: CheckedMapping, own: Schedule) -> Schedule:
    """Return the ``EMA``'s schedule if the state has an equal one, or else that of the state."""
    config = _plain(part.values)
    try:
        if config == _plain(own.to_config()):
            return own
        saved = decays.from_config(part.values)
        error: object = f"its fields must be those of {saved}"
        if config == _plain(saved.to_config()):
            return saved
    except (TypeError, ValueError, OverflowError, RuntimeError) as failed:
        # A tensor has no truth value, and an int may be too large for a float.
        error = failed
    remedy = "If it was a function or a subclass of Schedule, pass an equal one to EMA as schedule="
    what = f"{part.path} of the state, {described(dict(part.values))}, cannot be created"
    raise invalid_state(f"{what}: {error}. {remedy}; this one has {own}")


def _average(part: CheckedMapping) -> dict[str, Any]:
    part.require(("tensors", "rests", "generators"))
    tensors = part.inside("tensors").tensors(AVERAGE)
    rests = part.inside("rests")
    for key, value in rests.tensors(AVERAGE).items():
        if key not in tensors:
            rests.refuse(key, "absent, as there is no average of this name")
        if value.shape != tensors[key].shape:
            rests.refuse(key, f"of shape {tuple(tensors[key].shape)}, that of the average")
    generators = _generators(part.inside("generators"))
    found = {"tensors": tensors, "rests": dict(rests.values), "generators": generators}
    if "statistics" in part.values:
        found["statistics"] = part.inside("statistics").tensors()
    return found


def _generators(part: CheckedMapping) -> dict[str, Tensor]:
    """Return the states of random generators, without those of devices that do not exist here."""
    found = part.tensors()
    for name, value in [*found.items()]:
        if value.dtype != torch.uint8 or value.dim() != 1:
            part.refuse(name, "a one-dimensional tensor of dtype torch.uint8")
        try:
            device = torch.device(name)
        except RuntimeError:
            part.refuse(name, "under the name of a device")
        try:
            generator = torch.Generator(device=device)
        except RuntimeError:
            del found[name]
            continue
        try:
            generator.set_state(value.cpu())
        except RuntimeError as error:
            part.refuse(name, f"the state of a generator ({str(error).splitlines()[0]})")
    return found


def _raw(part: CheckedMapping, model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the training weights of a state from inside ``applied``, which go into the model."""
    found = part.tensors()
    members = NamedTensors(model).all() if found else {}
    known = {name: members[name] for name in found if name in members}
    # A buffer may have had another shape.
    expected = {n: one.tensor.shape if one.is_parameter else None for n, one in known.items()}
    what = "EMA: the training weights of the state do not fit the model"
    check_match(what, expected, shapes_of(found))
    for name, member in known.items():
        if found[name].is_complex() != member.tensor.is_complex():
            part.refuse(name, f"of a dtype like {member.tensor.dtype}")
    return found


def with_empty_parts(state: dict[str, Any]) -> dict[str, Any]:
    """Restore the empty dicts of a state, which flat checkpoints leave out."""
    given, schedules = state.get("averages", []), state.get("schedules")
    if "version" not in state or not isinstance(given, list) or not isinstance(schedules, list):
        return state
    averages = given if len(given) == len(schedules) else [{}] * len(schedules)
    empty: dict[str, Any] = {"tensors": {}, "rests": {}, "generators": {}}
    full = [{**empty, **one} if isinstance(one, Mapping) else one for one in averages]
    return {"buffers": {}, **state, "averages": full}


def matched(
    loaded: LoadedState, members: NamedTensors, options: Options
) -> tuple[dict[str, Tensor], set[str], list[dict[str, Tensor]]]:
    """Return the averaged tensors, names of copied buffers and tensors of each average."""
    averaged: dict[str, Tensor] = dict(loaded.averages[0]["tensors"])
    copied = set(loaded.buffers)
    if not members.has_lazy():
        averaged, others = options.split(members, averaged)
        copied = {member.name for member in others}
    found = [dict(average["tensors"]) for average in loaded.averages]
    for tensors in found:
        if loaded.foreign:
            # Other libraries save tied tensors under each name, and tensors that are not averaged.
            for alias, name in members.aliases.items():
                if alias in tensors:
                    tensors.setdefault(name, tensors[alias])
            for name in tensors.keys() & (members.names() - averaged.keys()):
                del tensors[name]
        what = "EMA: the state does not fit the model"
        check_match(what, shapes_of(averaged), shapes_of(tensors))
        for name, tensor in averaged.items():
            one = tensors[name]
            if not is_averaged(one) or one.is_complex() != tensor.is_complex():
                what = f"the average of {name} must be of a dtype like {tensor.dtype}"
                raise invalid_state(
                    f"the state does not fit the model: {what}, got {described(one)}"
                )
    if not members.has_lazy():
        for average in loaded.averages:
            _check_statistics(average.get("statistics", {}), members)
    return averaged, copied, found


def _check_statistics(statistics: Mapping[str, Tensor], members: NamedTensors) -> None:
    """Raise NameMismatchError unless batch normalization statistics have the shapes of the model's."""
    known = {name: one for name, one in statistics.items() if name in members.buffers}
    expected = {name: members.buffers[name].tensor.shape for name in known}
    check_match("EMA: the state does not fit the model", expected, shapes_of(known))


def _check_finite(averages: list[Mapping[str, Any]], on_nonfinite: str) -> None:
    tensors = {
        f"averages[{index}][{part!r}][{name!r}]": tensor
        for index, average in enumerate(averages)
        for part in ("tensors", "rests")
        for name, tensor in average[part].items()
    }
    bad = first_nonfinite(tensors)
    if bad is not None:
        wanted = f"the loaded averages must be finite with on_nonfinite={on_nonfinite!r}"
        raise invalid_state(f"{wanted}: {bad} contains inf or nan")


def _started(
    found: Converted, own: list[Schedule], every: int, after: int, step: int | None
) -> LoadedState:
    """Return the state of an ``EMA`` with these options whose averages have been converted.

    ``step`` is the number of calls of ``update()`` so far, if the user has given it.
    """
    if found.update_after_step is not None:
        after = found.update_after_step
    first = after + 1

    def count_at(calls: int) -> int:
        return max(0, 1 + (calls - first) // every)

    if step is not None:
        calls = step
    elif found.step is not None and found.n_averaged in (None, count_at(found.step)):
        calls = found.step
    else:
        # Lightning saves both numbers, and its steps are not calls where a ``should_update()`` of the
        # user skips some.
        known = 1 if found.n_averaged is None else found.n_averaged
        calls = first + (known - 1) * every if known else 0
    count = count_at(calls)

    average = {"tensors": found.averages, "rests": {}, "generators": {}}
    return LoadedState(
        step=calls,
        # Until the first update there is no average: what the library holds is a copy of the weights.
        start=first if count else None,
        n_averaged=count,
        update_every=every,
        update_after_step=after,
        schedules=[found.schedule or one for one in own],
        averages=[average] * len(own),
        buffers=found.averages,
        raw={},
        foreign=True,
    )


def _warn_of_no_counter(source: str, loaded: LoadedState) -> None:
    """Warn if the number of updates so far matters, and the state does not hold it."""
    after = loaded.update_after_step
    if not after and all(map(decays.is_constant, loaded.schedules)):
        return
    what = "plain weights hold" if source == "weights" else f"the state of {source} holds"
    schedules = ", ".join(map(str, loaded.schedules))
    warnings.warn(
        f"EMA: {what} no counter, so it is taken for that of the first update (step={after + 1}), from "
        f"which {schedules} continues. After more updates pass the number of calls of update(), as in "
        "load_state_dict(state, step=1000).",
        stacklevel=4,
    )
