"""Files of ``torch.save``: their content without classes, and their tensors one at a time.

Those from before torch 1.6 are several pickles, then the storages; they have no checksums.
"""

import ctypes
import io
import pickletools
from typing import TYPE_CHECKING, Final

from modkit.errors import FileError
from modkit.files import kinds
from modkit.files.inert import ITEM_SIZES, Content, InertTensor, Stored, read_pickle
from modkit.files.zip_archive import MOST_TEXT, Archive, fill, read_some, size_of


if TYPE_CHECKING:
    import torch

_LENGTH: Final = 8  # bytes of the length in front of a storage


class TorchFile:
    """A file of ``torch.save``. Opening reads its pickle, which is verified if it has a checksum.

    Args:
        source: The descriptor of the file, which must stay open, or its content.
        what: How errors name the file.

    Attributes:
        content: The content, with tensors by description.
        archive: The zip file; None for a file from before torch 1.6.
        has_checksums: False for a file from before torch 1.6, or one without checksums.

    Raises:
        FileError: If it is of another kind, corrupt, or its pickle exceeds the limits.
    """

    def __init__(self, source: int | bytes, what: str) -> None:
        self._source = source
        self._what = what
        self.archive: Archive | None = None
        # Where the storages of an old file begin.
        self._places: dict[str, int] = {}
        # The storage that was read last: several tensors may lie in it.
        self._last: tuple[str, torch.UntypedStorage] | None = None

        is_zip = read_some(source, 0, 2) == b"PK"
        if not is_zip and kinds.kind_of(source) == kinds.LEGACY:
            self.has_checksums: bool = False
            self.content: Content = self._read_old_content()
            return
        archive = kinds.archive_of(source, what, kinds.TORCH_SAVE)
        archive.text("data.pkl")
        archive.verify(name for name in archive.members if not name.startswith("data/"))
        self.archive = archive
        # Without it, torch refuses the file.
        if archive.members.keys().isdisjoint(("version", ".data/version")):
            raise archive.corrupt("it has no version")
        self.has_checksums = archive.has_checksums
        self.content = read_pickle(archive.text("data.pkl"), what, len(archive.members))
        archive.check_storages(self.content.storages)

    def _read_old_content(self) -> Content:
        """Read a file from before torch 1.6: five pickles, then each storage after its length."""
        data = read_some(self._source, 0, MOST_TEXT)
        opened = io.BytesIO(data)
        contents: list[Content] = []
        corrupt = f"{self._what} is corrupt"
        place = 0
        for _ in range(5):
            try:
                end = max(at for _, _, at in pickletools.genops(opened) if at is not None) + 1
            except ValueError as error:
                raise FileError(f"{corrupt}: {error}", kinds.LEGACY) from error
            contents.append(read_pickle(data[place:end], self._what))
            place = end

        # A number that identifies the format, its version, the system, the object, the keys.
        _, _, _, content, keys = contents
        is_list = isinstance(keys.value, list) and {*keys.value} >= content.storages.keys()
        if not is_list:
            raise FileError(f"{corrupt}: it lacks storages", kinds.LEGACY)
        for key in keys.value:
            stored = content.storages.get(key)
            count = int.from_bytes(read_some(self._source, place, _LENGTH), "little")
            place += _LENGTH
            self._places[key] = place
            if stored is None or count != stored.numel:
                raise FileError(f"{corrupt}: a storage has another size", kinds.LEGACY)
            place += stored.nbytes

        if place > size_of(self._source):
            raise FileError(f"{corrupt}: it is cut off", kinds.LEGACY)
        return content

    def tensor(self, record: InertTensor) -> "torch.Tensor":
        """Return a tensor, verified if the file has checksums.

        Args:
            record: One of the tensors in the content.

        Raises:
            FileError: If its storage is corrupt.
        """
        import torch

        assert record.storage is not None
        storage = self._storage(record.storage)
        dtype: torch.dtype = getattr(torch, record.dtype)
        start = record.storage.offset * ITEM_SIZES[record.storage.dtype] // dtype.itemsize
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(storage, start + record.offset, record.shape, record.stride)
        if "conj" in record.bits:
            tensor = tensor.conj()
        return -tensor if "neg" in record.bits else tensor

    def _storage(self, stored: Stored) -> "torch.UntypedStorage":
        if self._last is not None and self._last[0] == stored.key:
            return self._last[1]
        import torch

        whole = self.content.storages[stored.key]
        storage = torch.UntypedStorage(whole.nbytes, device="cpu")
        archive = self.archive
        if archive is not None:
            archive.read_all({f"data/{stored.key}": memory_of(storage)})
            if archive.is_of_other_byte_order:
                storage.byteswap(getattr(torch, whole.dtype))
        else:
            read_exactly(self._source, storage, self._places[stored.key], self._what)
        self._last = stored.key, storage
        return storage


# One type for all sizes, since a type of Python is a reference cycle.
_MEMORY: Final = ctypes.c_char * (1 << 62)


def memory_of(storage: "torch.UntypedStorage") -> memoryview:
    """Return the bytes of a storage on the CPU; the storage must outlive them."""
    if not storage.nbytes():
        return memoryview(bytearray())
    return memoryview(_MEMORY.from_address(storage.data_ptr())).cast("B")[: storage.nbytes()]


def read_exactly(
    source: int | bytes, storage: "torch.UntypedStorage", start: int, what: str
) -> None:
    """Read a storage from a place of a file; raise FileError if the file is shorter."""
    memory = memory_of(storage)
    done = 0
    while done < len(memory):
        count = fill(source, memory[done:], start + done)
        if not count:
            raise FileError(f"{what} is corrupt: it is cut off")
        done += count
