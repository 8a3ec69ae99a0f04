"""Read and validate the states that ``EMA.load_state_dict`` accepts.

These are the states of ``modkit.EMA``, of other libraries (which need not be installed), and plain
averaged weights. An invalid state is a ``ValueError``, raised before anything changes.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from modkit.averaging import schedules as decays
from modkit.averaging.named_tensors import (
    NamedTensors,
    Options,
    canonical_names,
    check_match,
    is_averaged,
    shapes_of,
)
from modkit.averaging.precision import first_nonfinite
from modkit.averaging.schedules import Schedule
from modkit.errors import shown


__all__ = ["Converted", "convert", "recognise"]

State: TypeAlias = Mapping[str, Any]

VERSION: Final = 1
_OWN: Final = "modkit.EMA"


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


@dataclass(frozen=True)
class Converted:
    """Averages of another library, and what its state says about the updates so far.

    Libraries count different things: ``n_averaged`` is the number of averaged models, the initial copy
    included; ``step`` is the number of calls of the update method, averaged or not. Each is None if
    the state does not hold it, and so is ``update_after_step``.
    """

    source: str
    averages: dict[str, Tensor]
    n_averaged: int | None = None
    step: int | None = None
    schedule: Schedule | None = None
    update_after_step: int | None = None

    @property
    def has_counter(self) -> bool:
        """True if the state tells how far the averaging has come."""
        return self.n_averaged is not None or self.step is not None


def _error(text: str) -> ValueError:
    return ValueError(shown(f"EMA: {text}. Nothing has been changed."))


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of dtype {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


# Checks of the parts of a state. The kinds of tensors are tested in this order.
_KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    "a mapping": lambda value: isinstance(value, Mapping),
    "a list": lambda value: isinstance(value, (list, tuple)),
    "True or False": lambda value: isinstance(value, int) and value in (0, 1),
    "a tensor": lambda value: isinstance(value, Tensor),
    "a dense tensor with data": lambda value: value.layout == torch.strided and not value.is_meta,
    "of a floating point or complex dtype": is_averaged,
}
_TENSOR: Final = ("a tensor", "a dense tensor with data")
_AVERAGE: Final = (*_TENSOR, "of a floating point or complex dtype")


@dataclass(frozen=True)
class _Part:
    """A mapping within a state, at a path. Its methods return valid values, or raise."""

    source: str
    values: Mapping[Any, Any]
    path: str = ""

    def key(self, name: object) -> str:
        return f"{self.path}[{name!r}]" if self.path else str(name)

    def refuse(self, name: object, wanted: str) -> NoReturn:
        what = f"{self.key(name)} must be {wanted}, got {_shown(self.values[name])}"
        raise _error(f"the state of {self.source} is invalid: {what}")

    def require(self, names: Iterable[str]) -> None:
        missing = [self.key(name) for name in names if name not in self.values]
        if missing:
            raise _error(f"the state of {self.source} has no {', '.join(missing)}")

    def get(self, name: Any, kind: str | None = None) -> Any:
        # Other libraries may save a number as a tensor with one element.
        self.require([name])
        found = self.values[name]
        is_number = isinstance(found, Tensor) and found.numel() == 1 and not found.is_meta
        if is_number and self.source != _OWN:
            found = found.item()
        if kind is not None and not _KINDS[kind](found):
            self.refuse(name, kind)
        return found

    def integer(self, name: str, least: int = 0, most: float = math.inf) -> int:
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            self.refuse(name, f"an int {limits}")
        return value

    def inside(self, name: Any) -> "_Part":
        return _Part(self.source, self.get(name, "a mapping"), self.key(name))

    def each(self, name: str) -> "list[_Part]":
        found = _Part(self.source, dict(enumerate(self.get(name, "a list"))), self.key(name))
        return [found.inside(index) for index in found.values]

    def tensors(self, kinds: Iterable[str] = _TENSOR) -> dict[str, Tensor]:
        for key, value in self.values.items():
            if not isinstance(key, str):
                self.refuse(key, "a tensor under a name of type str")
            for kind in kinds:
                if not _KINDS[kind](value):
                    self.refuse(key, kind)
        return dict(self.values)


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
        raise _error(f"the state must be a mapping, got {_shown(state)}")
    foreign = "version" not in state and not {"averages", "schedules"} <= state.keys()
    if foreign:
        found = convert(state, model)
        loaded = _started(found, schedules, update_every, update_after_step, step)
        if step is None and not found.has_counter:
            _warn_of_no_counter(found.source, loaded)
    elif step is not None:
        raise _error(
            f"load_state_dict() got step={step}, but a state of {_OWN} holds its own counter. Load it "
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
    part = _Part(_OWN, state)
    counts = {"step": 0, "n_averaged": 0, "update_every": 1, "update_after_step": 0}
    part.require(("version", *counts, "start", "schedules", "averages", "buffers"))
    version = part.integer("version", 1)
    if version > VERSION:
        raise _error(f"the state has version {version}, newer than {VERSION}; update modkit")
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
        raise _error(f"the state holds {len(configs)} averages, and this object {len(schedules)}")
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


def _stepped(part: _Part) -> frozenset[int]:
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


def _schedule(part: _Part, own: Schedule) -> Schedule:
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
    what = f"{part.path} of the state, {_shown(dict(part.values))}, cannot be created"
    raise _error(f"{what}: {error}. {remedy}; this one has {own}")


def _average(part: _Part) -> dict[str, Any]:
    part.require(("tensors", "rests", "generators"))
    tensors = part.inside("tensors").tensors(_AVERAGE)
    rests = part.inside("rests")
    for key, value in rests.tensors(_AVERAGE).items():
        if key not in tensors:
            rests.refuse(key, "absent, as there is no average of this name")
        if value.shape != tensors[key].shape:
            rests.refuse(key, f"of shape {tuple(tensors[key].shape)}, that of the average")
    generators = _generators(part.inside("generators"))
    found = {"tensors": tensors, "rests": dict(rests.values), "generators": generators}
    if "statistics" in part.values:
        found["statistics"] = part.inside("statistics").tensors()
    return found


def _generators(part: _Part) -> dict[str, Tensor]:
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


def _raw(part: _Part, model: torch.nn.Module) -> dict[str, Tensor]:
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
                raise _error(f"the state does not fit the model: {what}, got {_shown(one)}")
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
        raise _error(f"{wanted}: {bad} contains inf or nan")


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


_MARKS: Final = {
    "diffusers": {"shadow_params", "optimization_step"},
    "torch_ema": {"shadow_params", "num_updates"},
    "lightning": {"averaging_state", "state_dict"},
}


def recognise(state: State, model: torch.nn.Module | None = None) -> str | None:
    """Return the library of a state, ``"weights"`` for plain weights of a model, or None."""
    keys = state.keys()
    if not all(isinstance(cast("object", key), str) for key in keys):
        return None
    for source, marks in _MARKS.items():
        if marks <= keys:
            return source
    if {"initted", "step"} <= keys and any(key.startswith("ema_model.") for key in keys):
        return "ema_pytorch"
    members = keys - {"n_averaged"}
    if members and all(key.startswith("module.") for key in members):
        return "torch" if "n_averaged" in keys else "timm"
    if model is not None and all(isinstance(value, Tensor) for value in state.values()):
        named = canonical_names(name for name, _ in model.named_parameters(remove_duplicate=False))
        if not set(canonical_names(keys).values()).isdisjoint(named.values()):
            return "weights"
    return None


def convert(state: State, model: torch.nn.Module) -> Converted:
    """Read the state of another library, or plain averaged weights. Tensors are not copied.

    Lists without names (diffusers, torch_ema) get the names of the model's parameters, in order. A
    state that is unknown or invalid, or does not fit the model, is a ValueError.
    """
    source = recognise(state, model)
    part = _Part(source or "", state)
    match source:
        case "diffusers":
            names = ["decay", "min_decay", "inv_gamma", "power"]
            step = part.integer("optimization_step")
            after = part.integer("update_after_step")
            part.require(("use_ema_warmup", *names))
            warmup = part.get("use_ema_warmup", "True or False")
            kind = decays.InverseGamma if warmup else decays.CountWarmup
            schedule = _decay(part, kind, names if warmup else names[:2])
            averages = _named_in_order(part, model)
            return Converted(
                source, averages, step=step, schedule=schedule, update_after_step=after
            )
        case "torch_ema":
            # It copies when it is created, which is one call of ``EMA.update()`` more.
            counts = state["num_updates"] is not None
            calls = part.integer("num_updates") + 1 if counts else None
            schedule = _decay(part, decays.CountWarmup if counts else decays.Constant, ["decay"])
            averages = _named_in_order(part, model)
            return Converted(source, averages, step=calls, schedule=schedule, update_after_step=0)
        case "lightning":
            count = part.inside("averaging_state").integer("n_averaged")
            steps = part.integer("global_step") if "global_step" in state else None
            return Converted(source, _below("", part.inside("state_dict")), count, steps)
        case "ema_pytorch":
            # Each call is a step, also those that ``update_after_step`` and ``update_every`` skip.
            calls = part.integer("step") if part.get("initted", "True or False") else 0
            return Converted(source, _below("ema_model.", part), step=calls)
        case "torch" | "timm":
            found = part.integer("n_averaged") if source == "torch" else None
            return Converted(source, _below("module.", part), found)
        case "weights":
            return Converted(source, _below("", part))
        case _:
            what = "the state is neither from modkit.EMA, nor from a supported library"
            some = ", ".join(map(repr, list(state)[:5])) or "nothing"
            raise _error(f"{what}, nor are its names those of the model: it begins with {some}")


def _decay(part: _Part, kind: type[Schedule], names: Iterable[str]) -> Schedule:
    part.require(names)
    try:
        return kind(**{name: part.values[name] for name in names})
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _error(f"the state of {part.source} is invalid: its decay gives {error}") from error


def _below(prefix: str, part: _Part) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by their names in the model."""
    for key in part.values:
        if not isinstance(key, str):
            part.refuse(key, "a tensor under a name of type str")
    tensors = {
        key.removeprefix(prefix): value.detach()
        for key, value in part.values.items()
        if str(key).startswith(prefix) and isinstance(value, Tensor)
    }
    names = canonical_names(tensors)
    return _Part(part.source, {names[key]: value for key, value in tensors.items()}).tensors()


def _named_in_order(part: _Part, model: torch.nn.Module) -> dict[str, Tensor]:
    """Name a list of tensors by the parameters of the model: all, or those that train."""
    found = part.get("shadow_params", "a list")
    for index, tensor in enumerate(found):
        for kind in _TENSOR:
            if not _KINDS[kind](tensor):
                wanted = f"a list of tensors, which [{index}] is not: it must be {kind}"
                part.refuse("shadow_params", wanted)
    named = dict(model.named_parameters())
    names = canonical_names(named)
    trained = {name: value for name, value in named.items() if value.requires_grad}
    parameters = named if len(named) == len(found) else trained
    what = f"the state of {part.source}"
    if len(parameters) != len(found):
        counts = f"the model has {len(named)} parameters, {len(trained)} of which train"
        raise _error(f"{what} holds {len(found)} tensors without names, and {counts}")
    for (name, value), tensor in zip(parameters.items(), found, strict=True):
        if value.shape != tensor.shape:
            order = f"{what} has no names, and its order is not that of the model"
            shapes = f"has the shape {tuple(value.shape)} it has {tuple(tensor.shape)}"
            raise _error(f"{order}: where {names[name]!r} {shapes}")
    return {names[n]: tensor.detach() for n, tensor in zip(parameters, found, strict=True)}
