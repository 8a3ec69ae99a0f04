"""The objects of a verified file of torch: its pickle is read a second time, with tensors.

The first reading, of :mod:`modkit.files.inert`, has shown that the pickle keeps within the limits,
which names it has, and which storages. So all storages are read and verified first, several at a
time in threads, and put where ``map_location`` says. Then the unpickler of the standard library
runs the same instructions with the functions that ``torch.load(weights_only=True)`` allows.

================== ===============================================================================
``map_location``   how content gets there
================== ===============================================================================
``"meta"``         not read
any, with ``mmap`` mapped from the file, after it has been verified
any other          read and verified in host memory, then given to torch's function for the place
================== ===============================================================================
"""

import io
import mmap as memory_map
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch

from modkit._upstream import (
    is_meta,
    restore_of,
    shares_all_storages,
    typed_storage,
)
from modkit.files.inert import Stored, full_name
from modkit.files.torch_files import TorchFile, memory_of
from modkit.files.zip_archive import Archive


# Mapped tensors must be aligned; torch.save aligns them to 64 bytes.
_ALIGNMENT: Final = 16
# Content that is in host memory at once on its way to another device.
_BATCH: Final = 256 << 20


_VERSIONS: Final = {str(version).encode() for version in range(1, 11)}  # of the container
_REBUILD: Final = "torch._utils._rebuild_tensor_v2"
# These ask torch's reader where the content belongs.
_OF_READER: Final = re.compile(r"torch\._utils\._rebuild_(wrapper|device|xla|hpu)\w*")


class LeftToTorchError(Exception):
    """A file has something that only torch reads."""


def is_usual(opened: TorchFile, names: Mapping[str, Any]) -> bool:
    """Return True if an archive has only these names, as a torch of this byte order writes them."""
    content, archive = opened.content, cast("Archive", opened.archive)
    version_names = [name for name in (".data/version", "version") if name in archive.members]
    version = archive.text(version_names[0]).strip() if version_names else b""
    order = archive.text("byteorder") if "byteorder" in archive.members else None
    if order is None and torch.serialization.get_default_load_endianness() is None:
        order = b"little"
    if version not in _VERSIONS or order != sys.byteorder.encode():
        return False
    is_known = names.keys() >= content.names and not any(map(_OF_READER.match, content.names))
    return is_known and not content.is_odd and not content.has_items


class Loader(pickle.Unpickler):
    """Reads the storages of an archive, then its objects, as ``torch.load`` makes them.

    Args:
        opened: The file, whose pickle is within the limits.
        names: What the names in the pickle stand for.
        map_location: That of ``torch.load``.
        mapped: The descriptor of the file, to map storages into memory; None to read them.
    """

    def __init__(
        self, opened: TorchFile, names: Mapping[str, Any], map_location: Any, mapped: int | None
    ) -> None:
        self._archive = cast("Archive", opened.archive)
        super().__init__(io.BytesIO(self._archive.text("data.pkl")), encoding="utf-8")
        # Most tensors are made by this function.
        self._names = {**names, _REBUILD: partial(_tensor, names[_REBUILD])}
        self._stored = opened.content.storages
        self._restore = restore_of(map_location)
        self._on_meta = is_meta(map_location)
        self._mapping: torch.UntypedStorage | None = None
        if mapped is not None:
            content = memory_map.mmap(mapped, 0, access=memory_map.ACCESS_COPY)
            self._mapping = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._typed: dict[str, torch.TypedStorage] = {}

    def read_storages(self) -> None:
        """Read all storages, those that no tensor uses too.

        Raises:
            FileError: If content is corrupt.
            LeftToTorchError: If a storage to map is not aligned in the file.
            Exception: What ``map_location`` raises.
        """
        batch: list[Stored] = []
        size = 0
        for stored in self._stored.values():
            batch.append(stored)
            size += stored.nbytes
            if size >= _BATCH:
                self._read(batch)
                batch = []
                size = 0
        self._read(batch)

    def _read(self, batch: Sequence[Stored]) -> None:
        if self._on_meta or self._mapping is not None:
            storages = [self._placed(stored) for stored in batch]
        else:
            storages = [torch.UntypedStorage(stored.nbytes) for stored in batch]
            names = [f"data/{stored.key}" for stored in batch]
            self._archive.read_all(dict(zip(names, map(memory_of, storages), strict=True)))

        for stored, storage in zip(batch, storages, strict=True):
            restored = storage if self._on_meta else self._restore(storage, stored.location)
            if not isinstance(restored, torch.UntypedStorage):
                raise LeftToTorchError
            self._storages[stored.key] = restored

    def _placed(self, stored: Stored) -> torch.UntypedStorage:
        """Return a storage without content, which knows its place in the file, or a mapped one."""
        start = self._archive.start_of(self._archive.members[f"data/{stored.key}"])
        if self._mapping is None or self._on_meta:
            storage = torch.UntypedStorage(stored.nbytes, device="meta")
            cast("Any", storage)._checkpoint_offset = start
            return storage
        if start % _ALIGNMENT:
            raise LeftToTorchError
        # An empty one has an address, by which torch knows that it is shared.
        return cast("torch.UntypedStorage", self._mapping[start : start + stored.nbytes])

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for; raise KeyError for one that is not allowed."""
        return self._names[full_name(module, name)]

    def persistent_load(self, pid: Any) -> torch.TypedStorage:
        """Return the storage that the pickle describes."""
        key = str(pid[2])
        if key in self._typed:
            return self._typed[key]

        stored = self._stored[key]
        if key not in self._storages:
            self._read([stored])
        storage = self._storages.pop(key)
        typed = typed_storage(storage, getattr(torch, stored.dtype))
        # Some releases of torch make a storage without memory again each time.
        if shares_all_storages or storage.data_ptr():
            self._typed[key] = typed
        return typed


def _tensor(
    theirs: Callable[..., torch.Tensor],
    storage: Any,
    offset: int,
    size: Any,
    stride: Any,
    needs_gradient: bool,
    hooks: Any,
    *bits: Any,
) -> torch.Tensor:
    """Do what torch's function does, without the search for modes, of which none is active."""
    if any(bits):
        return theirs(storage, offset, size, stride, needs_gradient, hooks, *bits)
    untyped = storage._untyped_storage
    tensor = torch.empty(0, dtype=storage.dtype, device=untyped.device)
    tensor.set_(untyped, offset, size, stride)
    if needs_gradient is not False:
        tensor.requires_grad = needs_gradient
    tensor._backward_hooks = hooks
    return tensor
