"""Files of ``torch.save``: mapped into memory, with nothing run, and held against their checksums."""

import argparse
import ctypes
import pickle
import zipfile
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modkit.files.zip_check import Archive


class Checksums:
    """The checksums that a file of torch has of its storages.

    Args:
        path: The file. All in it that is no tensor is read and checked at once, as torch does not.

    Raises:
        FileError: One of these parts is damaged, or the table of all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            archive = Archive(file, "it")
            archive.check_unambiguous()
            members = archive.members
            # torch.serialization.set_crc32_options(False) writes zeros in place of all checksums.
            self.present = any(member.CRC for member in members.values())
            if self.present:
                archive.verify(*(name for name in members if not name.startswith("data/")))
        self._known = {(member.file_size, member.CRC) for member in members.values()}
        self._sound: set[int] = set()

    def check(self, name: str, tensor: Tensor) -> None:
        """Hold the storage of a tensor against the checksums, the first time that it is met.

        It must have one of those in the file. That names no record, and so needs no knowledge of which
        record torch has taken the storage from.

        Raises:
            ValueError: Its bytes are not those that were written.
        """
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage.data_ptr()
        if not self.present or not size or address in self._sound:
            return
        if (size, zlib.crc32((ctypes.c_char * size).from_address(address))) not in self._known:
            raise ValueError(f"{self._path}: {name} is damaged: it does not fit its checksum")
        self._sound.add(address)


def load_plain(path: Path) -> Any:
    """Return what a file of torch holds, without its checksums."""
    return load_checked(path)[0]


def load_checked(path: Path) -> tuple[Any, Checksums]:
    """Return what a file of torch holds, and what its tensors are to be held against.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read, what it says about its tensors is damaged, or it names classes
            whose code would have to run.
    """
    try:
        checksums = Checksums(path) if zipfile.is_zipfile(path) else None
        with _plain_classes():
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {_why(path, error)}") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from error
    # Torch maps nothing but zip files.
    assert checksums is not None
    return content, checksums


def _plain_classes() -> Any:
    """Allow the class in which training scripts, those of timm for instance, keep their options."""
    # Leaving the block would take away what the user has allowed.
    if argparse.Namespace in torch.serialization.get_safe_globals():
        return nullcontext()
    return torch.serialization.safe_globals([argparse.Namespace])


def _why(path: Path, error: Exception) -> str:
    """Name the classes that torch refuses, in place of its advice to run them."""
    unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    names = ", ".join(sorted(unsafe - {"argparse.Namespace"}))
    if not names:
        return str(error)
    return f"it needs {names}, whose code would have to run. Nothing has been run"


def compact(tensor: Tensor) -> Tensor:
    """Return a tensor that has its storage to itself: a file would hold all of a shared one."""
    tensor = tensor.contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone()


def narrowed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor on the CPU, in a narrower dtype if its values survive that."""
    own = tensor.detach().cpu()
    if dtype is None or not own.is_floating_point() or dtype.itemsize >= own.dtype.itemsize:
        return compact(own)
    narrower = own.to(dtype)
    lost = torch.linalg.vector_norm(narrower.to(own.dtype) - own, dtype=torch.float64)
    allowed = torch.finfo(dtype).eps / 2 * torch.linalg.vector_norm(own, dtype=torch.float64)
    # An overflow makes the left side infinite, and a NaN the comparison false.
    return compact(narrower if bool(lost <= allowed) else own)
