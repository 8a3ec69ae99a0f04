"""Compare what two readers make of a file, object by object."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


ATOMS = (
    *(str, bytes, bytearray, int, float, complex, bool, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.Size, torch.qscheme, type),
)
MISSING = object()


class Different(AssertionError):
    """Two objects are not the same; the message begins with the path to them."""


def assert_same(found: Any, expected: Any, *, values: bool = True, places: bool = True) -> None:
    """Raise unless both readers have made the same objects, tied and shared in the same places.

    Args:
        found: What one reader has returned.
        expected: What the other one has returned.
        values: Whether to compare the bytes of storages, which those of skipped files do not have.
        places: Whether to compare where storages without memory are in the file.
    """
    Comparison(values, places).compare("", found, expected)


def difference(found: Any, expected: Any, *, values: bool = True) -> str:
    """Return the first difference, or an empty text."""
    try:
        assert_same(found, expected, values=values)
    except Different as error:
        return str(error)
    return ""


def outcome(reader: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, Exception | None]:
    """Return what a reader returns and no exception, or None and the exception."""
    try:
        return reader(*args, **options), None
    except Exception as error:
        return None, error


class Comparison:
    """Walks two objects at once, and remembers which object and storage stands for which."""

    def __init__(self, values: bool, places: bool) -> None:
        self._values = values
        self._stored = ("_checkpoint_offset", "_fake_device") if places else ("_fake_device",)
        self._partners: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self._storages: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        # An id is only an id while its object lives.
        self._alive: list[Any] = []

    def compare(self, path: str, a: Any, b: Any) -> None:
        """Compare two objects and all that they hold."""
        if type(a) is not type(b):
            raise Different(f"{path}: {type(a)} instead of {type(b)}")
        if isinstance(a, ATOMS):
            equal(path, "", packed(a), packed(b))
            return
        # The empty tuple is one object in all of Python.
        if a != () and not self._is_new(path, "object", self._partners, id(a), id(b)):
            return
        self._alive += [a, b]
        if isinstance(a, Tensor):
            self._tensors(path, a, b)
        elif isinstance(a, (torch.UntypedStorage, torch.TypedStorage)):
            self._storage_objects(path, a, b)
        elif isinstance(a, dict):
            self._mappings(path, a, b)
        elif isinstance(a, (list, tuple)):
            equal(path, "length", len(a), len(b))
            for index, (one, other) in enumerate(zip(a, b, strict=True)):
                self.compare(f"{path}[{index}]", one, other)
        elif isinstance(a, (set, frozenset)):
            equal(path, "set", {packed(x) for x in a}, {packed(x) for x in b})
        elif hasattr(a, "__dict__"):
            self.compare(f"{path}.__dict__", vars(a), vars(b))
        else:
            equal(path, "value", repr(a), repr(b))

    def _is_new(
        self, path: str, what: str, tables: tuple[dict[int, Any], dict[int, Any]], a: int, b: int
    ) -> bool:
        """Return whether neither was met before; raise if only one was, or with another partner."""
        partner, other = tables[0].get(a, MISSING), tables[1].get(b, MISSING)
        if partner is MISSING and other is MISSING:
            tables[0][a], tables[1][b] = b, a
            return True
        if partner != b or other != a:
            shared = "shared" if partner is not MISSING else "not shared"
            raise Different(f"{path}: the {what} is {shared} in another way than expected")
        return False

    def _mappings(self, path: str, a: Any, b: Any) -> None:
        # Attributes from the file may hide methods.
        items, values = list(dict.items(a)), list(dict.values(b))
        equal(path, "keys", [packed(key) for key, _ in items], [packed(key) for key in b])
        for (key, one), other in zip(items, values, strict=True):
            self.compare(f"{path}[{key!r}]", one, other)
        if isinstance(a, (OrderedDict, Counter)):
            self.compare(f"{path}.__dict__", vars(a), vars(b))

    def _storage_objects(self, path: str, a: Any, b: Any) -> None:
        if isinstance(a, torch.TypedStorage):
            equal(path, "dtype", a.dtype, b.dtype)
            a, b = a._untyped_storage, b._untyped_storage
        self._storage(path, a, b)

    def _storage(self, path: str, a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
        if not self._is_new(path, "storage", self._storages, a._cdata, b._cdata):
            return
        self._alive += [a, b]
        # Those of modkit may be resizable where those of torch are not.
        if not a.resizable():
            equal(path, "storage resizable", False, b.resizable())
        for name in ("nbytes", "is_pinned", "is_shared"):
            equal(path, f"storage {name}", getattr(a, name)(), getattr(b, name)())
        equal(path, "storage device", a.device, b.device)
        for name in self._stored:
            equal(path, name, getattr(a, name, None), getattr(b, name, None))
        if self._values and a.device.type == "cpu" and b.device.type == "cpu":
            equal(path, "storage bytes", content(a), content(b))

    def _tensors(self, path: str, a: Tensor, b: Tensor) -> None:
        for name in (
            *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn"),
            *("_version", "_post_accumulate_grad_hooks"),
            *("is_quantized", "is_nested", "is_sparse", "is_mkldnn"),
        ):
            if name in {"shape", "_version"} and (a.is_nested or a.is_inference()):
                continue
            equal(path, name, getattr(a, name), getattr(b, name))
        # A pickle may put anything in the place of hooks.
        self.compare(f"{path}._backward_hooks", a._backward_hooks, b._backward_hooks)
        self.compare(f"{path}.grad", a.grad, b.grad)
        for name in ("is_conj", "is_neg", "_is_view", "is_inference"):
            equal(path, name, getattr(a, name)(), getattr(b, name)())
        if a._is_view():
            self.compare(f"{path}._base", a._base, b._base)
        if isinstance(a, FakeTensor):
            equal(path, "fake_device", a.fake_device, b.fake_device)
        else:
            self.compare(f"{path}.__dict__", vars(a), vars(b))
        self._contents(path, a, b)

    def _contents(self, path: str, a: Tensor, b: Tensor) -> None:
        """Compare the parts that only tensors of one layout have."""
        if a.is_nested:
            equal(path, "nested sizes", a._nested_tensor_size(), b._nested_tensor_size())
            self._storage(path, a.untyped_storage(), b.untyped_storage())
        elif a.layout is torch.sparse_coo:
            equal(path, "is_coalesced", a.is_coalesced(), b.is_coalesced())
            self.compare(f"{path}.indices", a._indices(), b._indices())
            self.compare(f"{path}.values", a._values(), b._values())
        elif a.layout in {torch.sparse_csr, torch.sparse_bsr}:
            self.compare(f"{path}.crow_indices", a.crow_indices(), b.crow_indices())
            self.compare(f"{path}.col_indices", a.col_indices(), b.col_indices())
            self.compare(f"{path}.values", a.values(), b.values())
        elif a.layout in {torch.sparse_csc, torch.sparse_bsc}:
            self.compare(f"{path}.ccol_indices", a.ccol_indices(), b.ccol_indices())
            self.compare(f"{path}.row_indices", a.row_indices(), b.row_indices())
            self.compare(f"{path}.values", a.values(), b.values())
        else:
            self._strided(path, a, b)

    def _strided(self, path: str, a: Tensor, b: Tensor) -> None:
        equal(path, "stride", a.stride(), b.stride())
        equal(path, "storage_offset", a.storage_offset(), b.storage_offset())
        if a.is_quantized:
            equal(path, "qscheme", a.qscheme(), b.qscheme())
            if a.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
                equal(path, "q_scale", a.q_scale(), b.q_scale())
                equal(path, "q_zero_point", a.q_zero_point(), b.q_zero_point())
            else:
                for name in ("q_per_channel_scales", "q_per_channel_zero_points"):
                    self.compare(f"{path}.{name}", getattr(a, name)(), getattr(b, name)())
                equal(path, "axis", a.q_per_channel_axis(), b.q_per_channel_axis())
        # A tensor that wraps others has no memory itself; what it wraps is among its attributes.
        if not hasattr(a, "__tensor_flatten__"):
            self._storage(path, a.untyped_storage(), b.untyped_storage())


def equal(path: str, what: str, a: Any, b: Any) -> None:
    """Raise unless two values are equal."""
    same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
    if not same:
        raise Different(
            f"{path}: {what} {shortened(a)} instead of {shortened(b)}".replace("  ", " ")
        )


def shortened(value: Any) -> str:
    """Return a text of moderate length."""
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def packed(value: Any) -> Any:
    """Return something that is equal for equal values of one type only, bit by bit for floats."""
    if isinstance(value, float):
        return float, struct.pack("d", value) if not math.isnan(value) else "nan"
    if isinstance(value, complex):
        return complex, packed(value.real), packed(value.imag)
    if isinstance(value, tuple):
        return type(value), tuple(packed(part) for part in value)
    if isinstance(value, (Tensor, torch.UntypedStorage, torch.TypedStorage)):
        return type(value)
    return type(value), value


def content(storage: torch.UntypedStorage) -> bytes:
    """Return the bytes of a storage on the CPU."""
    if not storage.nbytes():
        return b""
    plain = torch.empty(0, dtype=torch.uint8).set_(storage)
    return plain.numpy().tobytes()
