"""The tensors of a model by canonical name: found in one walk, watched for changes, and selected."""

import fnmatch
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from modkit._tree import descend
from modkit._upstream import foreach_copy_, tensor_guard
from modkit.averaging.precision import PRECISIONS, OnNonfinite, Precision, kept_dtype
from modkit.averaging.sharding import is_sharded, local_shard, reshard
from modkit.errors import NameMismatchError


# Globs of names (``"head.*"``), or a predicate.
Names: TypeAlias = str | Iterable[str] | Callable[[str], bool] | None
BufferPolicy: TypeAlias = Literal["copy", "average", "ignore"]
# One policy for all buffers, or one for each glob of names; the first glob that matches counts.
Buffers: TypeAlias = BufferPolicy | Mapping[str, BufferPolicy]
Registry: TypeAlias = Mapping[str, Any]

_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
PLAIN: Final = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


def canonical_name(name: str) -> str:
    """Return a tensor's name without the parts that compilers and distributed wrappers add."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its canonical name, or to itself if two names would collide."""
    # They collide where a user's model has a child that is called ``module``.
    found = {name: canonical_name(name) for name in names}
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def _prefix_between(longer: set[str], shorter: set[str]) -> str:
    """Return the one prefix, such as ``"net."``, that turns the shorter names into the longer; or ""."""
    if not longer or not shorter:
        return ""
    # A common prefix leaves the alphabetical order as it is, so the first names are a pair.
    prefix = min(longer).removesuffix(min(shorter))
    fits = prefix.endswith(".") and longer == {prefix + name for name in shorter}
    return prefix if fits else ""


def _names_like(mine: set[str], names: dict[str, str], theirs: set[str]) -> dict[str, str]:
    """Return the names of a model without, or with, the prefix by which its parameters differ."""
    surplus, lacking = _prefix_between(mine, theirs), _prefix_between(theirs, mine)
    renamed = {key: lacking + name.removeprefix(surplus) for key, name in names.items()}
    # They collide where a wrapper has a buffer of the name of one of its network.
    return renamed if len(set(renamed.values())) == len(names) else names


def check_match(
    what: str,
    expected: Mapping[str, torch.Size | None],
    found: Mapping[str, torch.Size | None],
) -> None:
    """Raise NameMismatchError unless names and shapes agree; None stands for any shape."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    shapes: list[str] = []
    for name, wanted in expected.items():
        shape = found.get(name)
        if wanted is not None and shape is not None and shape != wanted:
            shapes.append(f"{name} ({tuple(shape)} instead of {tuple(wanted)})")
    if missing or unexpected or shapes:
        raise NameMismatchError(what, missing=missing, unexpected=unexpected, shapes=shapes)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of named tensors."""
    return {name: tensor.shape for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor of a model, and the registry and key under which its module has it."""

    name: str
    tensor: Any
    registry: Registry
    key: str
    is_parameter: bool
    persistent: bool

    def current(self) -> Tensor:
        """Return what is registered now: forwards may replace buffers."""
        tensor: Tensor = self.registry[self.key]
        return tensor


class NamedTensors:
    """All parameters and buffers of a model by canonical name, at one moment.

    Tied tensors are listed once, under their first name; ``aliases`` maps further names to it.
    ``empty`` holds buffers that are None. The child ``leave_out`` is skipped. If all parameters of the
    model differ by one prefix from those of ``like``, since one of the two wraps the other, the names
    are those of ``like``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        leave_out: torch.nn.Module | None = None,
        like: "NamedTensors | None" = None,
    ) -> None:
        places = _places(model, leave_out)
        self.modules: list[torch.nn.Module] = [module for _, module in places]
        reshard(self.modules)
        self.parameters: dict[str, Member] = {}
        self.buffers: dict[str, Member] = {}
        self.aliases: dict[str, str] = {}
        self.empty: dict[str, Member] = {}
        self.registries: list[Registry] = []
        self.buffer_registries: list[Registry] = []
        self.scripted: bool = False
        slots = [slot for prefix, module in places for slot in self._slots_of(prefix, module)]
        names = canonical_names(slot[0] for slot in slots)
        parameters = [slot[0] for slot in slots if slot[4] and slot[3] is not None]
        if like is not None:
            names = _names_like({names[name] for name in parameters}, names, like.parameter_names)
        self.parameter_names: set[str] = {names[name] for name in parameters}
        first: dict[int, str] = {}
        for name, registry, key, tensor, is_parameter, persistent in slots:
            member = Member(names[name], tensor, registry, key, is_parameter, persistent)
            if tensor is None:
                if not is_parameter:
                    self.empty[member.name] = member
            elif id(tensor) in first:
                self.aliases[member.name] = first[id(tensor)]
            else:
                first[id(tensor)] = member.name
                (self.parameters if is_parameter else self.buffers)[member.name] = member

    def _slots_of(
        self, prefix: str, module: torch.nn.Module
    ) -> Iterator[tuple[str, Registry, str, Any, bool, bool]]:
        parameters: Registry = module._parameters
        buffers: Registry = module._buffers
        if isinstance(module, torch.jit.ScriptModule):
            # C++ owns its registries, and makes new objects of them at each access.
            self.scripted = True
            parameters = dict(module.named_parameters(recurse=False))
            buffers = dict(module.named_buffers(recurse=False))
            transient: set[str] = set()
        else:
            self.registries += (module._modules, parameters)
            self.buffer_registries.append(buffers)
            transient = module._non_persistent_buffers_set
        for key, tensor in parameters.items():
            yield prefix + key, parameters, key, tensor, True, True
        for key, tensor in buffers.items():
            yield prefix + key, buffers, key, tensor, False, key not in transient

    def all(self) -> dict[str, Member]:
        """Return parameters and buffers together."""
        return {**self.parameters, **self.buffers}

    def names(self) -> set[str]:
        """Return all names, further names of tied tensors included."""
        return {*self.parameters, *self.buffers, *self.aliases}

    def member(self, name: str) -> Member | None:
        """Return the tensor of a name, which may be a further name of a tied one."""
        name = self.aliases.get(name, name)
        return self.parameters.get(name) or self.buffers.get(name)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a name, or raise NameMismatchError."""
        member = self.member(name)
        if member is None:
            what = "EMA: the state does not fit the model"
            raise NameMismatchError(what, missing=[], unexpected=[name], shapes=[])
        tensor: Tensor = member.tensor
        return tensor

    def is_like(self, other: "NamedTensors") -> bool:
        """Return True if another model has the same names, and parameters of the same shapes."""
        alike = (self.names(), self.aliases) == (other.names(), other.aliases)
        if not alike or self.has_lazy() or other.has_lazy():
            return False
        return all(
            member.tensor.shape == other.parameters[name].tensor.shape
            for name, member in self.parameters.items()
        )

    def has_lazy(self) -> bool:
        """Return True if a tensor has no shape yet, because its module has not been called."""
        return any(is_lazy(member.tensor) for member in self.all().values())


def _places(
    model: torch.nn.Module, leave_out: torch.nn.Module | None
) -> list[tuple[str, torch.nn.Module]]:
    """Return each module with the prefix of its names, on every path but those to ``leave_out``."""
    if model is leave_out:
        return []
    places = [("", model)]

    # Dynamo of torch 2.8 traces this, and does not know a union among the annotations.
    def enter(name: str, child: torch.nn.Module, parent_prefix: str) -> Any:
        if child is leave_out:
            return None
        prefix = f"{parent_prefix}{name}."
        places.append((prefix, child))
        return prefix

    descend(model, "", enter)
    return places


class Snapshot:
    """The objects that tables held at one moment, compared by identity.

    The comparison is a loop in C over ``is``: tensors compare elements, so ``==`` of tables is not
    usable, and a mode that changes ``==`` could stay entered after an interrupt.
    """

    def __init__(self, tables: Iterable[Registry]) -> None:
        self.tables: list[Registry] = list(tables)
        self._views = [table.values() for table in self.tables]
        self._lengths = list(map(len, self.tables))
        self._keys = list(chain.from_iterable(self.tables))
        self._values = list(chain.from_iterable(self._views))

    def changed(self) -> bool:
        """Return True if a table has other keys, or another object under one of them."""
        return (
            list(map(len, self.tables)) != self._lengths
            or not all(map(operator.is_, chain.from_iterable(self._views), self._values))
            or list(chain.from_iterable(self.tables)) != self._keys
        )


class Watch:
    """Detects tensors that were added, removed, replaced, tied, renamed, moved, cast or reshaped.

    It runs before each update, so it consists of loops in C. Assigning to ``parameter.data`` is not
    a change if the metadata of ``tensors`` stay. Buffers may be replaced, unless ``buffers``.
    """

    def __init__(
        self, models: Iterable[NamedTensors], tensors: Iterable[Tensor], *, buffers: bool = False
    ) -> None:
        models = list(models)
        # A scripted model cannot be watched, so it is walked again each time.
        self._unknown = any(model.scripted for model in models)
        registries = [table for model in models for table in model.registries]
        named = [table for model in models for table in model.buffer_registries]
        if buffers:
            registries, named = registries + named, []
        # Most tables are empty, and those are checked together.
        self._empty = [table for table in (*registries, *named) if not table]
        self._filled = Snapshot(table for table in registries if table)
        self._named = [table for table in named if table]
        self._names = list(chain.from_iterable(self._named))
        self._alike = metadata_guard(list(tensors))

    def changed(self) -> bool:
        """Return True if anything is not as it was."""
        return (
            self._unknown
            or self._filled.changed()
            or any(self._empty)
            or list(chain.from_iterable(self._named)) != self._names
            or not self._alike()
        )


def metadata_guard(tensors: list[Tensor]) -> Callable[[], bool]:
    """Return a function that returns True while the tensors have their present metadata."""
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    if sharded:
        return _alike_with_shards(tensors, sharded)
    if all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in tensors):
        guard = tensor_guard(tensors)
        if guard is not None:
            return guard
    facts = _facts_of(tensors)
    return lambda: _facts_of(tensors) == facts


def _alike_with_shards(tensors: list[Tensor], sharded: list[Tensor]) -> Callable[[], bool]:
    # FSDP may replace the shards.
    alike = metadata_guard([local_shard(tensor) for tensor in tensors])
    here = [local_shard(tensor) for tensor in sharded]

    def same() -> bool:
        with torch.no_grad():
            now = [cast("Any", tensor).to_local() for tensor in sharded]
        return all(map(operator.is_, now, here)) and alike()

    return same


def _facts_of(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


class Copies:
    """Tensors that are copied rather than averaged, planned once and then copied list by list."""

    def __init__(
        self,
        pairs: Iterable[tuple[dict[str, Any], str, Member]],
        device: torch.device | None = None,
        *,
        follow: bool = True,
    ) -> None:
        self.pairs: list[tuple[dict[str, Any], str, Member]] = list(pairs)
        self._device = device
        self._follow = follow
        self._tables: Snapshot | None = None
        # Without pairs there is nothing to plan.
        self._alike: Callable[[], bool] = lambda: not self.pairs
        self._lists: list[tuple[list[Tensor], list[Tensor]]] = []

    def sources(self) -> list[Any]:
        """Return what is registered now: forwards may replace buffers, also by None."""
        return [member.registry.get(member.key) for _, _, member in self.pairs]

    def run(self) -> None:
        """Bring all copies up to date. A copy is replaced if its source has another shape."""
        changed = self._tables is not None and self._tables.changed()
        if changed or not self._alike():
            self._plan(self.sources())
        for kept, found in self._lists:
            foreach_copy_(kept, found)

    def _plan(self, sources: list[Any]) -> None:
        lists: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for (registry, key, _), source in zip(self.pairs, sources, strict=True):
            kept = self._target(registry, key, source)
            if kept is None:
                continue
            place = kept.device, kept.dtype, source.device, source.dtype
            to, by = lists.setdefault(place, ([], []))
            to.append(kept)
            by.append(source)
        self._lists = list(lists.values())
        targets = [registry.get(key) for registry, key, _ in self.pairs]
        self._alike = metadata_guard([one for one in sources + targets if one is not None])
        tables = {id(t): t for to, _, member in self.pairs for t in (to, member.registry)}
        self._tables = Snapshot(tables.values())

    def run_traced(self) -> None:
        """Bring all copies up to date in operations that can be compiled."""
        for (registry, key, _), source in zip(self.pairs, self.sources(), strict=True):
            kept = self._target(registry, key, source)
            if kept is not None:
                kept.detach().copy_(source.detach())

    def _target(self, registry: dict[str, Any], key: str, source: Tensor | None) -> Tensor | None:
        """Return the tensor to copy into, made anew if it does not fit; None if there is none."""
        kept: Tensor | None = registry.get(key)
        if source is None or kept is source:
            registry[key] = source
            return None
        device, dtype = self._device or source.device, source.dtype
        if kept is not None and not self._follow:
            device, dtype = kept.device, kept.dtype
        if kept is None or (kept.shape, kept.device, kept.dtype) != (source.shape, device, dtype):
            registry[key] = kept = source.detach().to(device, dtype, copy=True)
        return kept


def is_averaged(tensor: Tensor) -> bool:
    """Return True for floating-point and complex tensors: integers have no average."""
    return tensor.is_floating_point() or tensor.is_complex()


def check_choice(owner: str, name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if the value is not one of the choices."""
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        raise ValueError(f"{owner}: {name} must be one of {expected}, got {value!r}")


@dataclass(frozen=True)
class Options:
    """Options of an average, validated. See ``EMA``.

    ``dtype`` is that of ``EMA.to``. ``copy_rest`` copies parameters that are not averaged, ``integers`` averages integer parameters
    too, which truncates, and ``owner`` is the class that error messages name.
    """

    include: Names = None
    exclude: Names = None
    buffers: Buffers = "copy"
    trainable_only: bool = False
    precision: Precision = "fp32"
    device: torch.device | None = None
    on_nonfinite: OnNonfinite = "ignore"
    seed: int = 0
    dtype: torch.dtype | None = None
    copy_rest: bool = False
    integers: bool = False
    owner: str = "EMA"

    def __post_init__(self) -> None:
        policies = [self.buffers] if isinstance(self.buffers, str) else self.buffers.values()
        for policy in policies:
            check_choice(self.owner, "buffers", policy, get_args(BufferPolicy))
        check_choice(self.owner, "precision", self.precision, PRECISIONS)
        check_choice(self.owner, "on_nonfinite", self.on_nonfinite, get_args(OnNonfinite))
        for field in ("include", "exclude"):
            names = getattr(self, field)
            if names is not None and not isinstance(names, str) and not callable(names):
                # Globs may come from an iterator.
                object.__setattr__(self, field, tuple(names))

    def check_globs(self, model: torch.nn.Module) -> None:
        """Raise ValueError if a glob matches no name: it is a mistake that would have no effect.

        ``"*"`` is not one, and a lazy model does not have all of its tensors yet.
        """
        parameters = [("include", self.include), ("exclude", self.exclude)]
        globs = [(option, glob) for option, names in parameters for glob in _globs_of(names)]
        if isinstance(self.buffers, Mapping):
            globs += [("buffers", glob) for glob in self.buffers]
        named = NamedTensors(model) if globs else None
        if named is None or named.has_lazy():
            return

        def matched(option: str, glob: str) -> bool:
            buffers = (*named.buffers, *named.empty)
            known = buffers if option == "buffers" else named.parameters
            return glob == "*" or any(fnmatch.fnmatchcase(name, glob) for name in known)

        unused = [f"{option}={glob!r}" for option, glob in globs if not matched(option, glob)]
        if unused:
            names = [*named.parameters, *named.buffers]
            some = ", ".join(names[:8])
            tied = [f"; {alias} is tied to {name}" for alias, name in named.aliases.items()]
            raise ValueError(
                f"{self.owner}: no name of {type(model).__name__} matches {', '.join(unused)}. The names "
                f"of its {len(names)} tensors begin with {some}{''.join(tied[:4])}. Correct the globs, "
                "or leave them out."
            )

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the average of a tensor of ``dtype`` is kept."""
        own = self.dtype if dtype.is_floating_point else None
        return own or kept_dtype(dtype, self.precision)

    def check_width(self, what: str, dtype: torch.dtype, remedy: str) -> None:
        """Raise ValueError if averages cast to ``dtype`` have fewer bits than ``precision`` promises."""
        if self.precision not in ("fp32", "fp64"):
            return
        least = kept_dtype(dtype, self.precision)
        if least != dtype:
            raise ValueError(
                f"{what} {dtype}, but precision={self.precision!r} keeps averages in {least} or wider: in "
                "fewer bits updates are rounded away. For averages in bf16 or fp16 use precision='stochastic' "
                f"or 'compensated'. {remedy}"
            )

    def chooses(self, member: Member, known: Iterable[str] = ()) -> bool:
        """Return True if a parameter is averaged; one that is averaged already stays so."""
        name = member.name
        if self.include is not None and not _matches(self.include, name):
            return False
        trains = not self.trainable_only or member.tensor.requires_grad or name in known
        return trains and not _matches(self.exclude, name)

    def _policy(self, member: Member, known: Iterable[str]) -> BufferPolicy:
        has_average = is_averaged(member.tensor)
        if member.is_parameter:
            if not self.chooses(member, known):
                return "copy" if self.copy_rest else "ignore"
            return "average" if has_average or self.integers else "copy"
        if isinstance(self.buffers, str):
            return self.buffers if has_average else "copy"
        for glob, policy in self.buffers.items():
            if fnmatch.fnmatchcase(member.name, glob):
                return "copy" if policy == "average" and not has_average else policy
        return "copy"

    def split(
        self, model: NamedTensors, known: Iterable[str] = ()
    ) -> tuple[dict[str, Tensor], list[Member]]:
        """Return the tensors to average by name, and those to copy; ``known`` are averaged already."""
        averaged: dict[str, Tensor] = {}
        copied: list[Member] = []
        for name, member in model.all().items():
            policy = self._policy(member, known)
            if policy == "average":
                averaged[name] = member.tensor
            elif policy == "copy":
                copied.append(member)
        return averaged, copied


def _matches(names: Names, name: str) -> bool:
    if callable(names):
        return bool(names(name))
    return any(fnmatch.fnmatchcase(name, glob) for glob in _globs_of(names))


def _globs_of(names: Names) -> Iterable[str]:
    """Return the globs of an option; a predicate has none."""
    if names is None or callable(names):
        return ()
    return (names,) if isinstance(names, str) else names
