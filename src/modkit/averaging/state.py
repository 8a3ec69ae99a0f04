"""Read the states of ``EMA``, migrate them, and match them with a model.

A state comes from a file, so nothing in it is trusted. Version, counts, names and shapes are
checked; everything else is built, and the engine commits it at the end. What nothing can be made of
is a ``ValueError`` with its path, before anything changes.
"""

import math
import operator
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from modkit._messages import warn_user
from modkit.averaging import schedules as decays
from modkit.averaging.options import Options
from modkit.averaging.precision import first_nonfinite
from modkit.averaging.schedules import Schedule
from modkit.averaging.sharding import are_own_shards
from modkit.averaging.tensors import NamedTensors, canonical_paths, check_match, shapes_of
from modkit.errors import shown


# The sources of states that this library saved, as errors name them.
OWN: Final = "modkit.EMA"

_LONGEST_REPR: Final = 80
# The exceptions that torch and Python raise where something cannot be made of a value.
_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)

# The version of the format. States of version 1 hold the keys that ``_read_own`` requires, and
# since later releases "raw" and "statistics" if there are any.
VERSION: Final = 1
_MISFIT: Final = "EMA: the state does not fit the model"
_MSG_OTHER_SHARDS: Final = (
    "the state holds the shards of another rank, because one rank saved it for all. Save the state "
    "dict of modkit.distributed.FullState(ema) in its place, or use torch.distributed.checkpoint"
)

ResultT = TypeVar("ResultT")


def invalid_state(text: str) -> ValueError:
    """Return the error for a state that cannot be loaded, printable in a terminal."""
    return ValueError(shown(f"EMA: {text}. Nothing has been changed."))


@contextmanager
def constructing(path: str, end: str = "") -> Generator[None]:
    """Raise a ValueError with the path of a part of a state, if nothing can be made of it."""
    try:
        yield
    except _ERRORS as error:
        reason = str(error).partition("\n")[0] + end
        raise invalid_state(f"{path} of the state cannot be loaded: {reason}") from error


def described(value: object) -> str:
    """Return a value as errors show it: in one line, and tensors without their elements."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f", layout {value.layout}"
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"a tensor of dtype {value.dtype}{layout} and shape {shape}"
    line = repr(value)
    return line if len(line) <= _LONGEST_REPR else f"{line[:_LONGEST_REPR]}..."


@dataclass(frozen=True)
class Part:
    """A part of a saved state, with its path; the parts in it are read by key or index.

    Attributes:
        source: The library that the state is from, as errors name it.
        value: The part, which may be anything.
        path: Its path in the state, such as ``averages[0]['tensors']``; empty for the whole state.
    """

    source: str
    value: Any
    path: str = ""

    def refuse(self, requirement: str) -> NoReturn:
        """Raise the ValueError that says what the part must be."""
        text = f"{self.path or 'the state'} must be {requirement}, got {described(self.value)}"
        raise invalid_state(f"the state of {self.source} is invalid: {text}")

    def made(self, make: Callable[[Any], ResultT]) -> ResultT:
        """Return what a function makes of the part; what it raises is a ValueError."""
        with constructing(self.path or "the whole"):
            value = self.plain()
            # A few bytes in a file may expand a tensor to any size.
            if isinstance(value, Tensor):
                raise TypeError(f"it is {described(value)}")
            return make(value)

    def get(self, key: Any, default: Any = None) -> "Part":
        """Return a part that may be missing."""
        if not isinstance(self.value, Mapping):
            self.refuse("a mapping")
        path = f"{self.path}[{key!r}]" if self.path else str(key)
        return replace(self, value=self.value.get(key, default), path=path)

    def __getitem__(self, key: Any) -> "Part":
        part = self.get(key)
        if key not in self.value:
            raise invalid_state(f"the state of {self.source} has no {part.path}")
        return part

    def each(self) -> "list[Part]":
        """Return the parts of a list."""
        if not isinstance(self.value, (list, tuple)):
            self.refuse("a list")
        entries = enumerate(self.value)
        return [replace(self, value=value, path=f"{self.path}[{i}]") for i, value in entries]

    def plain(self) -> Any:
        """Return the part; other libraries may save a number as a tensor with one element."""
        value = self.value
        is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
        return value.item() if is_number and self.source != OWN else value

    def count(self, least: int = 0, most: float = math.inf) -> int:
        """Return the part, which must be an int within these limits."""
        value = self.plain()
        # A bool is an ``int`` too, and would pass ``isinstance``.
        if type(value) is not int or not least <= value <= most:
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            self.refuse(f"an int {limits}")
        return value

    def tensor(self) -> Tensor:
        """Return the part, which must be a tensor with data."""
        tensor = self.value
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.is_nested:
            self.refuse("a tensor with data")
        return tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors in a mapping by name."""
        tensors = {name: self[name].tensor() for name in self.made(dict)}
        if not all(type(name) is str for name in tensors):
            self.refuse("a mapping from names of type str")
        return tensors


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
        foreign: True if the averages may hold tensors that are not averaged, as those of other
            libraries and migrated ones may.
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
    foreign: bool = False
    versions: Mapping[str, Any] | None = None
    first_shares: list[float] | None = None


def versions_of(model: torch.nn.Module) -> dict[str, int]:
    """Return the versions of a model's modules by path, without those that are 1 but its own."""
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = canonical_paths(modules)
    # Of a wrapper and its module, which have one path, the module comes last.
    versions = {paths[path]: each._version for path, each in modules.items() if each._version != 1}
    return {"": 1, **versions}


def migrated(loaded: LoadedState, model: torch.nn.Module) -> LoadedState:
    """Return a state after the migrations that classes of the model declare."""
    if not any(hasattr(type(module), "__migrations__") for module in model.modules()):
        return loaded
    # Canonical names are those below such a wrapper.
    while [*model._modules] == ["module"]:
        model = model.get_submodule("module")

    # Declaring imports that package, which nothing else may.
    migrations: Any = sys.modules["modkit.migrations"]
    state: dict[str, Any] = {
        "version": VERSION,
        "schedules": [],
        "averages": loaded.averages,
        "buffers": {} if loaded.foreign else loaded.buffers,
        "raw": loaded.raw,
        "versions": loaded.versions,
    }
    new = migrations.migrate(model, state)
    averages = new["averages"]
    buffers = averages[0]["tensors"] if loaded.foreign else new["buffers"]
    return replace(loaded, averages=averages, buffers=buffers, raw=new["raw"], foreign=True)


def stored_average(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a state holds of an average without statistics."""
    return {"tensors": tensors, "statistics": {}}


def is_own(state: Mapping[str, Any]) -> bool:
    """Return True for a state of ``EMA``, empty ones included, and not of another library."""
    if not isinstance(cast("object", state), Mapping):
        Part(OWN, state).refuse("a mapping")
    # One without its version is corrupt.
    return not state or "version" in state or {"averages", "schedules"} <= state.keys()


def read(state: Mapping[str, Any], current: LoadedState, step: int | None = None) -> LoadedState:
    """Read a state of an ``EMA`` for one with the current counts and options.

    Schedules and options of the state take precedence, with a warning. An invalid state is a
    ValueError, and so is ``step``, the counter for states that have none.
    """
    if step is not None:
        raise invalid_state(
            f"load_state_dict() got step={step}, but a state of {OWN} holds its own counter, or is "
            "empty and starts anew. Load it without step"
        )
    if not state:
        warn_user("EMA: the state is empty, so averaging starts anew")
        return replace(current, step=0, start=None, n_averaged=0)

    loaded = _read_own(Part(OWN, state), current.schedules)
    pairs = zip(loaded.schedules, current.schedules, strict=True)
    options: list[tuple[str, object, object]] = [("the schedule", *pair) for pair in pairs]
    options.append(("update_every", loaded.update_every, current.update_every))
    options.append(("update_after_step", loaded.update_after_step, current.update_after_step))
    for name, saved, given in options:
        if saved != given:
            warn_user(
                f"EMA: {name} is {saved} from here on, as in the loaded state, and not {given}"
            )
    return loaded


def _read_own(state: Part, schedules: list[Schedule]) -> LoadedState:
    """Read a state of ``EMA``; ``torch.distributed.checkpoint`` drops its empty dicts and lists."""
    version = state["version"].count(1)
    if version > VERSION:
        raise invalid_state(f"the state has version {version}, newer than {VERSION}; update modkit")

    # The average began at call ``start``, and has at most one model of each call from there on.
    step = state["step"].count()
    start: int | None = None
    n_averaged = state["n_averaged"].count()
    if n_averaged:
        start = state["start"].count(1, step)
        state["n_averaged"].count(0, step - start + 1)
    elif state["start"].value is not None:
        state["start"].refuse("None, as n_averaged is 0")

    configs = state["schedules"].each()
    averages = state.get("averages", [{}] * len(configs)).each()
    shares = state.get("first_shares").made(lambda values: [*map(float, values or ())])
    if not len(configs) == len(averages) == len(shares or configs) == len(schedules):
        raise invalid_state(
            f"the state holds {len(averages)} averages with {len(configs)} schedules, and this "
            f"object {len(schedules)}"
        )

    return LoadedState(
        step=step,
        start=start,
        n_averaged=n_averaged,
        schedules=[_schedule(*pair) for pair in zip(configs, schedules, strict=True)],
        averages=list(map(_average, averages)),
        update_every=state["update_every"].count(1),
        update_after_step=state["update_after_step"].count(),
        buffers=state.get("buffers", {}).tensors(),
        raw=state.get("raw", {}).tensors(),
        versions=state.get("versions").made(
            lambda saved: saved and {str(at): operator.index(n) for at, n in saved.items()}
        ),
        first_shares=shares or None,
    )


def _schedule(saved: Part, current: Schedule) -> Schedule:
    """Return ``current``, the schedule of the ``EMA``, if the state has an equal one, or its own.

    Functions and subclasses cannot be made from a state: code is never taken from a file.
    """
    if not isinstance(saved.value, Mapping):
        saved.refuse("a mapping")
    config = saved.value
    remedy = (
        ". If it was a function or a subclass of Schedule, pass an equal one to EMA as schedule=; "
        f"this one has {current}"
    )
    # A tensor has no truth value, and an int may be too large for a float.
    with constructing(f"{saved.path}, {described(config)},", end=remedy):
        if config == current.to_config():
            return current
        schedule = decays.from_config(config)
        if config != schedule.to_config():
            raise ValueError(f"its fields must be those of {schedule}")
        return schedule


def _average(saved: Part) -> dict[str, Any]:
    """Return what a state holds of an average; of its parts, only those that are needed exist."""
    # States of earlier versions have "rests": what rounding had lost of averages.
    return {name: saved.get(name, {}).tensors() for name in ("rests", *stored_average({}))}


def check_raw(raw: Mapping[str, Tensor], named: NamedTensors) -> None:
    """Check the training weights of a state from inside ``applied``, which go into the model."""
    # Not all of a model is swapped, so the state may hold fewer names, but no others.
    members = {name: member for name, member in named.all().items() if name in raw}
    shapes = {name: member.required_shape() for name, member in members.items()}
    problem = "EMA: the training weights of the state do not fit the model"
    check_match(problem, shapes, shapes_of(raw))
    _check_like("raw", raw, {name: member.tensor for name, member in members.items()})


def matched(
    loaded: LoadedState, members: NamedTensors, options: Options
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, Tensor]]]:
    """Compare the names and shapes of a state with those of a model.

    It returns the model's averaged tensors and its copied buffers by name, and the saved tensors of
    each average.
    """
    # Nothing is computed over a tensor whose shape has not been compared: a file of a few bytes may
    # expand one to any size.
    averaged, others = options.split(members, loaded.averages[0]["tensors"])
    copied = {member.name: member.tensor for member in others}
    _check_like("buffers", loaded.buffers, copied)

    tensors_of_each = [dict(stored["tensors"]) for stored in loaded.averages]
    for index, tensors in enumerate(tensors_of_each):
        if loaded.foreign:
            # Other libraries save tied tensors under each name, and tensors that are not averaged.
            for alias, name in members.aliases.items():
                if alias in tensors:
                    tensors.setdefault(name, tensors[alias])
            for name in tensors.keys() & (members.names() - averaged.keys()):
                del tensors[name]

        stored = loaded.averages[index]
        check_match(_MISFIT, shapes_of(averaged), shapes_of(tensors))
        # The model may have lost a layer since; its statistics are dropped.
        statistics = {n: t for n, t in stored["statistics"].items() if n in members.buffers}
        present = {name: members.buffers[name].tensor.shape for name in statistics}
        check_match(_MISFIT, present, shapes_of(statistics))

        # The engine refuses the others, which torch cannot average.
        dense = {n: tensor for n, tensor in averaged.items() if tensor.layout == torch.strided}
        _check_like(f"averages[{index}]['tensors']", tensors, dense)
        rests = stored.get("rests", {})
        _check_like(f"averages[{index}]['rests']", rests, dense)
        check_match(_MISFIT, {n: dense[n].shape for n in rests if n in dense}, shapes_of(rests))
        for name, rest in rests.items():
            # More bits than both have, so that the sum loses nothing.
            wide = torch.promote_types(rest.dtype, torch.float64)
            tensors[name] = tensors[name].to(wide).add(rest)

    shards = [tensor for tensors in tensors_of_each for tensor in tensors.values()]
    if not are_own_shards([*shards, *loaded.raw.values()], averaged.values()):
        raise invalid_state(_MSG_OTHER_SHARDS)
    for index, tensors in enumerate(tensors_of_each if options.on_nonfinite != "ignore" else ()):
        # All ranks of a sharded model take part in the test.
        wrong = first_nonfinite(tensors, options.process_group)
        if wrong is not None:
            raise invalid_state(
                f"the loaded averages must be finite with on_nonfinite={options.on_nonfinite!r}: "
                f"averages[{index}]['tensors'][{wrong!r}] contains inf or nan"
            )
    return averaged, copied, tensors_of_each


def _check_like(path: str, tensors: Mapping[str, Tensor], members: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a saved tensor that cannot be copied in place of that of the model."""
    for name, like in members.items():
        saved = tensors.get(name, like)
        is_like = saved.layout == like.layout and saved.is_complex() == like.is_complex()
        # Buffers may have had another shape, but a state has memory for each element.
        has_memory = (
            saved.shape == like.shape or saved.layout != torch.strided or 0 not in saved.stride()
        )
        if not (is_like and has_memory):
            raise invalid_state(
                f"{path}[{name!r}] of the state must be like {described(like)}, got "
                f"{described(saved)}"
            )
