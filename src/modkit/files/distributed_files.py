"""Folders of ``torch.distributed.checkpoint``: a pickle of metadata, and files of archives.

The pickle names the parts of each tensor, with the place of each in a file; each part is an archive
of ``torch.save`` of its own. Nothing here imports torch's classes for it.
"""

import math
from collections.abc import Hashable, Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from modkit.errors import FileError
from modkit.files import kinds
from modkit.files.inert import InertTensor, read_pickle
from modkit.files.torch_files import TorchFile
from modkit.files.zip_archive import MOST_TEXT, open_regular, read_some


if TYPE_CHECKING:
    import torch

METADATA: Final = ".metadata"


class _Part(NamedTuple):
    """A part of a tensor, and where its archive is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int

    def opened(self, what: str) -> TorchFile:
        """Read the archive."""
        with open_regular(self.file) as descriptor:
            return TorchFile(read_some(descriptor, self.start, self.length), what)


class DistributedFile:
    """The tensors of a folder that ``torch.distributed.checkpoint`` wrote, one at a time.

    Args:
        path: The file of metadata in the folder.
        key: Only tensors below it, and names without it.

    Attributes:
        tensors: The tensors by description.
        others: The names of other entries, and of tensors that are not below the key.
        files: The files of the archives.
        unverified: Whether these have no checksums.

    Raises:
        FileError: If the metadata is corrupt, or of another kind.
    """

    metadata: Mapping[str, str] = MappingProxyType({})
    versions: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, path: Path, key: str | None = None) -> None:
        self._path = path
        self._prefix = f"{key}." if key else ""
        with open_regular(path) as descriptor:
            content = read_pickle(read_some(descriptor, 0, MOST_TEXT), str(path)).value
        self.tensors: dict[str, InertTensor] = {}
        self.others: list[str] = []
        self._parts: dict[str, list[_Part]] = {}
        try:
            self._read_metadata(content.state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            text = f"{path} is not the metadata of a distributed checkpoint"
            raise FileError(f"{text} that this version knows: {error!r}", kinds.PICKLE) from error
        if key and not self.tensors:
            names = ", ".join(sorted({name.partition(".")[0] for name in self.others}))
            raise FileError(f"{path.parent} has no tensors below the key {key!r}; it has {names}")
        parts = [part for parts in self._parts.values() for part in parts]
        self.files: list[Path] = sorted({part.file for part in parts})
        lengths = {file: file.stat().st_size for file in self.files}
        for part in parts:
            if not 0 <= part.start <= part.start + part.length <= lengths[part.file]:
                raise FileError(f"{part.file} is cut off, or of another save", kinds.DISTRIBUTED)
        # All are of one save, and a small one is read in no time.
        smallest = sorted(parts, key=attrgetter("length"))[:1]
        self.unverified = not all(part.opened(str(part.file)).has_checksums for part in smallest)

    def _read_metadata(self, metadata: Mapping[str, Any]) -> None:
        places: dict[Hashable, Any] = {}
        for index, info in metadata["storage_data"].items():
            offset = index.state.get("offset")
            places[index.state["fqn"], offset and tuple(offset)] = info.state

        for full_name, entry in metadata["state_dict_metadata"].items():
            name = full_name.removeprefix(self._prefix)
            if "chunks" not in (entry.state or {}) or not full_name.startswith(self._prefix):
                self.others.append(full_name)
                continue
            # The properties are an object, or its fields in their order.
            properties = entry.state["properties"].state
            dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
            shape = tuple(entry.state["size"])
            self.tensors[name] = InertTensor(str(dtype).removeprefix("torch."), shape)
            self._parts[name] = [
                self._part(chunk.state, places, full_name) for chunk in entry.state["chunks"]
            ]

    def _part(self, chunk: Mapping[str, Any], places: Mapping[Hashable, Any], name: str) -> _Part:
        offsets = tuple(chunk["offsets"])
        place = places.get((name, offsets)) or places[name, None]
        file = place["relative_path"]
        if Path(file).name != file:
            raise ValueError(f"{file!r} is not in the folder")
        if place.get("transform_descriptors"):
            raise ValueError("its files are compressed by an extension")
        sizes = tuple(chunk["sizes"])
        return _Part(offsets, sizes, self._path.with_name(file), place["offset"], place["length"])

    def tensor(self, name: str) -> "torch.Tensor":
        """Return a tensor, whose parts were verified."""
        import torch

        shape = self.tensors[name].shape
        whole: torch.Tensor | None = None
        covered = 0
        for part in self._parts[name]:
            tensor = self._read(part, name)
            covered += tensor.numel()
            if part.sizes == shape:
                return tensor
            if whole is None:
                whole = torch.empty(shape, dtype=tensor.dtype)
            places = zip(part.offsets, part.sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in places)] = tensor
        if whole is None or covered != math.prod(shape):
            raise FileError(f"{self._path}: parts of {name!r} are missing", kinds.DISTRIBUTED)
        return whole

    def _read(self, part: _Part, name: str) -> "torch.Tensor":
        what = f"{part.file}, which has {name!r},"
        opened = part.opened(what)
        record = opened.content.value
        fits = isinstance(record, InertTensor) and record.storage
        if not fits or record.shape != part.sizes or record.dtype != self.tensors[name].dtype:
            raise FileError(f"{what} has another tensor there", kinds.DISTRIBUTED)
        return opened.tensor(record)
