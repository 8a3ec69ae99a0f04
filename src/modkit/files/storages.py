"""The storages of tensors: allocated where they belong, and verified while they are read.

================== ===============================================================================
``map_location``   how content gets there
================== ===============================================================================
None, CPU          read into the memory of the tensor, by threads after the pickle
an accelerator     the same, in pieces through pinned memory
a function         read and verified before the call, while a thread reads the next storage
``"meta"``         not read
any, with ``mmap`` mapped from the file, after it has been verified
================== ===============================================================================
"""

import ctypes
import mmap as memory_map
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, cast

import torch
from typing_extensions import Self

from modkit._upstream import restore_of
from modkit.files.zip_archive import Archive, Target


_CPU: Final = torch.device("cpu")
_PINNED: Final = {"cuda", "xpu"}  # other devices may not support pinned memory
# Types of map_location that are not called.
_LOCATIONS: Final = (type(None), dict, str, bytes, torch.device)
# Mapped tensors must be aligned; torch.save aligns them to 64 bytes.
_ALIGNMENT: Final = 16


class Storages:
    """Allocates the storages of an archive where ``torch.load`` has them with a ``map_location``.

    A context manager: at the end of its block, no thread reads from the archive.

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
        self.maps_by_function: bool = not isinstance(map_location, _LOCATIONS)
        self._devices: dict[str, torch.device | None] = {}
        # Memory of the members that threads read and verify after the pickle.
        self.unread: dict[str, Target] = {}
        self.error: Exception | None = None

        self._reader = ThreadPoolExecutor(1)
        self._placeholder = torch.UntypedStorage(0, device="meta")
        # The large member that follows each one in the pickle.
        self._following: dict[str, str] = {}
        self._last_planned = ""
        self._planned = set[str]()
        self._ahead: dict[str, tuple[torch.UntypedStorage, Future[None]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.shutdown()

    def on_meta(self, name: str, location: str) -> torch.UntypedStorage:
        """Return a storage without memory, which knows its place in the file."""
        member = self._archive.members[name]
        storage = torch.UntypedStorage(member.size, device="meta")
        cast("Any", storage)._checkpoint_offset = self._archive.start_of(member)
        return storage

    def plan(self, name: str, location: str) -> torch.UntypedStorage:
        """Return any storage without memory, in a first pass that only finds the order of storages.

        In the second pass, ``allocate`` lets a thread read each second one while the one before it
        is read. So at most one storage more is in memory.
        """
        if self._archive.is_large(name) and name not in self._planned:
            self._following[self._last_planned] = name
            self._last_planned = name
            self._planned.add(name)
        return self._placeholder

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
            storage = self._mapping[start : start + member.size]
        elif not self._archive.is_large(name):
            storage = torch.UntypedStorage(member.size)
            ctypes.memmove(storage.data_ptr(), self._archive.read(name), member.size)
        elif device is None:
            storage = self._read_next(name)
        else:
            storage = torch.UntypedStorage(member.size, device=device)
            self.unread[name] = memory_of(storage) if device == _CPU else partial(_staging, storage)
            return storage

        return storage if device == _CPU else self._restored(storage, location)

    def _read_next(self, name: str) -> torch.UntypedStorage:
        """Return a large member, which a thread may have read; let it read the next one."""
        if name in self._ahead:
            storage, is_read = self._ahead.pop(name)
            is_read.result()
            return storage

        following = self._following.pop(name, None)
        if following is not None:
            storage, memory = self._new(following)
            is_read = self._reader.submit(self._archive.read_into, following, memory)
            self._ahead[following] = storage, is_read

        storage, memory = self._new(name)
        self._archive.read_into(name, memory)
        return storage

    def _new(self, name: str) -> tuple[torch.UntypedStorage, memoryview]:
        # Always in this thread: memory that another one allocates is not reused.
        storage = torch.UntypedStorage(self._archive.members[name].size)
        return storage, memory_of(storage)

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
