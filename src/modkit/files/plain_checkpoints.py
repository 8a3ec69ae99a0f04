"""Plain state dicts: the inert content of the pickle, filled with tensors.

They have only tensors, numbers and strings in dicts, lists and tuples. The storages of tensors are
allocated where they belong, and verified while they are read. Every other file is left to
``torch.load(weights_only=True)``.

================== ===============================================================================
``map_location``   how content gets there
================== ===============================================================================
None, CPU          read into the memory of the tensor, by threads after the pickle
an accelerator     the same, in pieces through pinned memory
a function         read and verified before the call
``"meta"``         not read
any, with ``mmap`` mapped from the file, after it has been verified
================== ===============================================================================
"""

import argparse
import ctypes
import mmap as memory_map
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, cast

import torch

from modkit._upstream import is_meta, restore_of, shares_all_storages
from modkit.errors import FileError
from modkit.files.inert import Constant, Content, InertTensor, Shape, Stored
from modkit.files.zip_archive import Archive, Target, fill


_VERSIONS: Final = {str(version).encode() for version in range(1, 11)}  # of the container
_DEEPEST: Final = 100
_ATOMS: Final = frozenset({str, int, float, bool, complex, bytes, type(None)})
_DICTS: Final = {dict, OrderedDict, Counter}


class NotPlainError(Exception):
    """A file has something that only torch reads."""


def is_plain(archive: Archive, content: Content) -> bool:
    """Return True if the content of an archive has no names but torch's, as of this byte order."""
    members = archive.members
    version_names = [name for name in (".data/version", "version") if name in members]
    version = archive.text(version_names[0]).strip() if version_names else b""
    order = archive.text("byteorder") if "byteorder" in members else None
    if order is None and torch.serialization.get_default_load_endianness() is None:
        order = b"little"
    is_usual = version in _VERSIONS and order == sys.byteorder.encode()
    return is_usual and not content.classes and not content.is_odd


_CPU: Final = torch.device("cpu")
_PINNED: Final = {"cuda", "xpu"}  # other devices may not support pinned memory
# Types of map_location that are not called.
_LOCATIONS: Final = (type(None), dict, str, bytes, torch.device)
# Mapped tensors must be aligned; torch.save aligns them to 64 bytes.
_ALIGNMENT: Final = 16


class Filler:
    """Puts tensors into the content of an archive, where ``torch.load`` has them.

    Args:
        archive: The file.
        map_location: That of ``torch.load``.
        mapped: The descriptor of the file, to map storages into memory; None to read them.
    """

    def __init__(self, archive: Archive, map_location: Any, mapped: int | None) -> None:
        self._archive = archive
        self._mapping: torch.UntypedStorage | None = None
        if mapped is not None:
            content = memory_map.mmap(mapped, 0, access=memory_map.ACCESS_COPY)
            self._mapping = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()

        self._restore = restore_of(map_location)
        self._on_meta = is_meta(map_location)
        self.maps: bool = map_location is not None
        self.maps_by_function: bool = not isinstance(map_location, _LOCATIONS)
        self._filled: dict[int, Any] = {}
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._devices: dict[str, torch.device | None] = {}
        # Memory of the members that threads read and verify after the pickle.
        self.unread: dict[str, Target] = {}
        self.error: Exception | None = None

    def fill_all(self, content: Content) -> Any:
        """Return the content of a file with tensors, or raise NotPlainError."""
        filled = self.fill(content.value)
        # torch restores storages that no tensor uses, too.
        for key in [key for key in content.storages if key not in self._storages]:
            self._storage(content.storages[key])
        return filled

    def fill(self, content: Any, depth: int = 0) -> Any:
        """Put tensors in place of their descriptions, or raise NotPlainError."""
        kind = type(content)
        if kind in _ATOMS:
            return content
        if kind is InertTensor:
            if id(content) not in self._filled:
                self._filled[id(content)] = self._tensor(content)
            return self._filled[id(content)]
        if kind is Constant and content.startswith("torch."):
            return getattr(torch, content.removeprefix("torch."))
        if kind is Shape:
            return torch.Size(content)
        if depth > _DEEPEST:
            raise NotPlainError
        if kind is tuple:
            return tuple([self.fill(item, depth + 1) for item in content])
        if not _is_constant(content) and id(content) not in self._filled:
            self._filled[id(content)] = content
            for key, value in _items_of(content):
                if type(value) not in _ATOMS:
                    content[key] = self.fill(value, depth + 1)
            if hasattr(content, "__dict__") and vars(content):
                self.fill(vars(content), depth + 1)
        return content

    def _tensor(self, inert: InertTensor) -> torch.Tensor:
        stored = inert.storage
        if stored is None or inert.bits or inert.has_more:
            raise NotPlainError
        storage = self._storage(stored)
        dtype = getattr(torch, inert.dtype)
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        tensor.set_(storage, inert.offset, inert.shape, inert.stride)
        if inert.is_parameter:
            tensor = torch.nn.Parameter(tensor, inert.requires_grad)
        elif inert.requires_grad:
            tensor.requires_grad = True
        tensor._backward_hooks = OrderedDict()
        return tensor

    def _storage(self, stored: Stored) -> torch.UntypedStorage:
        storage = self._storages.get(stored.key)
        # Some releases of torch allocate a storage without memory again each time.
        if storage is None or not (shares_all_storages or storage.data_ptr()):
            name = f"data/{stored.key}"
            storage = self._place(name) if self._on_meta else self.allocate(name, stored.location)
            self._storages[stored.key] = storage
        return storage

    def _place(self, name: str) -> torch.UntypedStorage:
        """Return a storage without memory, which knows its place in the file."""
        member = self._archive.members[name]
        storage = torch.UntypedStorage(member.file_size, device="meta")
        cast("Any", storage)._checkpoint_offset = self._archive.start_of(member)
        return storage

    def allocate(self, name: str, location: str) -> torch.UntypedStorage:
        """Return the storage of a member.

        On the CPU and on an accelerator, the content of large members follows: ``unread`` has their
        memory, for :meth:`Archive.read_all`. Everything that a function receives is verified.

        Args:
            name: The member.
            location: The device that it was saved from, as the pickle names it.

        Returns:
            The storage on the device that ``map_location`` selects, or the result of its function.

        Raises:
            FileError: If the content of a member that is read here is corrupt.
            UnpicklingError: If a member to map is not aligned in the file, or the function does not
                return a storage.
        """
        member = self._archive.members[name]
        device = None if self.maps_by_function else self._device_of(location)

        if self._mapping is not None:
            start = self._archive.start_of(member)
            if start % _ALIGNMENT:
                raise pickle.UnpicklingError
            # An empty one has an address, by which torch knows that it is shared.
            storage = self._mapping[start : start + member.file_size]
        elif not self._archive.is_large(name):
            storage = torch.UntypedStorage(member.file_size)
            ctypes.memmove(storage.data_ptr(), self._archive.read(name), member.file_size)
        elif device is None:
            storage = torch.UntypedStorage(member.file_size)
            self._archive.read_into(name, memory_of(storage))
        else:
            storage = torch.UntypedStorage(member.file_size, device=device)
            self.unread[name] = memory_of(storage) if device == _CPU else partial(_staging, storage)
            return storage

        return storage if device == _CPU else self._restored(storage, location)

    def _device_of(self, location: str) -> torch.device | None:
        """Return the device of what was saved from a location; None if a function decides."""
        if location not in self._devices:
            empty = torch.UntypedStorage(0)
            restored = self._restored(empty, location)
            accelerator = torch.accelerator.current_accelerator()
            # torch.serialization.register_package() can register other functions than torch's.
            is_torchs = restored is empty or (
                accelerator is not None and restored.device.type == accelerator.type
            )
            self._devices[location] = restored.device if is_torchs else None
        return self._devices[location]

    def _restored(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """Return the storage that ``torch.load`` makes of one that was saved from a location."""
        try:
            restored = self._restore(storage, location)
        except Exception as error:
            self.error = error
            raise
        if not isinstance(restored, torch.UntypedStorage):
            raise pickle.UnpicklingError
        return restored


def _is_constant(value: Any) -> bool:
    """Return True for a value without objects of torch."""
    return type(value) in _ATOMS or (type(value) in {tuple, set} and all(map(_is_constant, value)))


def _items_of(content: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a container that can be filled, by key or index."""
    kind = type(content)
    if kind is list:
        return enumerate(content)
    # Most keys are strings.
    if kind in _DICTS and all(type(key) in _ATOMS or _is_constant(key) for key in content):
        return [*content.items()]
    if kind is argparse.Namespace:
        return ()
    raise NotPlainError


def _staging(
    storage: torch.UntypedStorage, size: int
) -> tuple[memoryview, Callable[[int, int], object]]:
    """Return host memory, and a function that copies from it into a storage of a device."""
    # Memory that the device has freed may be in use until its stream gets there.
    torch.accelerator.synchronize(storage.device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type in _PINNED)
    device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def copy(start: int, count: int) -> object:
        return device[start : start + count].copy_(host[:count])

    return memory_of(host.untyped_storage()), copy


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage on the CPU; the storage must outlive them."""
    size = storage.nbytes()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(storage.data_ptr())).cast("B")


def read_exactly(source: int | bytes, storage: torch.UntypedStorage, start: int, what: str) -> None:
    """Read a storage from a place of a file; raise FileError if the file is shorter."""
    memory = memory_of(storage)
    done = 0
    while done < len(memory):
        count = fill(source, memory[done:], start + done)
        if not count:
            raise FileError(f"{what} is corrupt: it is cut off")
        done += count


def tensor_of(
    source: int | bytes, start: int, dtype: str, shape: tuple[int, ...], what: str
) -> torch.Tensor:
    """Read a contiguous tensor from a place of a file."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise FileError(f"{what} has {dtype}, which this torch does not support")
    tensor = torch.empty(shape, dtype=kind, device="cpu")
    read_exactly(source, tensor.untyped_storage(), start, what)
    return tensor
