"""The content of a pickle without its classes: descriptions of tensors, and placeholders.

Nothing is imported and no code of the file or of a library is executed: each name in the pickle
stands for a function of this file that only keeps its arguments. So the tensors of a checkpoint can
be listed and read, whatever else is in it. Nothing here needs torch.
"""

import argparse
import codecs
import io
import math
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from typing_extensions import Self

from modkit.errors import FileError
from modkit.files.pickle_limits import (
    ITEM_SIZES,
    VALUES,
    collector_paused,
    pickle_problem,
    storage_dtype,
)
from modkit.files.plain_pickles import is_plain_pickle


# Each unknown name becomes a class, which takes a kilobyte.
_MOST_NAMES: Final = 1000
_MOST_DIMENSIONS: Final = 64
_LONGEST_LOCATION: Final = 99
# The kind of error for a pickle with instructions that are not known here.
UNREAD: Final = "unread pickle"


class Named(str):  # noqa: SLOT000
    """A dtype, a device or a layout of torch, by its ``repr``."""

    def __repr__(self) -> str:
        return str(self)


class Shape(tuple[int, ...]):  # noqa: SLOT001
    """A ``torch.Size``."""

    def __new__(cls, sizes: Any = ()) -> Self:
        """Make one of at most 64 numbers."""
        return super().__new__(cls, _sizes(sizes))


class StorageKind(NamedTuple):
    """A class of storages: the name of the dtype of its elements."""

    dtype: str


class Stored(NamedTuple):
    """A storage as a pickle describes it, with the device that it was saved from."""

    key: str
    dtype: str
    numel: int
    location: str
    # In files from before torch 1.6, it may be a part of another storage: where it begins there.
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * ITEM_SIZES[self.dtype]


class OutsideError(pickle.UnpicklingError):
    """A tensor is larger than its storage."""


@dataclass(slots=True, eq=False)
class InertTensor:
    """A tensor as a pickle describes it.

    Attributes:
        dtype: The name of its dtype.
        shape: Its shape.
        storage: Its storage; None if it has no values, or several storages.
        offset: Where it begins in the storage, in elements.
        stride: Its strides.
        problem: What it is, if it is not a plain tensor in one storage, as ``"sparse"``.
        bits: The bits of a lazy view: ``"conj"``, ``"neg"``.
        requires_grad: As in torch.
        is_parameter: Whether it is a ``Parameter``.
        has_more: Whether it has hooks or attributes.
    """

    dtype: str
    shape: tuple[int, ...]
    storage: Stored | None = None
    offset: int = 0
    stride: tuple[int, ...] = ()
    problem: str = ""
    bits: frozenset[str] = frozenset()
    requires_grad: bool = False
    is_parameter: bool = False
    has_more: bool = False

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes; 0 if it has several storages."""
        has_memory = self.problem in {"", "quantized", "meta"}
        return math.prod(self.shape) * ITEM_SIZES[self.dtype] if has_memory else 0


class Foreign:
    """An object of a class that was not imported, with what the pickle gave to it."""

    __slots__ = ("args", "content", "state")
    name = ""
    has_items = False
    args: tuple[Any, ...]
    content: Any
    state: Any

    def __new__(cls, *args: Any) -> Self:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args = args
        made.content = made.state = None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        type(self).has_items = True
        if not isinstance(self.content, dict):
            self.content = {}
        self.content[key] = value

    def append(self, value: Any) -> None:
        """Keep an item of a list."""
        type(self).has_items = True
        if not isinstance(self.content, list):
            self.content = []
        self.content.append(value)

    def entries(self) -> Mapping[Any, Any]:
        """Return its items, or else its attributes, by name."""
        state = self.state
        # Objects with slots have a pair: their attributes, and the slots.
        if isinstance(state, tuple) and len(state) == 2:
            state = state[1] or state[0]
        # A collections.UserDict has its items in one attribute.
        if isinstance(state, dict) and [*state] == ["data"]:
            state = state["data"]
        for entries in (self.content, state):
            if isinstance(entries, list):
                return {str(index): value for index, value in enumerate(entries)}
            if isinstance(entries, dict) and entries:
                return entries
        return {}


def _sizes(value: Any) -> tuple[int, ...]:
    is_short = isinstance(value, (tuple, list)) and len(value) <= _MOST_DIMENSIONS
    if not is_short or not all(type(length) is int and 0 <= length < 2**63 for length in value):
        raise pickle.UnpicklingError("a tensor has another shape than torch makes")
    return tuple(value)


def _tensor(
    stored: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    bits: Any = None,
    dtype: Any = None,
) -> InertTensor:
    """Describe a tensor within its storage, as ``torch._utils._rebuild_tensor_v2``."""
    if not isinstance(stored, Stored) or type(offset) is not int or offset < 0:
        raise pickle.UnpicklingError("a tensor has no storage")
    element = stored.dtype if dtype is None else str(dtype).removeprefix("torch.")
    lazy = frozenset(bits) if isinstance(bits, dict) else frozenset()
    tensor = InertTensor(element, _sizes(size), stored, offset, _sizes(stride), bits=lazy)
    tensor.requires_grad = _needs_gradient(requires_grad, element)
    tensor.has_more = _has_hooks(hooks) or bits not in (None, {})

    last = offset
    for length, step in zip(tensor.shape, tensor.stride, strict=True):
        last += (length - 1) * step
    if tensor.nbytes and (last + 1) * ITEM_SIZES[element] > stored.nbytes:
        raise OutsideError("a tensor extends beyond the end of its storage")
    return tensor


def _layout(name: Any) -> Named:
    return Named(name[:40])


def _tensor_of_dtype(*description: Any) -> InertTensor:
    """Describe a tensor with a dtype of its own, as ``torch._utils._rebuild_tensor_v3``."""
    stored, offset, size, stride, requires_grad, hooks, dtype = description[:7]
    bits = description[7] if len(description) > 7 else None
    return _tensor(stored, offset, size, stride, requires_grad, hooks, bits, dtype)


def _parameter(data: Any, requires_grad: Any, hooks: Any, *attributes: Any) -> Any:
    if isinstance(data, Foreign):
        return data
    needs_gradient = _needs_gradient(requires_grad, data.dtype)
    has_more = data.has_more or _has_hooks(hooks) or bool(attributes)
    return replace(data, requires_grad=needs_gradient, is_parameter=True, has_more=has_more)


def _has_hooks(hooks: Any) -> bool:
    return type(hooks) is not OrderedDict or bool(hooks)


def _needs_gradient(value: Any, dtype: str) -> bool:
    has_gradients = dtype.startswith(("float", "bfloat", "complex"))
    if type(value) is not bool or (value and not has_gradients):
        raise pickle.UnpicklingError("a tensor needs gradients in another way than in torch")
    return value


def _of_subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Describe a tensor of a subclass, as ``torch._tensor._rebuild_from_type_v2``."""
    made = function(*args)
    return replace(made, has_more=True) if isinstance(made, InertTensor) else Foreign(made, state)


def _quantized(stored: Any, offset: Any, size: Any, stride: Any, *_: Any) -> InertTensor:
    tensor = _tensor(stored, offset, size, stride)
    tensor.problem = "quantized"
    return tensor


def _sparse(layout: Any, data: Any) -> InertTensor:
    tensors = [part for part in data if isinstance(part, InertTensor)]
    shape = next(part for part in data if isinstance(part, tuple))
    return InertTensor(tensors[-1].dtype, _sizes(shape), problem="sparse")


def _nested(buffer: Any, *_: Any) -> InertTensor:
    return InertTensor(buffer.dtype, (), problem="nested")


def _on_meta(dtype: Any, size: Any, stride: Any, *_: Any) -> InertTensor:
    name = str(dtype).removeprefix("torch.")
    return InertTensor(name, _sizes(size), stride=_sizes(stride), problem="meta")


def _wrapper(kind: Any, dtype: Any, size: Any, *_: Any) -> InertTensor:
    return InertTensor(str(dtype).removeprefix("torch."), _sizes(size), problem="wrapped")


def _device(kind: str, index: int | None = None) -> Named:
    name = f"type={kind[:20]!r}"
    return Named(f"device({name})" if index is None else f"device({name}, {index=})")


def _empty_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


# The names of state dicts without anything else, which load_checkpoint reads itself.
LOADED: Final[dict[str, Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    **{f"torch.{dtype}": Named(f"torch.{dtype}") for dtype in ITEM_SIZES},
    "torch.Size": Shape,
    "torch.storage.UntypedStorage": StorageKind("uint8"),
    "collections.OrderedDict": _empty_dict,
}
# Those of pickles that have been followed.
_NAMES: Final[dict[str, Any]] = {
    **LOADED,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch._utils._rebuild_meta_tensor_no_storage": _on_meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._tensor._rebuild_from_type_v2": _of_subclass,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    **{f"builtins.{kind.__name__}": kind for kind in (set, bytes, complex)},
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "argparse.Namespace": argparse.Namespace,
    "_codecs.encode": codecs.encode,
}
# The names that load_checkpoint reads too: numbers, arrays and random states of NumPy.
_OF_NUMPY: Final = {
    *("numpy.dtype", "numpy.ndarray", "numpy.core.multiarray.scalar"),
    *("numpy._core.multiarray.scalar", "numpy._core.multiarray._reconstruct"),
    "numpy.core.multiarray._reconstruct",
}


@dataclass
class Content:
    """The content of a pickle.

    Attributes:
        value: The object.
        classes: The placeholders for names in the pickle that this reader does not know.
        storages: The storages of its tensors by key.
        is_plain: Whether it has only what :data:`LOADED` has.
    """

    value: Any = None
    classes: dict[str, type[Foreign]] = field(default_factory=dict[str, type[Foreign]])
    storages: dict[str, Stored] = field(default_factory=dict[str, Stored])
    is_plain: bool = False

    @property
    def foreign(self) -> list[str]:
        """The names of classes and functions that ``load_checkpoint`` may not read."""
        return [name for name in self.classes if name not in _OF_NUMPY and name not in VALUES]


class _Unpickler(pickle.Unpickler):
    """The standard unpickler with functions of this file in place of all names."""

    def __init__(self, data: bytes, names: Mapping[str, Any], content: Content) -> None:
        # The strings of Python 2 may be in any encoding.
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="replace")
        self._names = names
        self._content = content

    def find_class(self, module: str, name: str, /) -> Any:
        # pickle writes the names of Python 2.
        module, name = NAME_MAPPING.get((module, name), (module, name))
        full_name = f"{IMPORT_MAPPING.get(module, module)}.{name}"
        if full_name in self._names:
            return self._names[full_name]
        dtype = storage_dtype(name) if name.endswith("Storage") else None
        if dtype is not None and module in {"torch", "torch.cuda"}:
            return StorageKind(dtype)
        if self._names is not _NAMES:
            raise pickle.UnpicklingError(full_name)

        classes = self._content.classes
        if full_name not in classes:
            if len(classes) >= _MOST_NAMES:
                raise pickle.UnpicklingError(f"it names more than {_MOST_NAMES:,} classes")
            members = {"name": full_name, "__slots__": ()}
            classes[full_name] = type("Foreign", (Foreign,), members)
        return classes[full_name]

    def persistent_load(self, pid: Any, /) -> Any:
        # The modules of files from before torch 1.6 come with their source code.
        if pid[0] == "module" and self._names is _NAMES:
            return pid[1]
        tag, kind, key, location, numel, *view = pid
        is_known = tag == "storage" and isinstance(kind, StorageKind) and type(numel) is int
        if not is_known or numel < 0:
            raise pickle.UnpicklingError("a storage is described in another way than torch does")
        stored = Stored(str(key), kind.dtype, numel, str(location))
        first = self._content.storages.setdefault(stored.key, stored)
        if first.nbytes != stored.nbytes:
            raise pickle.UnpicklingError(f"the storage {key!r} has two sizes")
        # torch takes the first description, and quotes the location in errors.
        is_odd = len(stored.location) > _LONGEST_LOCATION or not stored.location.isprintable()
        if self._names is LOADED and (first[:3] != stored[:3] or is_odd):
            raise pickle.UnpicklingError("a storage that only torch reads")
        # In files from before torch 1.6, a storage may be a part of another one.
        if view and view[0] is not None:
            _, offset, size = view[0]
            if not 0 <= offset <= offset + size <= numel:
                raise pickle.UnpicklingError(f"a part of the storage {key!r} is outside of it")
            return first._replace(numel=size, offset=offset)
        return first


def read_pickle(data: bytes, what: str, sizes: Mapping[str, int]) -> Content:
    """Return the content of a pickle with placeholders.

    Args:
        data: The pickle.
        what: How errors name the file.
        sizes: The sizes of the members of its archive.

    Raises:
        FileError: If the pickle is invalid or exceeds the limits.
    """
    with collector_paused():
        if is_plain_pickle(data, len(sizes)):
            # A plain pickle with other names, or an invalid one, is followed and then read.
            with suppress(Exception):
                return read_with(data, LOADED)
        refused = f"{what} cannot be read as a checkpoint"
        if problem := pickle_problem(data, sizes, reader="inert"):
            raise FileError(f"{refused}: {problem}", UNREAD if "instruction " in problem else "")
        try:
            return read_with(data, _NAMES)
        # Functions get the arguments that the file has.
        except Exception as error:
            reason = str(error).partition("\n")[0][:500] or type(error).__name__
            raise FileError(f"{refused}: its pickle is invalid: {reason}") from error


def read_with(data: bytes, names: Mapping[str, Any]) -> Content:
    """Return the content of a pickle that has no other names than these."""
    content = Content()
    content.value = _Unpickler(data, names, content).load()
    content.is_plain = names is LOADED
    return content
