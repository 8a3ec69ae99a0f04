"""Which values a checkpoint may hold: those that ``load_checkpoint`` reads without executing code.

These are what ``torch.load(weights_only=True)`` reads, ``argparse.Namespace``, which timm and
others use for their options, and numbers and small arrays of NumPy, its random states among them.
"""

import argparse
import builtins
import copyreg
import enum
import io
import pickle
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, Final, cast

import torch

from modkit._upstream import readable_globals
from modkit.files.pickle_limits import VALUES
from modkit.files.zip_archive import MOST_TEXT


# A pickle holds an array as text, which takes more room and time than a tensor.
_LARGEST_ARRAY: Final = 1 << 20
# The kinds and sizes of NumPy's numbers; the limits of pickles refuse all others.
_NUMBERS: Final = (
    *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
    *("f2", "f4", "f8", "c8", "c16"),
)
_TENSORS: Final = {torch.Tensor, torch.nn.Parameter}
# Each tensor has an OrderedDict of hooks.
_FREQUENT: Final = {*_TENSORS, OrderedDict}
_REFUSALS: Final = (pickle.PicklingError, TypeError, AttributeError)
_NAMED: Final = (type, FunctionType, BuiltinFunctionType)
# Objects to which pickle may refer before it has written their content.
_REFERABLE: Final = (dict, list, argparse.Namespace)
_CONTAINERS: Final = (dict, list, deque)
# The largest integer that torch's readers know has 255 bytes.
_MOST_INTEGER: Final = 1 << 2039
_ATOMS: Final = {str, float, bool, bytes, complex, type(None), torch.dtype, torch.Size}


def extra_names(content: bytes) -> dict[str, Any]:
    """Return the names in a pickle that torch does not read, with their objects.

    torch has a list of further names, ``torch.serialization.safe_globals``. It is that of the
    process: a change for one file would be seen by other threads, and some functions of NumPy are
    safe only with the arguments that :func:`~modkit.files.pickle_limits.pickle_problem` accepts.
    """
    names: dict[str, Any] = {}
    if b"cargparse\nNamespace\n" in content:
        names["argparse.Namespace"] = argparse.Namespace
    if b"c__builtin__\nbytes\n" in content:
        # The pickle of an empty string of bytes.
        names["builtins.bytes"] = bytes
    for full_name, name in VALUES.items():
        # As a value: the limits of pickles refuse calls.
        if b"c%s\n%s\n" % tuple(full_name.encode().split(b".")) in content:
            names[f"builtins.{name}"] = getattr(builtins, name)
    if b"cnumpy" in content:
        names |= _names_of_numpy()
    return names


def _names_of_numpy() -> dict[str, Any]:
    try:
        import numpy as np
    except ImportError:
        return {}
    make_scalar = np.float64(0).__reduce__()[0]
    make_array = np.empty(0).__reduce__()[0]
    names: dict[str, Any] = {"numpy.dtype": np.dtype, "numpy.ndarray": np.ndarray}
    # NumPy 2 has renamed the module.
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names |= {f"{module}.scalar": make_scalar, f"{module}._reconstruct": make_array}
    # torch sets the state only of objects of known classes; a pickle cannot contain these names.
    return {**names, **{f"\n{code}": type(np.dtype(code)) for code in _NUMBERS}}


def checked_pickle() -> Any:
    """Return a ``pickle_module`` for ``torch.save`` that refuses what cannot be loaded.

    The names that ``load_checkpoint`` reads are those at the time of this call, with what
    ``torch.serialization.add_safe_globals`` has added. Its pickler raises a TypeError that says
    where the refused entry is, and what to save instead, or a ValueError if the pickle is too
    large.
    """
    names = {"argparse.Namespace", "builtins.bytes", *readable_globals(), *_names_of_numpy()}
    members = {"names": names, "by_name": {}}
    return SimpleNamespace(__name__=__name__, Pickler=type("Pickler", (_Pickler,), members))


class _Pickler(pickle.Pickler):
    """The standard pickler, with a look at each class and function before it is written."""

    names: set[str]
    # For each class of objects: whether they are written as a name, as functions are.
    by_name: dict[type, bool]

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._file = file

    def dump(self, obj: Any, /) -> None:
        try:
            super().dump(obj)
            _check_readable(obj)
        except _REFUSALS as error:
            path, entry = self._first_refused(obj)
            raise TypeError(f"save_checkpoint: checkpoint{path} is {_refusal(entry)}") from error

        size = self._file.tell()
        if size > MOST_TEXT:
            raise ValueError(
                f"save_checkpoint: without its tensors it has {size:,} bytes, and load_checkpoint "
                f"reads {MOST_TEXT:,}; save long lists as tensors"
            )

    def reducer_override(self, obj: Any, /) -> Any:
        kind = type(obj)
        if kind in _FREQUENT:
            return NotImplemented
        if issubclass(kind, _CONTAINERS):
            # torch's readers append items and set keys of lists and dicts, not of their subclasses.
            items = chain.from_iterable(filter(None, obj.__reduce_ex__(2)[3:5]))
            if next(items, None) is not None:
                raise pickle.PicklingError(kind.__qualname__)
        if isinstance(obj, _NAMED):
            self._check(obj, obj.__qualname__)
            return NotImplemented
        if kind.__module__.partition(".")[0] == "numpy" and not _is_readable_number(obj):
            raise pickle.PicklingError(kind.__qualname__)

        if kind not in self.by_name:
            is_registered = kind in copyreg.dispatch_table
            self.by_name[kind] = not is_registered and isinstance(obj.__reduce_ex__(2), str)
        if self.by_name[kind]:
            self._check(obj, obj.__reduce_ex__(2))
        return NotImplemented

    def _check(self, obj: Any, name: str) -> None:
        module = getattr(obj, "__module__", None) or cast("Any", pickle).whichmodule(obj, name)
        if f"{module}.{name}" not in self.names:
            raise pickle.PicklingError(name)

    def _first_refused(
        self, entry: object, above: frozenset[int] = frozenset()
    ) -> tuple[str, object]:
        """Return the innermost object that cannot be written, after the keys to it, as code."""
        # A list may contain itself.
        above |= {id(entry)}
        for key, value in _entries(entry):
            if id(value) not in above and self._refuses(value):
                path, innermost = self._first_refused(value, above)
                return f"{key}{path}", innermost
        return "", entry

    def _refuses(self, value: object) -> bool:
        try:
            pickle.Pickler.dump(type(self)(io.BytesIO(), protocol=2), value)
            _check_readable(value)
        except _REFUSALS:
            return True
        return False


def _check_readable(content: object) -> None:
    """Refuse what pickle writes with instructions that torch's readers do not have.

    Objects are visited in the order in which pickle writes them: a list that it has begun may be
    part of a tuple in it.

    Raises:
        PicklingError: If there is a large integer, or a tuple or tensor that contains itself.
    """
    written: set[int] = set()
    # Objects that are complete only after their content: a reference to them cannot be written.
    unfinished: set[int] = set()
    walk: list[tuple[int, Iterator[object]]] = [(0, iter((content,)))]
    while walk:
        identity, rest = walk[-1]
        for value in rest:
            kind = type(value)
            # Most objects are strings, and tensors without attributes.
            if kind in _ATOMS or (kind in _TENSORS and not vars(value)):
                continue
            if isinstance(value, int):
                if not -_MOST_INTEGER <= value < _MOST_INTEGER:
                    raise pickle.PicklingError("int")
                continue
            if id(value) in unfinished:
                raise pickle.PicklingError(kind.__qualname__)
            if id(value) in written:
                continue
            (written if isinstance(value, _REFERABLE) else unfinished).add(id(value))
            walk.append((id(value), iter(_content(value))))
            break
        else:
            walk.pop()
            unfinished.discard(identity)
            written.add(identity)


def _content(value: Any) -> Iterable[object]:
    """Return the objects in another one that pickle writes."""
    attributes = getattr(value, "__dict__", {}).values()
    if isinstance(value, dict):
        return chain(chain.from_iterable(dict.items(value)), attributes)
    if isinstance(value, (list, tuple, set, frozenset)):
        return chain(value, attributes)
    return attributes if isinstance(value, (argparse.Namespace, torch.Tensor)) else ()


def _entries(container: object) -> Iterator[tuple[str, object]]:
    """Yield the values in a container, each with the code that gets it from there."""
    if isinstance(container, Mapping):
        yield from ((".keys()", key) for key in container)
        yield from ((f"[{str(key)[:100]!r}]", value) for key, value in container.items())
    elif isinstance(container, (set, frozenset)):
        yield from (("", value) for value in container)
    elif isinstance(container, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(container))
    elif isinstance(container, (argparse.Namespace, torch.Tensor)):
        yield from ((f".{name}", value) for name, value in vars(container).items())


def _is_readable_number(obj: Any) -> bool:
    """Return True for a number, a dtype of numbers, or a small array of them."""
    dtype = getattr(obj, "dtype", obj)
    code = getattr(dtype, "str", None)
    return not isinstance(code, str) or (
        code[1:] in _NUMBERS and getattr(obj, "nbytes", 0) <= _LARGEST_ARRAY
    )


_ADVICE: Final = {
    "state_dict": "save its state_dict()",
    "__fspath__": "save str(path)",
    "isoformat": "save its isoformat()",
    "bit_generator": "save its bit_generator.state",
    "get_state": "save its get_state()",
    "tolist": "save its tolist()",
}


def _refusal(entry: Any) -> str:
    """Return the type of an object, and what to save instead."""
    try:
        _check_readable(entry)
    except pickle.PicklingError:
        is_integer = isinstance(entry, int)
        what = "integer of more than 2,039 bits" if is_integer else "object that contains itself"
        return f"an {what}, which load_checkpoint does not read"
    is_named = isinstance(entry, _NAMED)
    kind: Any = entry if is_named else type(entry)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not is_named:
        name = f"of type {name}"

    allow = "allow it with torch.serialization.add_safe_globals() where you save and load"
    advice = f"save dicts, lists, tuples, sets, strings, bytes, numbers and tensors, or {allow}"
    if isinstance(entry, torch.Tensor):
        advice = f"save a plain tensor, such as its as_subclass(torch.Tensor), or {allow}"
    elif isinstance(entry, _CONTAINERS):
        advice = "save a dict or a list of its entries"
    elif isinstance(entry, enum.Enum):
        advice = "save its value"
    elif getattr(getattr(entry, "dtype", None), "str", " ")[1:] in _NUMBERS:
        advice = "save torch.from_numpy(array)"
    elif not is_named:
        known = (hint for attribute, hint in _ADVICE.items() if hasattr(entry, attribute))
        advice = next(known, advice)
    return f"{name}, which load_checkpoint does not read; {advice}"
