"""The steps of a migration: what each does to the entries of a module, and its inverse.

Steps name tensors relative to the class that declares them. A pattern matches whole names, and the
old and the new names of a step have the same wildcards, so that each renaming has an inverse.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from modkit.errors import MigrationError
from modkit.migrations.patterns import check_pattern, filled, matches, wildcards


Entries = dict[str, Any]
Names: TypeAlias = str | Sequence[str]
# A function gets the module.
Default: TypeAlias = Tensor | Callable[[Any], Tensor]
Sizes: TypeAlias = Sequence[int] | Callable[[Any], Sequence[int]]
_INVERSE_KINDS: Final = {"merge": "split", "split": "merge", "drop": "add", "add": "drop"}
# Needed by a step of these kinds for its way back.
_NEEDED_FOR_INVERSE: Final = {"drop": "a default", "convert": "a function down="}


class Lazy:
    """A tensor of a file, or one computed from such, that is read on demand.

    Args:
        meta: A tensor on the meta device with its dtype and shape.
        read: Function that returns the tensor.

    Attributes:
        meta: The argument.
        read: The argument.
    """

    def __init__(self, meta: Tensor, read: Callable[[], Tensor]) -> None:
        self.meta = meta
        self.read = read


class UndecidableError(MigrationError):
    """A step cannot be tried out, so that it does not say of which version a state dict is."""


# A step computes from tensors of exactly these types: shards and quantized tensors would be joined
# or split along the wrong elements.
_COMPUTED_FROM: Final = (Lazy, Tensor, torch.nn.Parameter)


@dataclass(frozen=True, eq=False)
class Step:
    """Tensors under the names ``old`` become those under ``new``.

    Attributes:
        kind: The function that made it.
        old: Patterns of the names before.
        new: Patterns of the names after.
        up: ``up(module, *tensors)`` computes the new tensors; None if they are the old ones.
        down: The inverse of ``up``.
        stacked: Whether the one ``*`` counts tensors that one tensor stacks.
    """

    kind: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    up: Callable[..., Any] | None = field(default=None, repr=False)
    down: Callable[..., Any] | None = field(default=None, repr=False)
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
        return _arrow(self.kind, ", ".join(self.old), ", ".join(self.new))

    def inverse(self) -> "Step":
        """Return the step back, or raise MigrationError."""
        if self.down is None and self.kind in _NEEDED_FOR_INVERSE:
            needed = _NEEDED_FOR_INVERSE[self.kind]
            raise MigrationError(f"{self} has no inverse; declare {needed}")
        kind = _INVERSE_KINDS.get(self.kind, self.kind)
        return replace(self, kind=kind, old=self.new, new=self.old, up=self.down, down=self.up)


class Change(NamedTuple):
    """One application of a step, with names relative to the module.

    Attributes:
        step: The step.
        sources: The names that it takes.
        targets: The names that it makes.
        inputs: The entries under ``sources``.
        outputs: The entries under ``targets``.
        owner: The path and the class of the module, and the versions before and after the step.
    """

    step: Step
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    inputs: list[Any]
    outputs: list[Any]
    owner: str = ""

    def __str__(self) -> str:
        before = _with_shapes(self.sources, self.inputs)
        after = _with_shapes(self.targets, self.outputs)
        return f"{self.owner}: {_arrow(self.step.kind, before, after)}"


def _with_shapes(names: Sequence[str], values: Sequence[Any]) -> str:
    shapes = [shape_of(value) for value in values]
    pairs = zip(names, shapes, strict=True)
    return ", ".join(name if shape is None else f"{name} {list(shape)}" for name, shape in pairs)


def _arrow(kind: str, before: str, after: str) -> str:
    return f"{kind} {' -> '.join(filter(None, (before, after)))}"


def rename(old: str, new: str) -> Step:
    """Rename tensors.

    Args:
        old: Name in older versions. ``*`` stands for one part of it, ``**`` for one or more.
        new: Name since this version, with the same wildcards.

    Returns:
        A step for :func:`declare`.

    Raises:
        TypeError: If the wildcards differ, or stand within a part of a name.

    Example:
        >>> from modkit import migrations as mig
        >>> print(mig.rename("out.**", "proj.**"))
        rename out.** -> proj.**
    """
    return Step("rename", (old,), (new,))


def drop(name: str, default: Default | None = None) -> Step:
    """Remove tensors that this version does not have.

    Args:
        name: Name in older versions.
        default: Tensor, or ``f(module)`` that returns one, for files of an older version. Without
            it, the step has no inverse.

    Returns:
        A step for :func:`declare`.

    Raises:
        TypeError: If ``name`` is not a name or a pattern, or there is a default for a name with
            wildcards.

    Example:
        >>> import torch
        >>> from modkit import migrations as mig
        >>> print(mig.drop("masked_bias", torch.tensor(-1e4)))
        drop masked_bias
    """
    if default is None:
        return Step("drop", (name,), ())
    return add(name, default).inverse()


def add(name: str, default: Default) -> Step:
    """Add a tensor that older versions do not have.

    Without versions, it is added where it is absent and everything else fits.

    Args:
        name: Its full name.
        default: The tensor, or ``f(module)`` that returns it. It is copied.

    Returns:
        A step for :func:`declare`.

    Raises:
        TypeError: If the name has wildcards, or is not a name.

    Example:
        >>> import torch
        >>> from modkit import migrations as mig
        >>> print(mig.add("scale", lambda module: torch.ones(module.heads)))
        add scale
    """
    check_pattern(name)
    if wildcards(name):
        raise TypeError(
            f"{name!r}: a tensor with a default needs a full name; declare it on the class"
        )

    def new_tensor(module: torch.nn.Module) -> Tensor:
        tensor: Any = default(module) if callable(default) else default
        if not isinstance(tensor, Tensor):
            raise MigrationError(
                f"the default of {name} is not a tensor but {type(tensor).__name__}"
            )
        return tensor.detach().clone()

    return Step("add", (), (name,), up=new_tensor)


def merge(names: Names, new: str, dim: int | None = 0) -> Step:
    """Concatenate tensors of equal shape, or stack tensors with numbers in their names.

    Args:
        names: Names in older versions: several, with the same wildcards; with ``dim=None`` one,
            whose ``*`` are the numbers 0, 1, 2 and so on, such as ``"experts.*.weight"``.
        new: Name since this version.
        dim: Dimension to concatenate along; None stacks along a new first dimension.

    Returns:
        A step for :func:`declare`. Its inverse splits.

    Raises:
        TypeError: If the names do not fit ``dim``, or their wildcards differ.

    Example:
        >>> from modkit import migrations as mig
        >>> print(mig.merge(["q.*", "k.*", "v.*"], "qkv.*"))
        merge q.*, k.*, v.* -> qkv.*
    """
    return split(new, names, dim).inverse()


def split(old: str, names: Names, dim: int | None = 0, sizes: Sizes | None = None) -> Step:
    """Split a tensor into parts.

    Args:
        old: Name in older versions.
        names: Names of the parts since this version: several; with ``dim=None`` one, whose ``*``
            becomes 0, 1, 2 and so on.
        dim: Dimension to split along; None removes the first dimension.
        sizes: Sizes along ``dim``, or ``f(module)`` that returns them. Default: equal parts.

    Returns:
        A step for :func:`declare`. Its inverse merges.

    Raises:
        TypeError: If the names do not fit ``dim``, or their wildcards differ.

    Example:
        >>> from modkit import migrations as mig
        >>> print(mig.split("up_gate", ["up", "gate"]))
        split up_gate -> up, gate
    """
    new = _as_tuple(names)
    if dim is None:
        has_number = len(new) == 1 and wildcards(new[0]) == ["*"] and not wildcards(old)
        fits = has_number and sizes is None
    else:
        fits = len(new) > 1
    if not fits:
        raise TypeError(
            f"merge or split of {old!r} and {', '.join(map(repr, new))}: dim=None needs one name "
            "with one *, without sizes; a number needs several names"
        )

    def sizes_for(module: torch.nn.Module, total: int) -> list[int]:
        declared = sizes(module) if callable(sizes) else sizes
        return [total // len(new)] * len(new) if declared is None else list(declared)

    def divide(module: torch.nn.Module, whole: Tensor) -> list[Tensor]:
        if dim is None:
            return list(whole.unbind(0))
        total = whole.shape[dim]
        if sizes is None and total % len(new):
            raise MigrationError(f"{total} is not divisible into {len(new)} equal parts")
        return list(whole.split(sizes_for(module, total), dim))

    def join(module: torch.nn.Module, *tensors: Tensor) -> Tensor:
        if len({tensor.dtype for tensor in tensors}) > 1:
            dtypes = ", ".join(str(tensor.dtype) for tensor in tensors)
            raise MigrationError(f"the tensors have several dtypes: {dtypes}")
        if dim is None:
            return torch.stack(tensors)

        lengths = [tensor.shape[dim] for tensor in tensors]
        expected = sizes_for(module, lengths[0] * len(lengths))
        if lengths != expected:
            # The way back could not tell where one ends.
            raise MigrationError(
                f"the sizes along dim={dim} are {lengths}, not {expected}; convert() joins tensors "
                "of any sizes"
            )
        return torch.cat(tensors, dim)

    return Step("split", (old,), new, up=divide, down=join, stacked=dim is None)


def convert(
    names: Names,
    up: Callable[..., Any],
    down: Callable[..., Any] | None = None,
    new: Names | None = None,
) -> Step:
    """Compute tensors: transposes, interleaved heads, and all that no other step does.

    Functions take the tensors, and the module before them if their first argument is called
    ``module``. They return a tensor or a list. They must also work on meta tensors, which is how
    shapes are found.

    Args:
        names: One or several names in older versions.
        up: Computes the new tensors.
        down: Computes the old tensors from the new ones. Without it, the step has no inverse.
        new: One or several names since this version. Default: ``names``.

    Returns:
        A step for :func:`declare`.

    Raises:
        TypeError: If the wildcards differ, or a function cannot be called.

    Example:
        >>> import torch
        >>> from modkit import migrations as mig
        >>> print(mig.convert("c_attn.weight", torch.t, torch.t))
        convert c_attn.weight -> c_attn.weight
    """
    old = _as_tuple(names)
    targets = old if new is None else _as_tuple(new)
    upward = _with_module(up)
    downward = None if down is None else _with_module(down)
    return Step("convert", old, targets, up=upward, down=downward)


def _as_tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _with_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f(module, *tensors)`` for a function that may take the tensors alone."""
    if not callable(function):
        raise TypeError(f"convert: {function!r} is not a function")
    # Not from the signature: functions of torch have none, and Python 3.14 evaluates annotations
    # for it, which may be for type checkers only.
    code = getattr(function, "__code__", None)
    if code is not None and code.co_varnames[: min(1, code.co_argcount)] == ("module",):
        return function

    def without_module(_: torch.nn.Module, *tensors: Tensor) -> Any:
        return function(*tensors)

    return without_module


def shape_of(value: Any) -> torch.Size | None:
    """Return the shape of an entry; None if it has none."""
    if isinstance(value, Lazy):
        return value.meta.shape
    return value.shape if isinstance(value, Tensor) else None


def apply(step: Step, module: torch.nn.Module, entries: Entries) -> list[Change]:
    """Return all applications of a step, which happen at once, without effect on ``entries``."""
    changes: list[Change] = []
    for sources, values in _applications(step, entries):
        inputs = [entries[name] for name in sources]
        outputs = inputs if step.up is None else _computed(step, module, sources, inputs)
        if step.kind == "drop":
            outputs = []

        if step.stacked and wildcards(step.new[0]):
            numbers = map(str, range(len(outputs)))
            targets = tuple(filled(step.new[0], [number]) for number in numbers)
        else:
            targets = tuple(filled(pattern, values) for pattern in step.new)
        if len(outputs) != len(targets):
            raise MigrationError(f"{step}: {len(outputs)} tensors for {len(targets)} names")
        changes.append(Change(step, sources, targets, inputs=inputs, outputs=outputs))
    return changes


def replaced(step: Step, entries: Entries, changes: Sequence[Change]) -> Entries:
    """Return the entries after the applications of a step, in a dict of their own."""
    # A name that is consumed may be given anew: steps exchange names.
    consumed = {name for change in changes for name in change.sources}
    remaining = [name for name in entries if name not in consumed]
    for pattern in step.new:
        if wildcards(pattern) and not step.stacked:
            for match in matches(pattern, remaining):
                raise MigrationError(
                    f"{step}: {match.name} is not from this step and also matches {pattern}, so "
                    "the step would have no inverse; declare narrower patterns"
                )

    result = {name: entries[name] for name in remaining}
    for change in changes:
        for name, value in zip(change.targets, change.outputs, strict=True):
            if name in result:
                raise MigrationError(f"{step}: two tensors would get the name {name}")
            result[name] = value
    return result


class _Application(NamedTuple):
    """The tensors that a step takes at once, and the values of wildcards in their names."""

    sources: tuple[str, ...]
    values: tuple[str, ...]


def _applications(step: Step, names: Mapping[str, Any]) -> Iterator[_Application]:
    """Yield each application of a step; tensors that belong together must all be there."""
    if not step.old:
        yield _Application((), ())
        return

    # Only one side of such a step has the numbers.
    stacks = step.stacked and bool(wildcards(step.old[0]))
    # The names that belong together: by their patterns, or by their numbers in a stack.
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for pattern in step.old:
        for match in matches(pattern, names):
            if not stacks:
                groups.setdefault(match.values, {})[pattern] = match.name
            elif match.values[0].isdecimal():
                groups.setdefault((), {})[match.values[0]] = match.name

    for values, members in groups.items():
        # Compared as text: a number in a file may have any number of digits, or zeros before it.
        keys = tuple(map(str, range(len(members)))) if stacks else step.old
        absent = [key for key in keys if key not in members]
        if absent:
            name = filled(step.old[0], absent) if stacks else filled(absent[0], values)
            others = [members[key] for key in members if key not in keys]
            present = (others or [*members.values()])[0]
            raise MigrationError(f"{step}: {present} is in the state dict, but {name} is missing")
        yield _Application(tuple(members[key] for key in keys), values)


def _computed(
    step: Step, module: torch.nn.Module, names: Sequence[str], values: Sequence[Any]
) -> list[Any]:
    """Return what a step computes, of the kind that it is computed from."""
    for name, value in zip(names, values, strict=True):
        is_quantized = getattr(value, "is_quantized", False)
        if type(value) not in _COMPUTED_FROM or is_quantized:
            kind = "quantized tensor" if is_quantized else type(value).__name__
            # Names do not show that a step which keeps them was done.
            error = UndecidableError if step.old == step.new else MigrationError
            raise error(
                f"{step}: {name} is a {kind}; migrate the full state dict, before its tensors are "
                "sharded or quantized"
            )

    if any(isinstance(value, Lazy) for value in values):
        return _computed_later(step, module, values)
    return _results(step, module, values)


def _results(step: Step, module: torch.nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call the function of a step; results have memory of their own."""
    assert step.up is not None

    try:
        with torch.no_grad():
            output = step.up(module, *tensors)
            outputs = [output] if isinstance(output, Tensor) else list(output)
            return [_with_own_memory(tensor) for tensor in outputs]
    except MigrationError as error:
        raise MigrationError(f"{step}: {error}") from error
    except Exception as error:
        # A function of the user may raise anything; its first line says enough.
        first_line = str(error).partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
        if not any(tensor.is_meta for tensor in tensors):
            raise MigrationError(f"{step} failed: {reason}") from error

        # A function that needs values, such as ``tolist()`` or NumPy, says so.
        kind = UndecidableError if "meta" in first_line else MigrationError
        raise kind(f"{step} failed on meta tensors: {reason}") from error


def _with_own_memory(tensor: Tensor) -> Tensor:
    """Copy a view of a larger tensor: it would be saved with all of that, or shared with others."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _computed_later(step: Step, module: torch.nn.Module, values: Sequence[Any]) -> list[Any]:
    """Compute dtypes and shapes now, and tensors when they are read."""
    metas = [value.meta if isinstance(value, Lazy) else value.to("meta") for value in values]
    # Parts of one tensor are usually read one after the other: it is read once, and each part is
    # freed as soon as it has been taken.
    unread: dict[int, Tensor] = {}

    def read(number: int) -> Tensor:
        if number not in unread:
            tensors = [value.read() if isinstance(value, Lazy) else value for value in values]
            unread.update(enumerate(_results(step, module, tensors)))
        return unread.pop(number)

    results = _results(step, module, metas)
    return [Lazy(meta, partial(read, number)) for number, meta in enumerate(results)]
