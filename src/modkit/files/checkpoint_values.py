"""Which values a checkpoint may hold: those that ``load_checkpoint`` reads without executing code.

These are what ``torch.load(weights_only=True)`` reads, ``argparse.Namespace``, which timm and others use for
their options, and numbers and small arrays of NumPy, its random states among them.
"""

import argparse
import copyreg
import enum
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, Final, cast

import torch

from modkit._upstream import readable_globals
from modkit.files.zip_archive import MOST_TEXT


# A pickle holds an array as text, which takes more room and time than a tensor.
_LARGEST_ARRAY: Final = 1 << 20
# The kinds and sizes of NumPy's numbers; the limits of pickles refuse all others.
_NUMBERS: Final = (
    *("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
    *("f2", "f4", "f8", "c8", "c16"),
)
# Each tensor has an OrderedDict of hooks.
_FREQUENT: Final = {torch.Tensor, torch.nn.Parameter, OrderedDict}
_NAMED: Final = (type, FunctionType, BuiltinFunctionType)


def extra_names(content: bytes) -> dict[str, Any]:
    """Return the names in a pickle that torch does not read, with their objects.

    torch has a list of further names, ``torch.serialization.safe_globals``. It is that of the process: a
    change for one file would be seen by other threads, and some functions of NumPy are safe only with
    the arguments that :func:`~modkit.files.pickle_limits.pickle_problem` accepts.
    """
    names: dict[str, Any] = {}
    if b"cargparse\nNamespace\n" in content:
        names["argparse.Namespace"] = argparse.Namespace
    if b"c__builtin__\nbytes\n" in content:
        # The pickle of an empty string of bytes.
        names["builtins.bytes"] = bytes
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


def checked_pickle(checkpoint: object) -> Any:
    """Return a ``pickle_module`` for ``torch.save`` that refuses what ``load_checkpoint`` cannot read."""
    names = {"argparse.Namespace", "builtins.bytes", *readable_globals(), *_names_of_numpy()}
    members = {"checkpoint": checkpoint, "names": names, "by_name": {}}
    return SimpleNamespace(__name__=__name__, Pickler=type("Pickler", (_Pickler,), members))


class _Pickler(pickle.Pickler):
    """The standard pickler, with a look at each class and function before it is written."""

    checkpoint: object
    names: set[str]
    # For each class of objects: whether they are written as a name, as functions are.
    by_name: dict[type, bool]

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._file = file
        self._latest: object = None

    def dump(self, obj: Any, /) -> None:
        super().dump(obj)
        size = self._file.tell()
        if size > MOST_TEXT:
            text = f"without its tensors it has {size:,} bytes, and load_checkpoint reads {MOST_TEXT:,}"
            raise ValueError(f"save_checkpoint: {text}; save long lists as tensors")

    def reducer_override(self, obj: Any, /) -> Any:
        kind = type(obj)
        if kind in _FREQUENT:
            return NotImplemented
        if isinstance(obj, _NAMED):
            self._check(obj, obj.__qualname__)
            return NotImplemented
        self._latest = obj
        if kind.__module__.partition(".")[0] == "numpy" and not _is_readable_number(obj):
            raise self._refused(obj)
        if kind not in self.by_name:
            self.by_name[kind] = isinstance(self._reduced(obj), str)
        if self.by_name[kind]:
            self._check(obj, self._reduced(obj))
        return NotImplemented

    def _reduced(self, obj: Any) -> Any:
        if type(obj) in copyreg.dispatch_table:
            return ()
        try:
            return obj.__reduce_ex__(2)
        except Exception as error:
            raise self._refused(obj) from error

    def _check(self, obj: Any, name: str) -> None:
        module = getattr(obj, "__module__", None) or cast("Any", pickle).whichmodule(obj, name)
        if f"{module}.{name}" not in self.names:
            raise self._refused(obj)

    def _refused(self, obj: Any) -> TypeError:
        """Return the error for an object, or for the entry that needs a class or a function."""
        latest = self._latest

        def is_it(found: object) -> bool:
            return found is obj

        def is_of_class(found: object) -> bool:
            return type(found) is obj

        def needs_it(found: object) -> bool:
            return found is latest

        tests: list[Callable[[object], bool]] = [is_it]
        if isinstance(obj, _NAMED):
            # The class of an object is written right after it, unless it is known already.
            others = [is_it, is_of_class]
            tests = [needs_it, *others] if type(latest) is obj else [*others, needs_it]
        places = (_find(self.checkpoint, test) for test in tests)
        path, entry = next((place for place in places if place is not None), (None, obj))

        where = "an object in the checkpoint" if path is None else f"checkpoint{path}"
        kind: Any = entry if isinstance(entry, _NAMED) else type(entry)
        what = "" if kind is entry else "of type "
        name = f"{what}{kind.__module__}.{kind.__qualname__}"
        return TypeError(
            f"save_checkpoint: {where} is {name}, which load_checkpoint does not read; {_advice(entry)}"
        )


def _is_readable_number(obj: Any) -> bool:
    """Return True for a number, a dtype of numbers or a small array of them; other objects pickle later."""
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


def _advice(entry: Any) -> str:
    """Return what to save instead of an object."""
    if isinstance(entry, enum.Enum):
        return "save its value"
    if not isinstance(entry, _NAMED):
        if getattr(getattr(entry, "dtype", None), "str", " ")[1:] in _NUMBERS:
            return "save torch.from_numpy(array)"
        for attribute, advice in _ADVICE.items():
            if hasattr(entry, attribute):
                return advice
    return (
        "save dicts, lists, tuples, sets, strings, bytes, numbers and tensors, or allow it with "
        "torch.serialization.add_safe_globals() where you save and load"
    )


def _find(
    found: object, test: Callable[[object], bool], seen: "set[int] | None" = None
) -> tuple[str, object] | None:
    """Return the first object in nested containers that passes a test, after the keys to it, as code."""
    seen = set() if seen is None else seen
    if test(found):
        return "", found
    if id(found) in seen:
        return None
    seen.add(id(found))
    for key, value in _entries(found):
        if (place := _find(value, test, seen)) is not None:
            return f"{key}{place[0]}", place[1]
    return None


def _entries(found: object) -> Iterator[tuple[str, object]]:
    if isinstance(found, Mapping):
        yield from ((f"[{str(key)[:100]!r}]", value) for key, value in found.items())
    elif isinstance(found, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(found))
    elif isinstance(found, (set, frozenset)):
        yield from (("", value) for value in found)
    attributes: dict[str, object] = (
        {} if isinstance(found, _NAMED) else getattr(found, "__dict__", {})
    )
    yield from ((f".{name}", value) for name, value in attributes.items())
