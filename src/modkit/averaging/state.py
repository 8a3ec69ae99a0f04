"""Reading the states that ``EMA.load_state_dict`` accepts, and validating them completely.

These are the state of a ``modkit.EMA``, those of other libraries, and plain averaged weights (a mapping
from the names of a model to tensors). Supported libraries are torch (``AveragedModel``), timm
(``ModelEmaV3`` and V2), diffusers (``EMAModel``), ema-pytorch (``EMA``), torch_ema
(``ExponentialMovingAverage``) and Lightning (checkpoints of ``WeightAveraging``). None of them needs to
be installed. An invalid state is a ``ValueError``, raised before anything changes.

Example:
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> average = torch.optim.swa_utils.AveragedModel(model)
    >>> average.update_parameters(model)
    >>> converted = convert(average.state_dict(), model)
    >>> converted.source, converted.n_averaged, sorted(converted.averages)
    ('torch', 1, ['bias', 'weight'])
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, cast

import torch
from torch import Tensor

from modkit.averaging.named_tensors import (
    NamedTensors,
    Selection,
    canonical_names,
    check_match,
    is_averaged,
)
from modkit.averaging.precision import first_nonfinite
from modkit.averaging.schedules import (
    BEMA,
    Constant,
    CountWarmup,
    InverseGamma,
    Schedule,
    Window,
    from_config,
)
from modkit.averaging.sharding import local_shard, meshes_of, true_everywhere


__all__ = ["Converted", "convert", "recognise"]

State: TypeAlias = Mapping[str, Any]

VERSION: Final = 1
_OWN: Final = "modkit.EMA"
_OWN_KEYS: Final = (
    *("version", "step", "start", "n_averaged", "update_every", "update_after_step"),
    *("schedules", "averages", "buffers"),
)


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
    foreign: bool = False


@dataclass(frozen=True)
class Converted:
    """Averages that another library saved.

    Args:
        source: The library: ``"torch"``, ``"timm"``, ``"diffusers"``, ``"ema_pytorch"``,
            ``"torch_ema"``, ``"lightning"``, or ``"weights"`` for plain weights.
        averages: Averaged parameters, and buffers where the library saves them, by their name in the
            model.
        n_averaged: How many models are in the average, the first copy included, as torch counts; the
            next decay is that of step ``n = n_averaged`` of a schedule. ``None`` if the state does
            not contain it (timm). 1 for plain weights.
        schedule: The decay, if the state contains it (diffusers, torch_ema).
    """

    source: str
    averages: dict[str, Tensor]
    n_averaged: int | None
    schedule: Schedule | None = None


# The state of an EMA.


def read(
    state: State,
    model: torch.nn.Module,
    *,
    schedules: list[Schedule],
    update_every: int,
    update_after_step: int,
    on_nonfinite: str = "ignore",
) -> LoadedState:
    """Read and validate a state for an ``EMA`` that averages ``model`` with these options.

    Raises:
        ValueError: If the state is of another kind, of a later version, of another number of averages,
            or a part of it is missing or invalid. Unless ``on_nonfinite`` is ``"ignore"``, averages
            must be finite.
    """
    if not isinstance(cast("object", state), Mapping):
        raise _error(f"the state must be a mapping, got {_shown(state)}")
    if "version" in state or {"averages", "schedules"} <= state.keys():
        loaded = _read_own(state, model, schedules)
    else:
        loaded = _read_foreign(state, model, schedules, update_every, update_after_step)
    if on_nonfinite != "ignore" and loaded.start is not None:
        _check_finite(loaded, on_nonfinite)
    if not loaded.foreign:
        names = *["the schedule"] * len(schedules), "update_every", "update_after_step"
        now = (*loaded.schedules, loaded.update_every, loaded.update_after_step)
        own = (*schedules, update_every, update_after_step)
        for name, new, old in zip(names, now, own, strict=True):
            if new != old:
                text = f"EMA: {name} is {new} from here on, as in the loaded state, and not {old}"
                warnings.warn(text, stacklevel=3)
    return loaded


def _read_own(state: State, model: torch.nn.Module, schedules: list[Schedule]) -> LoadedState:
    part = _Part(_OWN, state)
    part.require(_OWN_KEYS)
    if part.integer("version", 1) > VERSION:
        raise _error(
            f"the state has version {state['version']}, newer than {VERSION}; update modkit"
        )
    step, n_averaged = part.integer("step"), part.integer("n_averaged")
    start: int | None = None
    if n_averaged:
        start = part.integer("start", 1, step)
        part.integer("n_averaged", 0, step - start + 1)
    elif state["start"] is not None:
        part.refuse("start", "None, as n_averaged is 0")
    configs = part.each("schedules")
    if not configs:
        part.refuse("schedules", "a list that is not empty")
    if len(configs) != len(schedules):
        raise _error(f"the state holds {len(configs)} averages, and this object {len(schedules)}")
    averages = part.each("averages")
    if len(averages) != len(schedules):
        part.refuse("averages", f"a list of {len(schedules)}, one for each schedule")
    saved = [_schedule(*pair) for pair in zip(configs, schedules, strict=True)]
    return LoadedState(
        step=step,
        start=start,
        n_averaged=n_averaged,
        update_every=part.integer("update_every", 1),
        update_after_step=part.integer("update_after_step"),
        schedules=saved,
        averages=[_average(*pair, n_averaged) for pair in zip(averages, saved, strict=True)],
        buffers=part.inside("buffers").tensors(),
        raw=_raw(part.inside("raw"), model) if "raw" in state else {},
    )


def _read_foreign(
    state: State,
    model: torch.nn.Module,
    schedules: list[Schedule],
    update_every: int,
    update_after_step: int,
) -> LoadedState:
    found = convert(state, model, update_after_step=update_after_step)
    count = 1 if found.n_averaged is None else found.n_averaged
    average = {"tensors": found.averages, "rests": {}, "generators": {}}
    # BEMA and Window stay, because a saved decay says nothing about the models that they keep.
    keeps_models = (BEMA, Window)
    return LoadedState(
        step=update_after_step + 1 + (count - 1) * update_every if count else 0,
        start=update_after_step + 1 if count else None,
        n_averaged=count,
        update_every=update_every,
        update_after_step=update_after_step,
        schedules=[
            own if isinstance(own, keeps_models) else found.schedule or own for own in schedules
        ],
        averages=[average] * len(schedules),
        buffers=found.averages,
        raw={},
        foreign=True,
    )


def with_empty_parts(state: dict[str, Any]) -> dict[str, Any]:
    """Restore the empty dicts of a state, which flat checkpoints leave out."""
    given, schedules = state.get("averages", []), state.get("schedules")
    if "version" not in state or not isinstance(given, list) or not isinstance(schedules, list):
        return state
    empty: dict[str, Any] = {"tensors": {}, "rests": {}, "generators": {}}
    averages = given if len(given) == len(schedules) else [{}] * len(schedules)
    averages = [{**empty, **one} if isinstance(one, Mapping) else one for one in averages]
    for average in averages:
        if isinstance(average, dict) and isinstance(average.get("plain"), Mapping):
            average["plain"] = {**empty, **average["plain"]}
    return {"buffers": {}, **state, "averages": averages}


def matched(
    loaded: LoadedState, members: NamedTensors, selection: Selection
) -> tuple[dict[str, Tensor], set[str], list[dict[str, Tensor]]]:
    """Match a state with the tensors of the model by name; a lazy model takes every name.

    Returns:
        The tensors that are averaged, the names of the buffers that are copied, and the loaded
        tensors of each average.

    Raises:
        NameMismatchError: If names or shapes differ.
        ValueError: If an average is of integers, or complex where the parameter is real or vice versa.
    """
    averaged: dict[str, Tensor] = dict(loaded.averages[0]["tensors"])
    copied = set(loaded.buffers)
    if not members.has_lazy():
        averaged, others = selection.split(members, averaged)
        copied = {member.name for member in others}
    found = [dict(average["tensors"]) for average in loaded.averages]
    if loaded.foreign:
        found = [_without_others(tensors, averaged, members) for tensors in found]
    for tensors in found:
        check_match("EMA: the state does not fit the model", _shapes(averaged), _shapes(tensors))
        for name, tensor in averaged.items():
            one = tensors[name]
            if not is_averaged(one) or one.is_complex() != tensor.is_complex():
                what = f"the average of {name} must be of a dtype like {tensor.dtype}"
                raise _error(f"the state does not fit the model: {what}, got {_shown(one)}")
    return averaged, copied, found


def _without_others(
    found: dict[str, Tensor], averaged: Mapping[str, Tensor], members: NamedTensors
) -> dict[str, Tensor]:
    """Drop what other libraries save besides: further names of tied tensors, and tensors not averaged."""
    for alias, name in members.aliases.items():
        if alias in found:
            found.setdefault(name, found[alias])
    others = members.names() - averaged.keys()
    return {name: tensor for name, tensor in found.items() if name not in others}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _check_finite(loaded: LoadedState, on_nonfinite: str) -> None:
    """Raise if an average is not finite; the ranks that share a tensor decide together."""
    tensors = [
        (f"averages[{index}]{key}", tensor)
        for index, average in enumerate(loaded.averages)
        for key, tensor in _floats_in(average, "")
    ]
    bad = first_nonfinite([(key, local_shard(tensor)) for key, tensor in tensors])
    meshes = meshes_of(tensor for _, tensor in tensors)
    if not true_everywhere(torch.tensor(bad is None, device="cpu"), meshes):
        where = bad or "the shard of another rank"
        wanted = f"the loaded averages must be finite with on_nonfinite={on_nonfinite!r}"
        raise _error(f"{wanted}: {where} contains inf or nan")


def _floats_in(part: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        if is_averaged(part):
            yield path, part
    elif isinstance(part, (Mapping, list)):
        for key, value in part.items() if isinstance(part, Mapping) else enumerate(part):
            yield from _floats_in(value, f"{path}[{key!r}]")


# The parts of a state.


def _error(text: str) -> ValueError:
    return ValueError(f"EMA: {text}. Nothing has been changed.")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of dtype {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True)
class _Part:
    """A mapping within a state, at a path. The methods return valid values, or raise."""

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

    def value(self, name: Any) -> Any:
        """Return a value; other libraries may save a number as a tensor with one element."""
        self.require([name])
        found = self.values[name]
        is_number = isinstance(found, Tensor) and found.numel() == 1 and self.source != _OWN
        return found.item() if is_number else found

    def integer(self, name: str, least: int = 0, most: int | None = None) -> int:
        value = self.value(name)
        if type(value) is not int or value < least or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            self.refuse(name, f"an int {limits}")
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, int) or value not in (0, 1):
            self.refuse(name, "True or False")
        return bool(value)

    def items(self, name: str) -> Sequence[Any]:
        value: object = self.value(name)
        if not isinstance(value, (list, tuple)):
            self.refuse(name, "a list")
        return value

    def inside(self, name: Any) -> "_Part":
        value: object = self.value(name)
        if not isinstance(value, Mapping):
            self.refuse(name, "a mapping")
        return _Part(self.source, value, self.key(name))

    def each(self, name: str) -> "list[_Part]":
        """Return the mappings in a list."""
        found = _Part(self.source, dict(enumerate(self.items(name))), self.key(name))
        return [found.inside(index) for index in found.values]

    def tensors(self) -> dict[str, Tensor]:
        """Return the values, all of which must be tensors by name."""
        for key, value in self.values.items():
            if not isinstance(key, str):
                self.refuse(key, "a tensor under a name of type str")
            if not isinstance(value, Tensor):
                self.refuse(key, "a tensor")
            if value.layout != torch.strided or value.is_meta:
                self.refuse(key, "a dense tensor with data")
        return dict(self.values)

    def averages(self, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return tensors that have an average; with ``like``, only of these names and shapes."""
        found = self.tensors()
        for key, value in found.items():
            if not is_averaged(value):
                self.refuse(key, "of a floating point or complex dtype")
            if like is not None and key not in like:
                self.refuse(key, "absent, as there is no average of this name")
            if like is not None and value.shape != like[key].shape:
                self.refuse(key, f"of shape {tuple(like[key].shape)}, that of the average")
        return found

    def models(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of all these names and shapes."""
        self.require(like)
        return self.averages(like)


def _plain(value: object) -> object:
    """Return the value as JSON has it: lists for tuples, dicts for mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _schedule(part: _Part, own: Schedule) -> Schedule:
    """Return the schedule of the ``EMA`` if the state has an equal one, or else that of the state."""
    config = _plain(part.values)
    if config == _plain(own.to_config()):
        return own
    try:
        saved = from_config(part.values)
        error: object = f"its fields must be those of {saved}"
        if config == _plain(saved.to_config()):
            return saved
    except (TypeError, ValueError) as failed:
        error = failed
    raise _error(
        f"{part.path} of the state, {_shown(dict(part.values))}, cannot be created: {error}. If it was "
        f"a function or a subclass of Schedule, pass an equal one to EMA as schedule=; this one has {own}"
    )


def _average(part: _Part, schedule: Schedule | None, n_averaged: int) -> dict[str, Any]:
    """Return the valid state of one average, with the parts that its schedule adds."""
    part.require(("tensors", "rests", "generators"))
    tensors = part.inside("tensors").averages()
    found: dict[str, Any] = {
        "tensors": tensors,
        "rests": part.inside("rests").averages(tensors),
        "generators": _generators(part.inside("generators")),
    }
    # A plain average that BEMA or Window begins with has none of these.
    if isinstance(schedule, BEMA) and part.values.keys() & {"plain", "first"}:
        found["first"] = part.inside("first").models(tensors)
        found["plain"] = _average(part.inside("plain"), None, n_averaged)
        part.inside("plain").inside("tensors").models(tensors)
    if isinstance(schedule, Window) and part.values.keys() & {"ring", "seen"}:
        found["seen"] = part.integer("seen", min(n_averaged, 1), n_averaged)
        kept = min(found["seen"], schedule.window)
        if len(part.items("ring")) != kept:
            part.refuse("ring", f"a list of {kept}, the smaller of seen and the window")
        found["ring"] = [one.models(tensors) for one in part.each("ring")]
    return found


def _generators(part: _Part) -> dict[str, Tensor]:
    """Return the states of random generators, without those of devices that do not exist here."""
    found: dict[str, Tensor] = {}
    for name, value in part.tensors().items():
        try:
            device = torch.device(name)
        except RuntimeError:
            part.refuse(name, "under the name of a device")
        if value.dtype != torch.uint8 or value.dim() != 1:
            part.refuse(name, "a one-dimensional tensor of dtype torch.uint8")
        try:
            generator = torch.Generator(device=device)
        except RuntimeError:
            continue
        try:
            generator.set_state(value.cpu())
        except RuntimeError as error:
            part.refuse(name, f"the state of a generator ({str(error).splitlines()[0]})")
        found[name] = value
    return found


def _raw(part: _Part, model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the training weights of a state from inside ``applied``, which go into the model."""
    found = part.tensors()
    if not found:
        return {}
    members = NamedTensors(model)
    both = {**members.parameters, **members.buffers}
    known = {name: both[name].tensor for name in found if name in both}
    # A buffer may have had another shape.
    parameters = members.parameters
    expected = {name: t.shape if name in parameters else None for name, t in known.items()}
    what = "EMA: the training weights of the state do not fit the model"
    check_match(what, expected, _shapes(found))
    for name, tensor in found.items():
        if tensor.is_complex() != known[name].is_complex():
            part.refuse(name, f"of a dtype like {known[name].dtype}")
    return found


# Other libraries.


def recognise(state: State, model: torch.nn.Module | None = None) -> str | None:
    """Return where a state is from, or None if it is unknown.

    Args:
        state: The state.
        model: With a model, plain weights under the names of its parameters are recognised too.

    Example:
        >>> import torch
        >>> recognise({"n_averaged": torch.tensor(3), "module.weight": torch.zeros(1)})
        'torch'
        >>> recognise({"weight": torch.zeros(1)}) is None
        True
        >>> recognise({"weight": torch.zeros(1, 2)}, torch.nn.Linear(2, 1, bias=False))
        'weights'
    """
    keys = state.keys()
    if not all(isinstance(cast("object", key), str) for key in keys):
        return None
    if {"shadow_params", "optimization_step"} <= keys:
        return "diffusers"
    if {"shadow_params", "num_updates"} <= keys:
        return "torch_ema"
    if {"averaging_state", "state_dict"} <= keys:
        return "lightning"
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


def convert(state: State, model: torch.nn.Module, *, update_after_step: int = 0) -> Converted:
    """Read the state of another library, or plain averaged weights.

    Args:
        state: The result of its ``state_dict()``, or a checkpoint of Lightning.
        model: The model that was averaged, or one like it. States that contain a list without names
            (diffusers, torch_ema) get the names of its parameters, in order.
        update_after_step: The option of ema-pytorch of this name, which its state does not contain.

    Returns:
        The averages by name, and what the state contains about counts and decays. The tensors are not
        copied.

    Raises:
        ValueError: If the state is unknown, a part of it is missing or invalid, or a list does not fit
            the parameters of the model.
    """
    source = recognise(state, model)
    if source is None:
        some = ", ".join(map(repr, list(state)[:5]))
        raise _error(
            "the state is neither from modkit.EMA, nor from a supported library, nor are its names "
            f"those of the model: it begins with {some or 'nothing'}"
        )
    part = _Part(source, state)
    if "shadow_params" in state:
        averages = _named_in_order(part, model)
    elif source == "lightning":
        averages = _below("", part.inside("state_dict"))
    else:
        prefixes = {"weights": "", "ema_pytorch": "ema_model."}
        averages = _below(prefixes.get(source, "module."), part)
    return Converted(source, averages, _count(part, update_after_step), _decay(part))


def _count(part: _Part, update_after_step: int) -> int | None:
    """Return how many models are in the average of another library."""
    match part.source:
        case "torch":
            return part.integer("n_averaged")
        case "lightning":
            return part.inside("averaging_state").integer("n_averaged")
        case "ema_pytorch":
            # The first call copies.
            counted = max(part.integer("step") - update_after_step, 1)
            return counted if part.flag("initted") else 0
        case "diffusers":
            # The first step copies, and so does each up to ``update_after_step``.
            steps = part.integer("optimization_step")
            return max(steps - part.integer("update_after_step"), min(steps, 1))
        case "torch_ema":
            # It copies when it is created, before the first step.
            return None if part.value("num_updates") is None else part.integer("num_updates") + 1
        case source:
            return 1 if source == "weights" else None


def _decay(part: _Part) -> Schedule | None:
    """Return the decay of another library, if its state contains it."""
    kind: type[Schedule] = CountWarmup
    names: tuple[str, ...] = ("decay",)
    if part.source == "diffusers":
        part.require(("decay", "min_decay", "use_ema_warmup", "inv_gamma", "power"))
        names = ("decay", "min_decay")
        if part.flag("use_ema_warmup"):
            kind, names = InverseGamma, (*names, "inv_gamma", "power")
    elif part.source == "torch_ema":
        part.require(names)
        kind = Constant if part.value("num_updates") is None else CountWarmup
    else:
        return None
    try:
        return kind(**{name: part.values[name] for name in names})
    except (TypeError, ValueError) as error:
        raise _error(f"the state of {part.source} is invalid: its decay gives {error}") from error


def _below(prefix: str, part: _Part) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by their names in the model."""
    found = {
        key.removeprefix(prefix): value.detach()
        for key, value in part.values.items()
        if str(key).startswith(prefix) and isinstance(value, Tensor)
    }
    names = canonical_names(found)
    return _Part(part.source, {names[key]: value for key, value in found.items()}).tensors()


def _named_in_order(part: _Part, model: torch.nn.Module) -> dict[str, Tensor]:
    """Give a list of tensors the names of the model's parameters, all of them or those that train."""
    found = part.items("shadow_params")
    for index, tensor in enumerate(found):
        if not isinstance(tensor, Tensor):
            part.refuse("shadow_params", f"a list of tensors, which [{index}] is not")
    named = dict(model.named_parameters())
    names = canonical_names(named)
    trained = {name: value for name, value in named.items() if value.requires_grad}
    parameters = named if len(named) == len(found) else trained
    if len(parameters) != len(found):
        raise _error(
            f"the state of {part.source} holds {len(found)} tensors without names, and the model has "
            f"{len(named)} parameters, {len(trained)} of which train"
        )
    for (name, value), tensor in zip(parameters.items(), found, strict=True):
        if value.shape != tensor.shape:
            raise _error(
                f"the state of {part.source} has no names, and its order is not that of the model: "
                f"where {names[name]!r} has the shape {tuple(value.shape)} it has {tuple(tensor.shape)}"
            )
    return {names[n]: tensor.detach() for n, tensor in zip(parameters, found, strict=True)}
