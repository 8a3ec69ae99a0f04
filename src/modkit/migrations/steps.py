"""The steps of a migration: what each does to the entries of a module, and its inverse.

Steps name tensors relative to the class that declares them. A pattern matches whole names, and the
old and the new names of a step have the same wildcards, so that each renaming has an inverse.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from modkit.errors import MigrationError
from modkit.migrations.patterns import check_pattern, compiled, filled, first_match, wildcards


Entries = dict[str, Any]
_INVERSE_KINDS: Final = {"merge": "split", "split": "merge", "drop": "add", "add": "drop"}


class Lazy:
    """A tensor of a file, or one computed from such, that is read on demand.

    Attributes:
        meta: A tensor on the meta device with its dtype and shape.
        read: Returns the tensor.
    """

    def __init__(self, meta: Tensor, read: Callable[[], Tensor]) -> None:
        self.meta = meta
        self.read = read


class UndecidableError(MigrationError):
    """A step cannot be tried out, so that it does not say of which version a state dict is."""


class Slots(dict[str, Any]):
    """The state that an optimizer has for one parameter: tensors of its shape, and scalars.

    Attributes:
        sources: The names of the parameters that it is made of.
        shape: The shape of the parameter; None if no tensor of the state has more than a scalar.
    """

    def __init__(self, state: Mapping[str, Any], sources: Sequence[str]) -> None:
        super().__init__(state)
        self.sources = sources
        shapes = [value.shape for value in state.values() if isinstance(value, Tensor)]
        self.shape: torch.Size | None = next((shape for shape in shapes if shape), None)


# A step computes from tensors of exactly these types: shards and quantized tensors would be joined or
# split along the wrong elements.
_COMPUTED_FROM: Final = (Lazy, Slots, Tensor, torch.nn.Parameter)


@dataclass(frozen=True, eq=False)
class Step:
    """Tensors under the names ``old`` become those under ``new``.

    Attributes:
        kind: The function that made it.
        old: Patterns of the names before.
        new: Patterns of the names after.
        up: ``up(module, *tensors)`` computes the new tensors; None if they are the old ones.
        down: The inverse of ``up``.
        one_way: Whether there is no inverse.
        stacked: Whether the one ``*`` counts tensors that one tensor stacks.
    """

    kind: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    up: Callable[..., Any] | None = None
    down: Callable[..., Any] | None = None
    one_way: bool = False
    stacked: bool = False

    def __post_init__(self) -> None:
        names = (*self.old, *self.new)
        for name in names:
            check_pattern(name)
        if len({*self.old}) < len(self.old) or len({*self.new}) < len(self.new):
            raise TypeError(f"{self}: a name is listed twice")
        if not self.stacked and any(wildcards(name) != wildcards(names[0]) for name in names):
            raise TypeError(f"{self}: all names must have the same wildcards in the same order")

    def __str__(self) -> str:
        ends = (", ".join(names) for names in (self.old, self.new) if names)
        return f"{self.kind} {' -> '.join(ends)}"

    def inverse(self) -> "Step":
        """Return the step back, or raise MigrationError."""
        if self.one_way:
            needed = "a default" if self.kind == "drop" else "a function down="
            raise MigrationError(f"{self} has no inverse; declare {needed}")
        kind = _INVERSE_KINDS.get(self.kind, self.kind)
        return replace(
            self, kind=kind, old=self.new, new=self.old, up=self.down, down=self.up, one_way=False
        )


class Change(NamedTuple):
    """One application of a step, with names relative to the module, and shapes.

    Attributes:
        step: The step.
        sources: The names that it takes.
        targets: The names that it makes.
        shapes: The shape of each source, None for what is not a tensor.
        results: The shape of each target.
        versions: The versions before and after it.
    """

    step: Step
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    shapes: tuple[Any, ...]
    results: tuple[Any, ...]
    versions: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        before = _listed(self.sources, self.shapes)
        after = _listed(self.targets, self.results)
        return f"{self.step.kind} {' -> '.join(end for end in (before, after) if end)}"


def _listed(names: Sequence[str], shapes: Sequence[Any]) -> str:
    pairs = zip(names, shapes, strict=True)
    return ", ".join(name if shape is None else f"{name} {list(shape)}" for name, shape in pairs)


def rename(old: str, new: str) -> Step:
    """Rename tensors.

    Args:
        old: Name in older versions. ``*`` stands for one part of it, ``**`` for one or more.
        new: Name since this version, with the same wildcards.

    Raises:
        TypeError: If the wildcards differ, or stand within a part of a name.

    Example:
        >>> from modkit import migrations as mig
        >>> print(mig.rename("out.**", "proj.**"))
        rename out.** -> proj.**
    """
    return Step("rename", (old,), (new,))


def drop(name: str, default: Any = None) -> Step:
    """Remove tensors that this version does not have.

    Args:
        name: Name in older versions.
        default: Tensor, or ``f(module)`` that returns one, for files of an older version. Without it,
            there is no way back.

    Raises:
        TypeError: If there is a default for a name with wildcards.
    """
    if default is None:
        return Step("drop", (name,), (), one_way=True)
    return add(name, default).inverse()


def add(name: str, default: Any) -> Step:
    """Add a tensor that older versions do not have.

    Without versions, it is added where it is absent and everything else fits.

    Args:
        name: Its full name.
        default: The tensor, or ``f(module)`` that returns it.

    Raises:
        TypeError: If the name has wildcards.
    """
    check_pattern(name)
    if wildcards(name):
        raise TypeError(
            f"{name!r}: a tensor with a default needs a full name; declare it on the class"
        )

    def value(module: torch.nn.Module) -> Tensor:
        found = default(module) if callable(default) else default
        if not isinstance(found, Tensor):
            raise MigrationError(
                f"the default of {name} is not a tensor but {type(found).__name__}"
            )
        return found.detach().clone()

    return Step("add", (), (name,), value)


def merge(names: str | Sequence[str], new: str, dim: int | None = 0) -> Step:
    """Concatenate tensors of equal shape, or stack tensors with numbers in their names.

    Args:
        names: Names in older versions: several, with the same wildcards; with ``dim=None`` one, whose
            ``*`` are the numbers 0, 1, 2 and so on, such as ``"experts.*.weight"``.
        new: Name since this version.
        dim: Dimension to concatenate along; None stacks along a new first dimension.

    Raises:
        TypeError: If the names do not fit ``dim``, or their wildcards differ.
    """
    return split(new, names, dim).inverse()


def split(old: str, names: str | Sequence[str], dim: int | None = 0, sizes: Any = None) -> Step:
    """Split a tensor into parts.

    Args:
        old: Name in older versions.
        names: Names of the parts since this version: several; with ``dim=None`` one, whose ``*`` becomes
            0, 1, 2 and so on.
        dim: Dimension to split along; None removes the first dimension.
        sizes: Sizes along ``dim``, or ``f(module)`` that returns them. Default: equal parts.

    Raises:
        TypeError: If the names do not fit ``dim``, or their wildcards differ.
    """
    parts = _all(names)
    stacked = dim is None
    has_number = len(parts) == 1 and wildcards(parts[0]) == ["*"] and not wildcards(old)
    if not (has_number and sizes is None if stacked else len(parts) > 1):
        raise TypeError(
            f"merge or split of {old!r} and {', '.join(map(repr, parts))}: dim=None needs one name with one "
            "*, without sizes; a number needs several names"
        )

    def sizes_for(module: torch.nn.Module) -> list[int] | None:
        lengths: Any = sizes(module) if callable(sizes) else sizes
        return None if lengths is None else list(lengths)

    def apart(module: torch.nn.Module, whole: Tensor) -> list[Tensor]:
        if dim is None:
            return list(whole.unbind(0))
        lengths = sizes_for(module)
        if lengths is None and whole.shape[dim] % len(parts):
            raise MigrationError(
                f"{whole.shape[dim]} is not divisible into {len(parts)} equal parts"
            )
        lengths = lengths or [whole.shape[dim] // len(parts)] * len(parts)
        return list(whole.split(lengths, dim))

    def join(module: torch.nn.Module, *tensors: Tensor) -> Tensor:
        if len({tensor.dtype for tensor in tensors}) > 1:
            dtypes = ", ".join(str(tensor.dtype) for tensor in tensors)
            raise MigrationError(f"the tensors have several dtypes: {dtypes}")
        if dim is None:
            return torch.stack(tensors)
        lengths = [tensor.shape[dim] for tensor in tensors]
        expected = sizes_for(module) or [lengths[0]] * len(lengths)
        if lengths != expected:
            # The way back could not tell where one ends.
            raise MigrationError(
                f"the sizes along dim={dim} are {lengths}, not {expected}; convert() joins tensors of "
                "any sizes"
            )
        return torch.cat(tensors, dim)

    return Step("split", (old,), parts, apart, join, stacked=stacked)


def convert(
    names: str | Sequence[str],
    up: Callable[..., Any],
    down: Callable[..., Any] | None = None,
    new: str | Sequence[str] | None = None,
) -> Step:
    """Compute tensors: transposes, interleaved heads, and all that no other step does.

    Functions take the tensors, or the module and the tensors if they have one required argument more.
    They return a tensor or a list. They must also work on meta tensors, which is how shapes are found.

    Args:
        names: One or several names in older versions.
        up: Computes the new tensors.
        down: Computes the old tensors from the new ones. Without it, there is no way back.
        new: One or several names since this version. Default: ``names``.

    Raises:
        TypeError: If the wildcards differ, or a function cannot be called.
    """
    old = _all(names)
    targets = old if new is None else _all(new)
    upward = _with_module(up, len(old))
    downward = None if down is None else _with_module(down, len(targets))
    return Step("convert", old, targets, upward, downward, one_way=down is None)


def _all(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _with_module(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return ``f(module, *tensors)`` for a function that may take the tensors alone."""
    if not callable(function):
        raise TypeError(f"convert: {function!r} is not a function")

    def without_module(module: torch.nn.Module, *tensors: Tensor) -> Any:
        return function(*tensors)

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Functions of torch that are written in C++ have no signature, and take tensors.
        return without_module

    required = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}
    ]
    has_rest = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if len(required) == count + 1 or (has_rest and len(required) == 1):
        return function
    return without_module


def shape_of(value: Any) -> torch.Size | None:
    """Return the shape of an entry; None if it has none."""
    if isinstance(value, Lazy):
        return value.meta.shape
    if isinstance(value, Slots):
        return value.shape
    return value.shape if isinstance(value, Tensor) else None


def apply(step: Step, module: torch.nn.Module, entries: Entries, changes: list[Change]) -> Entries:
    """Return the entries after a step, all applications of which happen at once.

    New entries take the place of the first one that they are made of; the others come last.
    """
    placed: dict[str, Entries] = {}
    gone: set[str] = set()
    for sources, patterns, values in _applications(step, entries):
        inputs = [entries[name] for name in sources]
        results = inputs if step.up is None else _computed(step, module, sources, inputs)
        if step.stacked and wildcards(patterns[0]):
            targets = tuple(filled(patterns[0], [str(number)]) for number in range(len(results)))
        else:
            targets = tuple(filled(pattern, values) for pattern in patterns)
        if step.kind == "drop":
            results = []
        if len(results) != len(targets):
            raise MigrationError(f"{step}: {len(results)} tensors for {len(targets)} names")
        gone.update(sources)
        placed[(sources or targets)[0]] = dict(zip(targets, results, strict=True))
        shapes = tuple(map(shape_of, inputs)), tuple(map(shape_of, results))
        changes.append(Change(step, sources, targets, *shapes))
    if not placed:
        return entries

    kept = [name for name in entries if name not in gone]
    mixed = None if step.stacked else first_match(step.new, kept)
    if mixed is not None:
        raise MigrationError(
            f"{step}: {mixed[0]} is there already and also matches {mixed[1]}, so that there would be no "
            "way back; name the tensors more exactly"
        )
    result: Entries = {}
    places = (
        {name: entries[name]} if name not in gone else placed.pop(name, {}) for name in entries
    )
    for group in (*places, *placed.values()):
        for name, value in group.items():
            if name in result:
                raise MigrationError(f"{step}: two tensors would get the name {name}")
            result[name] = value
    return result


_Application = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _applications(step: Step, names: Mapping[str, Any]) -> Iterable[_Application]:
    """Return for each application of a step its sources, target patterns and values of wildcards."""
    if not step.old:
        return [((), step.new, ())]
    if step.stacked and wildcards(step.old[0]):
        return _stack(step, names)

    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for pattern in step.old:
        if not wildcards(pattern):
            if pattern in names:
                groups.setdefault((), {})[pattern] = pattern
            continue
        for name in names:
            if match := compiled(pattern).fullmatch(name):
                groups.setdefault(match.groups(), {})[pattern] = name

    applications: list[_Application] = []
    for values, members in groups.items():
        if len(members) < len(step.old):
            absent = next(filled(each, values) for each in step.old if each not in members)
            there = next(iter(members.values()))
            raise MigrationError(f"{step}: there is {there}, but no {absent}")
        applications.append((tuple(members[each] for each in step.old), step.new, values))
    return applications


def _stack(step: Step, names: Mapping[str, Any]) -> list[_Application]:
    """Return the sources of a stack in the order of their numbers."""
    matches = [match for name in names if (match := compiled(step.old[0]).fullmatch(name))]
    numbered = {int(match[1]): match[0] for match in matches if match[1].isdecimal()}
    if not numbered:
        return []
    gaps = [number for number in range(max(numbered) + 1) if number not in numbered]
    if gaps:
        absent = filled(step.old[0], [str(gaps[0])])
        raise MigrationError(f"{step}: there is {numbered[max(numbered)]}, but no {absent}")
    return [(tuple(numbered[number] for number in sorted(numbered)), step.new, ())]


def _computed(
    step: Step, module: torch.nn.Module, names: Sequence[str], values: Sequence[Any]
) -> list[Any]:
    for name, value in zip(names, values, strict=True):
        if type(value) not in _COMPUTED_FROM or getattr(value, "is_quantized", False):
            is_quantized = type(value) in _COMPUTED_FROM
            kind = "quantized tensor" if is_quantized else type(value).__name__
            # Names do not show that a step which keeps them was done.
            error = UndecidableError if step.old == step.new else MigrationError
            raise error(
                f"{step}: {name} is a {kind}; migrate the full state dict, before its tensors are "
                "sharded or quantized"
            )
    if any(isinstance(value, Slots) for value in values):
        return _computed_slots(step, module, names, values)
    if any(isinstance(value, Lazy) for value in values):
        return _computed_later(step, module, values)
    return _results(step, module, values)


def _results(step: Step, module: torch.nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call the function of a step; results have memory of their own."""
    assert step.up is not None
    try:
        with torch.no_grad():
            found = step.up(module, *tensors)
            results = [found] if isinstance(found, Tensor) else list(found)
            return [_with_own_memory(one) for one in results]
    except MigrationError as error:
        raise MigrationError(f"{step}: {error}") from error
    except Exception as error:
        on_meta = " on meta tensors" if any(one.is_meta for one in tensors) else ""
        text = str(error).partition("\n")[0]
        # A function that needs values, such as ``tolist()`` or NumPy, says so.
        kind = UndecidableError if on_meta and "meta" in text else MigrationError
        raise kind(f"{step} failed{on_meta}: {type(error).__name__}: {text}") from error


def _with_own_memory(tensor: Tensor) -> Tensor:
    """Copy a view of a larger tensor: it would be saved with all of that, or shared with other views."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _computed_later(step: Step, module: torch.nn.Module, values: Sequence[Any]) -> list[Any]:
    """Compute dtypes and shapes now, and tensors when they are read."""
    metas = _results(
        step, module, [one.meta if isinstance(one, Lazy) else one.to("meta") for one in values]
    )
    # Parts of one tensor are usually read one after the other: it is read once, and each part is freed
    # as soon as it has been taken.
    parts: dict[int, Tensor] = {}

    def read(number: int) -> Tensor:
        if number not in parts:
            tensors = [one.read() if isinstance(one, Lazy) else one for one in values]
            parts.update(enumerate(_results(step, module, tensors)))
        return parts.pop(number)

    return [Lazy(meta, partial(read, number)) for number, meta in enumerate(metas)]


def _computed_slots(
    step: Step, module: torch.nn.Module, names: Sequence[str], values: Sequence[Slots]
) -> list[Slots]:
    """Merge or split the state of an optimizer: each tensor as the parameter, scalars as they are."""
    if step.kind not in {"merge", "split"}:
        raise UndecidableError(
            f"{step}: the state of an optimizer for {names[0]} cannot be computed"
        )
    count = len(step.new)
    sources = [source for each in values for source in each.sources]
    results: list[dict[str, Any]] = []
    for slot in dict.fromkeys(slot for each in values for slot in each):
        parts = [each.get(slot) for each in values]
        if all(
            isinstance(part, Tensor) and part.shape == each.shape
            for part, each in zip(parts, values, strict=True)
        ):
            made: list[Any] = _computed(step, module, names, parts)
            count = len(made)
        elif all(_is_scalar(part) and bool(part == parts[0]) for part in parts):
            made = parts[:1] * count
        else:
            raise MigrationError(
                f"{step}: {slot!r} of the optimizer differs among {', '.join(names)}"
            )
        results = results or [{} for _ in made]
        for result, part in zip(results, made, strict=True):
            result[slot] = part.clone() if isinstance(part, Tensor) else part
    return [Slots(result, sources) for result in results or [{} for _ in range(count)]]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)
