"""Reading the states that ``EMA.load_state_dict`` accepts, and validating them completely.

These are the state of a ``modkit.EMA``, those of other libraries, and plain averaged weights (a mapping
from the names of a model to tensors). Supported libraries are torch (``AveragedModel``), timm
(``ModelEmaV3`` and V2), diffusers (``EMAModel``), ema-pytorch (``EMA``), torch_ema
(``ExponentialMovingAverage``) and Lightning (checkpoints of ``WeightAveraging``). None of them needs to
be installed.

Every state is checked before anything changes. What is wrong with it is a ``ValueError``.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_COUNTERS: Final = ("step", "start", "n_averaged", "update_every", "update_after_step")
# Characters of a value in an error message.
_SHOWN: Final = 80
# Schedules whose averages keep copies of models beside themselves.
_WITH_MODELS: Final = (BEMA, Window)


@dataclass
class LoadedState:
    """A state whose contents have been validated.

    Names and shapes are compared with the model by :func:`matched`.
    """

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
        source: Where the state is from: ``"torch"``, ``"timm"``, ``"diffusers"``, ``"ema_pytorch"``,
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
    """Read and validate the state of an ``EMA``, of another library, or plain averaged weights.

    Args:
        state: The state.
        model: The model that is averaged.
        schedules: The schedules of the ``EMA``, one for each average.
        update_every: The interval of the ``EMA``.
        update_after_step: The number of updates that the ``EMA`` waits for.
        on_nonfinite: The option of the ``EMA``. Unless it is ``"ignore"``, averages must be finite.

    Raises:
        ValueError: The state is of another kind, of a later version, of another number of averages, or
            a part of it is missing or invalid. Nothing has been changed.
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
        now = (*loaded.schedules, loaded.update_every, loaded.update_after_step)
        names = *["the schedule"] * len(schedules), "update_every", "update_after_step"
        own = (*schedules, update_every, update_after_step)
        for name, new, old in zip(names, now, own, strict=True):
            if new != old:
                text = f"EMA: {name} is {new} from here on, as in the loaded state, and not {old}"
                warnings.warn(text, stacklevel=3)
    return loaded


def _read_own(state: State, model: torch.nn.Module, schedules: list[Schedule]) -> LoadedState:
    part = _Part(_OWN, state)
    part.require(("version", *_COUNTERS, "schedules", "averages", "buffers"))
    version = part.integer("version", least=1)
    if version > VERSION:
        raise _error(f"the state has version {version}, newer than {VERSION}; update modkit")
    step = part.integer("step")
    n_averaged = part.integer("n_averaged")
    every = part.integer("update_every", least=1)
    after = part.integer("update_after_step")
    start: int | None = None
    if n_averaged:
        start = part.integer("start", least=1, most=step)
        part.integer("n_averaged", most=step - start + 1)
    elif state["start"] is not None:
        part.refuse("start", "None, as n_averaged is 0")
    saved = _schedules(part, schedules)
    averages = part.each("averages")
    if len(averages) != len(schedules):
        part.refuse("averages", f"a list of {len(schedules)}, one for each schedule")
    return LoadedState(
        step=step,
        start=start,
        n_averaged=n_averaged,
        update_every=every,
        update_after_step=after,
        schedules=saved,
        averages=[_average(*pair, n_averaged) for pair in zip(averages, saved, strict=True)],
        buffers=part.tensors("buffers"),
        raw=_raw(part, model),
    )


def with_empty_parts(state: dict[str, Any]) -> dict[str, Any]:
    """Restore the empty dicts of a state, which flat checkpoints leave out."""
    given, schedules = state.get("averages", []), state.get("schedules")
    if "version" not in state or not isinstance(given, list) or not isinstance(schedules, list):
        return state
    averages = given if len(given) == len(schedules) else [{}] * len(schedules)
    empty: dict[str, Any] = {"tensors": {}, "rests": {}, "generators": {}}
    whole = [{**empty, **one} if isinstance(one, Mapping) else one for one in averages]
    for average in whole:
        if isinstance(average, dict) and isinstance(average.get("plain"), Mapping):
            average["plain"] = {**empty, **average["plain"]}
    return {"buffers": {}, **state, "averages": whole}


def matched(
    loaded: LoadedState, members: NamedTensors, selection: Selection
) -> tuple[dict[str, Tensor], set[str], list[dict[str, Tensor]]]:
    """Match a state with the tensors of the model by name; a lazy model takes every name.

    Returns:
        The tensors that are averaged, the names of the buffers that are copied, and the loaded
        tensors of each average.

    Raises:
        NameMismatchError: Names or shapes differ.
        ValueError: A loaded tensor is complex and the parameter real, or the other way round, or an
            average is of integers.
    """
    averaged: dict[str, Tensor] = dict(loaded.averages[0]["tensors"])
    copied = set(loaded.buffers)
    if not members.has_lazy():
        averaged, others = selection.split(members, averaged)
        copied = {member.name for member in others}
    found = [
        _tensors_for(average, averaged, members, foreign=loaded.foreign)
        for average in loaded.averages
    ]
    return averaged, copied, found


def _tensors_for(
    average: Mapping[str, Any], bound: Mapping[str, Tensor], members: NamedTensors, *, foreign: bool
) -> dict[str, Tensor]:
    """Return the loaded tensors of one average after comparing them with those that are averaged.

    Other libraries (``foreign``) also save further names of tied tensors, buffers that are not averaged,
    and parameters that are excluded here.
    """
    found = dict(average["tensors"])
    if foreign:
        for alias, name in members.aliases.items():
            if alias in found:
                found.setdefault(name, found[alias])
        others = members.names() - bound.keys()
        found = {name: t for name, t in found.items() if name in bound or name not in others}
    check_match(
        "EMA: the state does not fit the model",
        {name: tensor.shape for name, tensor in bound.items()},
        {name: tensor.shape for name, tensor in found.items()},
    )
    for name, tensor in bound.items():
        if not is_averaged(found[name]) or found[name].is_complex() != tensor.is_complex():
            raise _error(
                f"the state does not fit the model: the average of {name} must be of a dtype like "
                f"{tensor.dtype}, got {_shown(found[name])}"
            )
    return found


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
        raise _error(
            f"the loaded averages must be finite with on_nonfinite={on_nonfinite!r}: {where} contains "
            "inf or nan"
        )


def _floats_in(part: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        if is_averaged(part):
            yield path, part
    elif isinstance(part, (Mapping, list)):
        items = part.items() if isinstance(part, Mapping) else enumerate(part)
        for key, value in items:
            yield from _floats_in(value, f"{path}[{key!r}]")


# The parts of a state.


def _error(text: str) -> ValueError:
    return ValueError(f"EMA: {text}. Nothing has been changed.")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of dtype {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


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

    def integer(self, name: str, *, least: int = 0, most: int | None = None) -> int:
        """Return an integer, or the value of an integer tensor with one element (other libraries)."""
        self.require([name])
        value = self.values[name]
        if isinstance(value, Tensor) and self.source != _OWN:
            is_count = value.numel() == 1 and not value.is_floating_point()
            value = value.item() if is_count and value.dtype != torch.bool else None
        wanted = f"an int of at least {least}" if most is None else f"an int from {least} to {most}"
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, wanted)
        if value < least or (most is not None and value > most):
            self.refuse(name, wanted)
        return value

    def flag(self, name: str) -> bool:
        self.require([name])
        value = self.values[name]
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            self.refuse(name, "True or False")
        return bool(value)

    def items(self, name: str) -> Sequence[Any]:
        self.require([name])
        found: object = self.values[name]
        if not isinstance(found, (list, tuple)):
            self.refuse(name, "a list")
        return found

    def inside(self, name: Any) -> "_Part":
        self.require([name])
        found: object = self.values[name]
        if not isinstance(found, Mapping):
            self.refuse(name, "a mapping")
        return _Part(self.source, found, self.key(name))

    def each(self, name: str) -> "list[_Part]":
        """Return the mappings in a list."""
        found = _Part(self.source, dict(enumerate(self.items(name))), self.key(name))
        return [found.inside(index) for index in found.values]

    def tensors(self, name: str | None = None) -> dict[str, Tensor]:
        """Return a mapping of names to tensors, by default this one."""
        part = self if name is None else self.inside(name)
        for key, value in part.values.items():
            if not isinstance(key, str):
                part.refuse(key, "a tensor under a name of type str")
            if not isinstance(value, Tensor):
                part.refuse(key, "a tensor")
            if value.layout != torch.strided or value.is_meta:
                part.refuse(key, "a dense tensor with data")
        return dict(part.values)

    def averaged(
        self, name: str | None = None, like: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return tensors that are averages; with ``like``, only of these names and shapes."""
        part = self if name is None else self.inside(name)
        found = part.tensors()
        for key, value in found.items():
            if not is_averaged(value):
                part.refuse(key, "of a floating point or complex dtype")
            if like is not None and key not in like:
                part.refuse(key, "absent, as there is no average of this name")
            if like is not None and value.shape != like[key].shape:
                part.refuse(key, f"of shape {tuple(like[key].shape)}, that of the average")
        return found


def _plain(value: object) -> object:
    """Return the value as JSON has it: lists for tuples, dicts for mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _schedules(part: _Part, schedules: list[Schedule]) -> list[Schedule]:
    configs = part.items("schedules")
    if not configs:
        part.refuse("schedules", "a list that is not empty")
    if len(configs) != len(schedules):
        text = f"the state holds {len(configs)} averages, and this object {len(schedules)}"
        raise _error(text)
    return [_schedule(*pair) for pair in zip(part.each("schedules"), schedules, strict=True)]


def _schedule(part: _Part, own: Schedule) -> Schedule:
    """Return the schedule of the ``EMA`` if the state has an equal one, or else that of the state."""
    config = part.values
    if _plain(config) == _plain(own.to_config()):
        return own
    try:
        saved = from_config(config)
        complete = _plain(saved.to_config()) == _plain(config)
        error: object = f"its fields must be those of {saved}"
    except (TypeError, ValueError) as failed:
        saved, complete, error = own, False, failed
    if not complete:
        raise _error(
            f"{part.path} of the state, {_shown(dict(config))}, cannot be created: {error}. If it was a "
            f"function or a subclass of Schedule, pass an equal one to EMA as schedule=; this one has "
            f"{own}"
        )
    return saved


def _average(part: _Part, schedule: Schedule | None, n_averaged: int) -> dict[str, Any]:
    """Return the validated state of one average, with the parts that its schedule adds."""
    part.require(("tensors", "rests", "generators"))
    tensors = part.averaged("tensors")
    found: dict[str, Any] = {
        "tensors": tensors,
        "rests": part.averaged("rests", tensors),
        "generators": _generators(part.inside("generators")),
    }
    # A plain average that BEMA or Window begins with has none of these.
    if isinstance(schedule, BEMA) and part.values.keys() & {"plain", "first"}:
        plain, first = part.inside("plain"), part.inside("first")
        found["plain"] = _average(plain, None, n_averaged)
        plain.averaged("tensors", tensors)
        found["first"] = first.averaged(like=tensors)
        for one in (plain.inside("tensors"), first):
            one.require(tensors)
    if isinstance(schedule, Window) and part.values.keys() & {"ring", "seen"}:
        seen = found["seen"] = part.integer("seen", least=min(n_averaged, 1), most=n_averaged)
        kept = min(seen, schedule.window)
        if len(part.items("ring")) != kept:
            part.refuse("ring", f"a list of {kept}, the smaller of seen and the window")
        found["ring"] = [copies.averaged(like=tensors) for copies in part.each("ring")]
        for copies in part.each("ring"):
            copies.require(tensors)
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
    if "raw" not in part.values:
        return {}
    found = part.tensors("raw")
    if found:
        members = NamedTensors(model)
        known = {**members.parameters, **members.buffers}
        shapes = {name: t.shape for name, t in found.items()}
        # A buffer may have had another shape.
        expected = {
            name: known[name].tensor.shape if name in members.parameters else shapes[name]
            for name in found
            if name in known
        }
        check_match("EMA: the training weights of the state do not fit the model", expected, shapes)
        for name, tensor in found.items():
            if tensor.is_complex() != known[name].tensor.is_complex():
                part.inside("raw").refuse(name, f"of a dtype like {known[name].tensor.dtype}")
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
    members = [key for key in keys if key != "n_averaged"]
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
        state: What its ``state_dict()`` returned, or the checkpoint in the case of Lightning.
        model: The model that was averaged, or one like it. States that contain a list without names
            (diffusers, torch_ema) get the names of its parameters, in order.
        update_after_step: The option of ema-pytorch of this name, which its state does not contain.

    Returns:
        The averages by name, and what the state contains about counts and decays. The tensors are not
        copied.

    Raises:
        ValueError: The state is unknown, a part of it is missing or invalid, or a list does not fit
            the parameters of the model.
    """
    source = recognise(state, model)
    if source is None:
        some = ", ".join(map(repr, list(state)[:5]))
        raise _error(
            "the state is neither from modkit.EMA, nor from a supported library, nor are its names "
            f"those of the model: it begins with {some or 'nothing'}"
        )
    return _READERS[source](_Part(source, state), model, update_after_step)


def _read_foreign(
    state: State,
    model: torch.nn.Module,
    schedules: list[Schedule],
    update_every: int,
    update_after_step: int,
) -> LoadedState:
    found = convert(state, model, update_after_step=update_after_step)
    count = 1 if found.n_averaged is None else found.n_averaged
    start = update_after_step + 1 if count else None
    average = {"tensors": found.averages, "rests": {}, "generators": {}}
    return LoadedState(
        step=update_after_step + 1 + (count - 1) * update_every if count else 0,
        start=start,
        n_averaged=count,
        update_every=update_every,
        update_after_step=update_after_step,
        schedules=[
            own if found.schedule is None or isinstance(own, _WITH_MODELS) else found.schedule
            for own in schedules
        ],
        averages=[average] * len(schedules),
        buffers=found.averages,
        raw={},
        foreign=True,
    )


def _from_averaged_model(part: _Part, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read torch's counter, and the members below ``module.``."""
    return Converted("torch", _members_below("module.", part), part.integer("n_averaged"))


def _from_lightning(part: _Part, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read a checkpoint in which the average replaces the model."""
    count = part.inside("averaging_state").integer("n_averaged")
    return Converted("lightning", _members_below("", part.inside("state_dict")), count)


def _from_timm(part: _Part, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read the members below ``module.``; there is nothing else."""
    return Converted("timm", _members_below("module.", part), None)


def _from_ema_pytorch(part: _Part, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read the members below ``ema_model.`` and the number of calls, the first of which copies."""
    counted = max(part.integer("step") - update_after_step, 1)
    averages = _members_below("ema_model.", part)
    return Converted("ema_pytorch", averages, counted if part.flag("initted") else 0)


def _from_diffusers(part: _Part, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read a list of parameters; its first step copies, and each up to ``update_after_step`` too."""
    part.require(("decay", "min_decay", "use_ema_warmup", "inv_gamma", "power"))
    steps = part.integer("optimization_step")
    counted = max(steps - part.integer("update_after_step"), min(steps, 1))
    given = part.values
    if part.flag("use_ema_warmup"):
        names: tuple[str, ...] = ("inv_gamma", "power", "min_decay", "decay")
        schedule = _made(part, InverseGamma, {name: given[name] for name in names})
    else:
        schedule = _made(part, CountWarmup, {name: given[name] for name in ("min_decay", "decay")})
    return Converted("diffusers", _named_in_order(part, model), counted, schedule)


def _from_torch_ema(part: _Part, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read a list of parameters that was copied when it was created, before the first step."""
    part.require(("decay", "num_updates"))
    averages = _named_in_order(part, model)
    decay = {"decay": part.values["decay"]}
    if part.values["num_updates"] is None:
        return Converted("torch_ema", averages, None, _made(part, Constant, decay))
    counted = part.integer("num_updates") + 1
    return Converted("torch_ema", averages, counted, _made(part, CountWarmup, decay))


def _from_weights(part: _Part, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read averaged weights under the names of the model: an average of one model."""
    return Converted("weights", _members_below("", part), 1)


_READERS: Final[dict[str, Callable[[_Part, torch.nn.Module, int], Converted]]] = {
    "diffusers": _from_diffusers,
    "ema_pytorch": _from_ema_pytorch,
    "lightning": _from_lightning,
    "timm": _from_timm,
    "torch": _from_averaged_model,
    "torch_ema": _from_torch_ema,
    "weights": _from_weights,
}


def _made(part: _Part, kind: type[Schedule], values: Mapping[str, Any]) -> Schedule:
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise _error(f"the state of {part.source} is invalid: its decay gives {error}") from error


def _members_below(prefix: str, part: _Part) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by their names in the model."""
    found = {
        key.removeprefix(prefix): value
        for key, value in part.values.items()
        if str(key).startswith(prefix) and isinstance(value, Tensor)
    }
    names = canonical_names(found)
    return _Part(
        part.source, {names[key]: value.detach() for key, value in found.items()}
    ).tensors()


def _named_in_order(part: _Part, model: torch.nn.Module) -> dict[str, Tensor]:
    """Give a list of tensors the names of the model's parameters, all of them or those that train."""
    found = part.items("shadow_params")
    for index, tensor in enumerate(found):
        if not isinstance(tensor, Tensor):
            part.refuse("shadow_params", f"a list of tensors, which [{index}] is not")
    named = dict(model.named_parameters())
    names = canonical_names(named)
    parameters = [(names[name], value) for name, value in named.items()]
    if len(parameters) != len(found):
        parameters = [(name, value) for name, value in parameters if value.requires_grad]
    if len(parameters) != len(found):
        raise _error(
            f"the state of {part.source} holds {len(found)} tensors without names, and the model has "
            f"{len(named)} parameters, {len(parameters)} of which train"
        )
    for (name, value), tensor in zip(parameters, found, strict=True):
        if value.shape != tensor.shape:
            raise _error(
                f"the state of {part.source} has no names, and its order is not that of the model: "
                f"where {name!r} has the shape {tuple(value.shape)} it has {tuple(tensor.shape)}"
            )
    return {name: tensor.detach() for (name, _), tensor in zip(parameters, found, strict=True)}
