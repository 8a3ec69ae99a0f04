"""The tensors that a pickle describes: names, shapes, dtypes and sizes, none of them read."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeGuard

import torch

from modkit.errors import FileError
from modkit.jit._archive_pickle import Call, Name, Reference, entries_of


Kind = Literal["parameter", "buffer", "attribute", "constant", "entry"]


@dataclass(frozen=True)
class TensorInfo:
    """What a file says of one tensor.

    Args:
        name: Where it is, with dots between the names of modules, attributes and keys.
        kind: A ``"parameter"`` or ``"buffer"`` of a module, another ``"attribute"``, a ``"constant"``
            of the code, or the ``"entry"`` of a file without modules.
        shape: Its shape.
        dtype: Its dtype as torch prints it, without ``torch.``; quantized ones are ``qint8`` and so on.
        nbytes: Number of bytes that its elements take.
        device: Where it was when it was saved; empty where the file does not say.
        requires_grad: Whether it was trained.
        storage: The member of the file that holds its elements; tied tensors have the same one.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: str = ""
    requires_grad: bool = False
    storage: str = ""


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str
    device: str
    numel: int
    folder: str


# Names of storages that are not the name of their dtype.
_STORAGE_DTYPES: Final = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "ComplexHalf": "complex32",
    "Untyped": "uint8",
}


def itemsize_of(dtype: str) -> int:
    """Return the bytes of one element, or 0 for a dtype that this torch does not have."""
    found = getattr(torch, dtype, None)
    return found.itemsize if isinstance(found, torch.dtype) else 0


def dtype_of_storage(name: str) -> str:
    """Return the dtype that a class of storages stands for: ``FloatStorage`` is ``float32``."""
    stem = name.removesuffix("Storage")
    return _STORAGE_DTYPES.get(stem, stem.lower())


def _is_size(value: Any) -> TypeGuard[tuple[int, ...]]:
    # No tensor has more dimensions, and no size is longer than a machine word.
    return (
        isinstance(value, (tuple, list))
        and len(value) <= 64
        and all(type(each) is int and abs(each) < 2**63 for each in value)
    )


class Reader:
    """Makes records of what would have been tensors.

    Args:
        sizes: The members of the file with their sizes, without the folder that all are in; None
            where storages are not members.
        folder: The folder of the storages of this pickle.
        what: How the pickle is called in errors.
    """

    def __init__(self, sizes: Mapping[str, int] | None, folder: str, what: str) -> None:
        self.sizes, self.folder, self.what = sizes, folder, what

    def damaged(self, name: str, why: str) -> FileError:
        """Return the error for a tensor that cannot be what its record says."""
        return FileError(f"{self.what} is damaged: {name or 'the tensor'} {why}")

    def storage(self, value: Any, name: str) -> _Storage:
        """Read ``("storage", class, key, device, number of elements)``."""
        if not (
            isinstance(value, Reference)
            and isinstance(value.key, tuple)
            and len(value.key) >= 5
            and isinstance(value.key[1], Name)
        ):
            raise self.damaged(name, "has no storage")
        _, kind, key, device, numel = value.key[:5]
        if type(numel) is not int or not isinstance(key, str) or not isinstance(device, str):
            raise self.damaged(name, "has a storage without a name or a size")
        return _Storage(dtype_of_storage(kind.name), key, device, numel, self.folder)

    def check(self, name: str, storage: _Storage, itemsize: int, last: int) -> None:
        """Refuse a tensor that reaches beyond its storage, or a storage that is not there."""
        available = storage.numel * itemsize_of(storage.dtype)
        if self.sizes is not None:
            member = f"{storage.folder}{storage.key}"
            if member not in self.sizes:
                raise self.damaged(name, f"should be in {member}, which is not there")
            if itemsize_of(storage.dtype) and self.sizes[member] < available:
                raise self.damaged(
                    name,
                    f"has a storage of {available} bytes, but {member} has {self.sizes[member]}",
                )
        if itemsize and itemsize_of(storage.dtype) and last * itemsize > available:
            raise self.damaged(name, f"reaches beyond its storage of {available} bytes")

    def strided(
        self, name: str, kind: Kind, arguments: tuple[Any, ...], grad: Any, dtype: str | None
    ) -> TensorInfo:
        """Read a dense tensor: ``(storage, offset, shape, strides, ...)``."""
        storage = self.storage(arguments[0], name)
        offset, shape, strides = arguments[1:4]
        right = _is_size((offset,)) and _is_size(shape) and _is_size(strides)
        if not right or len(shape) != len(strides) or min((offset, *shape, *strides)) < 0:
            raise self.damaged(name, "has a shape that no tensor can have")
        named = dtype or storage.dtype
        itemsize = itemsize_of(named)
        last = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        self.check(name, storage, itemsize, 0 if 0 in shape else last)
        member = storage.key if self.sizes is None else f"{storage.folder}{storage.key}"
        nbytes = math.prod(shape) * itemsize
        return TensorInfo(
            name, kind, tuple(shape), named, nbytes, storage.device, grad is True, member
        )

    def tensor(self, call: Call, name: str, kind: Kind) -> TensorInfo | None:
        """Return the tensor that a call makes, or None if it makes something else."""
        read = _TENSORS.get(str(call.function))
        if read is None:
            return None
        try:
            return read(self, call.arguments, name, kind)
        except (IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self.damaged(name, f"cannot be read: {error}") from error

    def walk(self, root: Any, kind_of: Callable[[Name, str], Kind]) -> Iterator[TensorInfo]:
        """Yield the tensors in a value, each name once.

        ``kind_of`` tells the kind of an attribute by the class of its owner. What stands in several
        places is entered once, so that a small file cannot describe an endless tree.
        """
        entered: set[int] = set()
        waiting: list[tuple[str, Any, Kind]] = [("", root, "entry")]
        while waiting:
            name, value, kind = waiting.pop()
            if isinstance(value, Call):
                found = self.tensor(value, name, kind)
                if found is not None:
                    yield found
                    continue
            if not isinstance(value, (Call, dict, list, tuple)) or id(value) in entered:
                continue
            entered.add(id(value))
            owner: Any = value.function if isinstance(value, Call) else None
            children: list[tuple[str, Any, Kind]] = []
            for key, child in entries_of(value):
                inner = name if _is_wrapping(value) else f"{name}.{key}" if name else str(key)
                children.append((inner, child, kind_of(owner, str(key)) if _owns(owner) else kind))
            waiting.extend(reversed(children))


def _owns(owner: Any) -> bool:
    # Containers and functions stand between a module and its tensors, and do not count.
    return isinstance(owner, Name) and re.match(r"__torch__(\.|$)", owner.module) is not None


def _is_wrapping(value: Any) -> bool:
    # Lists and dicts of one type are wrapped in a call that restores the type.
    return isinstance(value, Call) and str(value.function).startswith("torch.jit._pickle.")


def _dtype(value: Any) -> str:
    return value.name if isinstance(value, Name) else str(value)


def _rebuild_parameter(reader: Reader, args: Any, name: str, kind: Kind) -> TensorInfo | None:
    found = reader.tensor(args[0], name, "parameter" if kind == "entry" else kind)
    return None if found is None else replace(found, requires_grad=args[1] is True)


def _rebuild_sparse(reader: Reader, args: Any, name: str, kind: Kind) -> TensorInfo | None:
    # COO tensors are (layout, (indices, values, shape, ...)); compressed ones have one part more.
    shape = next(part for part in args[1] if isinstance(part, (tuple, list)) or _is_shape(part))
    shape = shape.arguments[0] if isinstance(shape, Call) else shape
    calls = [part for part in args[1] if isinstance(part, Call)]
    dense = [part for part in calls if str(part.function) in _DENSE]
    parts = [reader.tensor(part, name, kind) for part in dense]
    tensors = [part for part in parts if part is not None]
    if not tensors or not _is_size(shape):
        raise reader.damaged(name, "is sparse, and has no values")
    values = tensors[-1]
    nbytes = sum(part.nbytes for part in tensors)
    return TensorInfo(
        name, kind, tuple(shape), values.dtype, nbytes, values.device, storage=values.storage
    )


_DENSE: Final = tuple(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))


def _is_shape(value: Any) -> bool:
    return isinstance(value, Call) and str(value.function) == "torch.Size"


def _rebuild_meta(reader: Reader, args: Any, name: str, kind: Kind) -> TensorInfo | None:
    dtype, shape, _, grad = args[:4]
    if not _is_size(shape):
        raise reader.damaged(name, "has a shape that no tensor can have")
    return TensorInfo(name, kind, tuple(shape), _dtype(dtype), 0, "meta", grad is True)


def _rebuild_wrapped(reader: Reader, args: Any, name: str, kind: Kind) -> TensorInfo | None:
    # (function, class, arguments, state): a subclass of Tensor around what the function makes.
    return reader.tensor(Call(args[0], args[2]), name, kind)


_TENSORS: Final[dict[str, Callable[[Reader, Any, str, Kind], TensorInfo | None]]] = {
    "torch._utils._rebuild_tensor": lambda r, a, n, k: r.strided(n, k, a, False, None),
    "torch._utils._rebuild_tensor_v2": lambda r, a, n, k: r.strided(n, k, a, a[4], None),
    "torch._utils._rebuild_tensor_v3": lambda r, a, n, k: r.strided(n, k, a, a[4], _dtype(a[6])),
    "torch._utils._rebuild_qtensor": lambda r, a, n, k: r.strided(n, k, a, a[5], None),
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta,
    "torch._tensor._rebuild_from_type_v2": _rebuild_wrapped,
}
