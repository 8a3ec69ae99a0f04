"""Which values a checkpoint may hold: those that ``load_checkpoint`` reads without executing code.

These are what ``torch.load(weights_only=True)`` reads, ``argparse.Namespace``, which timm and
others use for their options, and numbers and small arrays of NumPy, its random states among them.
"""

import argparse
import io
import pickle
from collections.abc import Iterator, Mapping, Set as AbstractSet
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch

from modkit._upstream import allowed_by_user, readable_globals
from modkit.errors import FileError
from modkit.files.inert import VALUES, read_pickle
from modkit.files.zip_archive import Archive


# The errors of pickle for an object that cannot be written.
REFUSALS: Final = (pickle.PicklingError, TypeError, AttributeError)
_NAMED: Final = (type, FunctionType, BuiltinFunctionType)


def readable_names(names: AbstractSet[str]) -> dict[str, Any]:
    """Return the names that ``load_checkpoint`` reads, with their objects.

    Those that torch does not read are safe only with the arguments that
    :meth:`~modkit.files.inert.Content.problem` accepts.

    Args:
        names: All names in the pickle.
    """
    # The empty string of bytes is written as a call.
    extra = {"argparse.Namespace": argparse.Namespace, "builtins.bytes": bytes, **VALUES}
    if any(name.startswith("numpy") for name in names):
        extra |= _names_of_numpy()
    return {**extra, **readable_globals()}


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
    return names


def check_readable(pickled: bytes, checkpoint: object) -> None:
    """Raise TypeError if ``load_checkpoint`` would refuse the pickle of a checkpoint.

    The names that it reads are those at the time of this call, with what
    ``torch.serialization.add_safe_globals`` has added. The text says where the refused entry is,
    and what to save instead.
    """
    if not _is_readable(pickled):
        raise refused(checkpoint)


def refused(checkpoint: object) -> TypeError:
    """Return the error for a checkpoint with an object that is not read, or cannot be pickled."""
    path, entry = _first_refused(checkpoint)
    return TypeError(f"save_checkpoint: checkpoint{path} is {_refusal(entry)}")


def _is_readable(pickled: bytes) -> bool:
    try:
        content = read_pickle(pickled, "")
    except FileError:
        return False
    is_known = readable_names(content.names).keys() >= {*content.foreign} and not content.has_items
    return is_known and not content.problem(allowed_by_user())


def _first_refused(entry: object, above: frozenset[int] = frozenset()) -> tuple[str, object]:
    """Return the innermost object that cannot be saved, after the keys to it, as code."""
    # A list may contain itself.
    above |= {id(entry)}
    for key, value in _entries(entry):
        if id(value) not in above and _refuses(value):
            path, innermost = _first_refused(value, above)
            return f"{key}{path}", innermost
    return "", entry


def _refuses(value: object) -> bool:
    written = io.BytesIO()
    try:
        torch.save(value, written)
    except REFUSALS:
        return True
    return not _is_readable(Archive(written.getvalue(), "").read("data.pkl"))


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
    is_named = isinstance(entry, _NAMED)
    kind: Any = entry if is_named else type(entry)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not is_named:
        name = f"of type {name}"

    allow = "allow it with torch.serialization.add_safe_globals() where you save and load"
    advice = f"save dicts, lists, tuples, sets, strings, bytes, numbers and tensors, or {allow}"
    if isinstance(entry, torch.Tensor):
        advice = f"save a plain tensor, such as its as_subclass(torch.Tensor), or {allow}"
    elif not is_named:
        known = (hint for attribute, hint in _ADVICE.items() if hasattr(entry, attribute))
        advice = next(known, advice)
    return f"{name}, which load_checkpoint does not read; {advice}"
