"""Safetensors files: read and written by the library, or written tensor by tensor where memory is short."""

import ctypes
import importlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from modkit.errors import FileError
from modkit.files.atomic_write import atomic_write
from modkit.files.zip_archive import open_regular


# What the format safetensors calls the dtypes of torch.
DTYPES: Final[dict[str, str]] = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "C64": "complex64",
}
# By what torch calls it, if this version of torch has it.
_NAMES: Final[dict[Any, str]] = {getattr(torch, own, None): name for name, own in DTYPES.items()}
_ALIGNMENT: Final = 8


def library(name: str) -> Any:
    """Import a part of safetensors, which modkit does not depend on."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("files in the format safetensors need the package safetensors") from error


def safetensors_file(path: str | os.PathLike[str]) -> Any:
    """Return what ``safetensors.safe_open`` returns: names, shapes, and tensors one at a time.

    Raises:
        FileNotFoundError: If there is no such file.
        FileError: If the file is corrupt or has another format.
        ImportError: If safetensors is not installed.
    """
    package = library("safetensors")
    with open_regular(path):
        pass
    try:
        return package.safe_open(path, framework="pt")
    except package.SafetensorError as error:
        raise FileError(f"{os.fspath(path)} is corrupt: {error}", "safetensors file") from error


def save_safetensors(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors atomically; without ``metadata`` in the form that transformers asks for."""
    save = library("safetensors.torch").save_file
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as unfinished:
        save(plain, unfinished, metadata=dict(metadata or {"format": "pt"}))


@dataclass(frozen=True)
class Described:
    """What a file says of a tensor before the first one is written."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.shape.numel() * self.dtype.itemsize


def in_file_order(described: Mapping[str, Described]) -> dict[str, Described]:
    """Return the same, wide numbers first: so each begins where its numbers may begin.

    Raises:
        ValueError: The format has no such dtype.
    """
    for name, one in described.items():
        if one.dtype not in _NAMES:
            raise ValueError(f"{name} is {one.dtype}, for which safetensors has no name")
    return dict(sorted(described.items(), key=lambda item: -item[1].dtype.itemsize))


def write_safetensors(
    path: Path, described: Mapping[str, Described], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write tensors as they come, one in memory at a time.

    Args:
        path: The file.
        described: What is going to come, in this order.
        tensors: The tensors by name, in host memory.
    """
    # transformers refuses a file that does not say for which library it is.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, one in described.items():
        begin, end = end, end + one.nbytes
        header[name] = {
            "dtype": _NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for _, tensor in tensors:
            plain = tensor.contiguous()
            if plain.nbytes:
                file.write((ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()))
