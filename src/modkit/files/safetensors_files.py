"""Files of safetensors: a JSON header, then the tensors; no checksums."""

import ctypes
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from modkit.errors import FileError, shown
from modkit.files.atomic_write import atomic_write
from modkit.files.inert import ITEM_SIZES, InertTensor, Stored
from modkit.files.kinds import MOST_JSON, SAFETENSORS
from modkit.files.torch_files import read_exactly
from modkit.files.zip_archive import open_kept, read_some


if TYPE_CHECKING:
    import torch

# Names of dtypes in the format and in torch.
_DTYPES: Final[dict[str, str]] = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F8_{name.upper()}": f"float8_{name}" for name in ("e4m3fnuz", "e5m2", "e5m2fnuz")},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_NAMES: Final[dict[str, str]] = {f"torch.{dtype}": name for name, dtype in _DTYPES.items()}
_BITS: Final = {
    **{name: ITEM_SIZES[dtype] * 8 for name, dtype in _DTYPES.items()},
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_LENGTH: Final = 8  # bytes of the length of the header
_ALIGNMENT: Final = 8
# The key of the metadata, and text with surrogates, which is not Unicode.
_NO_NAMES: Final = re.compile("__metadata__|.*[\ud800-\udfff].*", re.DOTALL)
# The key in the metadata of a file for the versions of modules, which files of torch have by
# themselves.
_VERSIONS: Final = "modkit.versions"
_PLAIN: Final = {int, float, bool, str, type(None)}


class SafetensorsFile:
    """A safetensors file. Opening reads the header, without torch; the file stays open.

    Args:
        path: File to open.

    Attributes:
        metadata: The metadata in the header: strings.
        versions: The versions of modules in it, in the form of the ``_metadata`` of a state dict.
        tensors: The tensors by description; their places are those after the header.

    Raises:
        FileError: If the header is corrupt, or does not fit the size of the file.
    """

    unverified = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_kept(self, path)
        length = int.from_bytes(read_some(self._file, 0, _LENGTH), "little")
        self._start = _LENGTH + length
        content = read_some(self._file, _LENGTH, min(length, MOST_JSON))
        self.tensors: dict[str, InertTensor] = {}
        try:
            header = json.loads(content)
            metadata = header.pop("__metadata__", None) or {}
            "".join(metadata.values())  # which are strings
            self.versions: Mapping[str, Any] = _versions_in(metadata)
            self._read_entries(header)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise FileError(f"{path} is corrupt: {reason}", SAFETENSORS) from error
        self.metadata: Mapping[str, str] = metadata

    def _read_entries(self, header: Mapping[str, Any]) -> None:
        """Read where each tensor is; they must follow each other without gaps."""
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin = end
            shape = entry["shape"]
            bits = math.prod(shape) * _BITS[entry["dtype"]]
            end = begin + bits // 8
            is_shape = all(type(size) is int and size >= 0 for size in shape)
            if not is_shape or bits % 8 or entry["data_offsets"] != [begin, end]:
                raise ValueError(f"the tensor {name!r} is not where its header says")
            stored = Stored(name, "uint8", end - begin, "", begin)
            dtype = str(_DTYPES.get(entry["dtype"], entry["dtype"]))
            self.tensors[name] = InertTensor(dtype, tuple(shape), stored)
        if self._start + end != os.fstat(self._file).st_size:
            raise ValueError("its header does not fit the size of the file")

    def tensor(self, name: str) -> "torch.Tensor":
        """Return one tensor."""
        import torch

        record = self.tensors[name]
        dtype = getattr(torch, record.dtype, None)
        if not isinstance(dtype, torch.dtype):
            text = f"{self._path} has {record.dtype}, which this torch does not support"
            raise FileError(text, SAFETENSORS)
        assert record.storage is not None
        place = self._start + record.storage.offset
        tensor = torch.empty(record.shape, dtype=dtype, device="cpu")
        read_exactly(self._file, tensor.untyped_storage(), place, str(self._path))
        return tensor


def versions_as_metadata(metadata: Mapping[Any, Any]) -> dict[str, str]:
    """Return the versions of modules as the metadata of a file, which holds strings.

    Args:
        metadata: The ``_metadata`` of a state dict.

    Returns:
        One entry, or none without versions. Entries that are not versions are left out: the
        ``_metadata`` of a torch file may have entries of any kind.
    """
    versions = {path: entry.get("version") for path, entry in plain_metadata(metadata).items()}
    versions = {p: v for p, v in versions.items() if isinstance(v, (int, type(None)))}
    return {_VERSIONS: json.dumps(versions)} if versions else {}


def plain_metadata(metadata: object) -> dict[str, dict[str, Any]]:
    """Return the ``_metadata`` of a state dict, which may have entries of any kind, without those.

    Args:
        metadata: It; from a file, its objects are placeholders that no file can hold.
    """
    # Attributes from the file may hide methods of dicts.
    entries = dict.items(metadata) if isinstance(metadata, dict) else ()
    return {
        path: {name: value for name, value in dict.items(entry) if type(value) in _PLAIN}
        for path, entry in entries
        if isinstance(path, str) and isinstance(entry, dict)
    }


def _versions_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the versions of modules in the form that ``_metadata`` of a state dict has."""
    with suppress(ValueError, AttributeError, RecursionError):
        versions = json.loads(metadata.get(_VERSIONS, "{}"))
        if all(isinstance(version, (int, type(None))) for version in versions.values()):
            return {name: {"version": version} for name, version in versions.items()}
    raise ValueError(f"{_VERSIONS} are not versions of modules")


class Described(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: "torch.dtype"
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_file_order(described: Mapping[str, Described]) -> dict[str, Described]:
    """Sort tensors by the width of their dtypes, so that each is aligned.

    Args:
        described: Dtype and shape of each tensor by name.

    Returns:
        The entries, those of the widest dtypes first.

    Raises:
        ValueError: If safetensors does not have a dtype, or cannot store a name.
    """
    for name, (dtype, _) in described.items():
        if _NO_NAMES.fullmatch(name):
            text = f"{name!r} cannot be the name of a tensor in a safetensors file"
            raise ValueError(shown(text))
        if str(dtype) not in _NAMES:
            raise ValueError(shown(f"{name} is {dtype}, which safetensors does not support"))
    return dict(sorted(described.items(), key=lambda item: -item[1].dtype.itemsize))


def save_safetensors(
    tensors: Mapping[str, "torch.Tensor"],
    path: Path,
    versions: Mapping[Any, Any] = MappingProxyType({}),
) -> None:
    """Write tensors in host memory atomically; tied tensors are written under each name.

    Args:
        tensors: The tensors by name.
        path: The file; its folder must exist.
        versions: The versions of modules, as in the ``_metadata`` of a state dict.

    Raises:
        ValueError: If safetensors does not have the dtype of a tensor, or cannot store its name.
        OSError: If the file cannot be written.
    """
    ordered = in_file_order({n: Described(t.dtype, t.shape) for n, t in tensors.items()})
    with atomic_write(path) as unfinished:
        in_order = ((name, tensors[name]) for name in ordered)
        write_safetensors(unfinished, ordered, in_order, versions_as_metadata(versions))


def write_safetensors(
    path: Path,
    described: Mapping[str, Described],
    tensors: Iterable[tuple[str, "torch.Tensor"]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write tensors in host memory, one at a time.

    Args:
        path: The file; for an atomic write, a temporary one.
        described: Dtype and shape of each tensor, in the order of :func:`in_file_order`.
        tensors: Names and tensors in the same order; each is needed only until the next one.
        metadata: Further strings for the header.
    """
    # transformers refuses a file that does not name its library.
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    end = 0
    for name, described_tensor in described.items():
        begin = end
        end += described_tensor.nbytes
        header[name] = {
            "dtype": _NAMES[str(described_tensor.dtype)],
            "shape": list(described_tensor.shape),
            "data_offsets": [begin, end],
        }

    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)

    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, tensor in tensors:
            # A lazy view, such as tensor.conj(), has the bits of the tensor that it is a view of.
            plain = tensor.resolve_conj().resolve_neg().contiguous()
            if plain.nbytes:
                file.write((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
