"""Checkpoints that are whole and sound, or an error: for loops that save by themselves."""

import os
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from modkit.files.atomic_write import atomic_write
from modkit.files.zip_check import Archive


__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint as ``torch.save`` does, so that the file is there whole or not at all.

    It is written to another name in the same folder, brought to the disk, and renamed. A process that
    is killed, or a disk that is full, leaves the file that was there before. It has checksums,
    whatever ``torch.serialization.set_crc32_options`` says.

    Args:
        checkpoint: State dicts, numbers and text under names of your choice.
        path: Where it goes; the folder must exist.

    Raises:
        OSError, RuntimeError: It could not be written.

    Example:
        >>> import pathlib, tempfile
        >>> from modkit import EMA, load_checkpoint, nn, save_checkpoint
        >>> model = nn.Linear(2, 1)
        >>> ema = EMA(model)
        >>> path = pathlib.Path(tempfile.mkdtemp(), "last.pt")
        >>> save_checkpoint({"model": model.state_dict(), "ema": ema.state_dict()}, path)
        >>> sorted(load_checkpoint(path))
        ['ema', 'model']
    """
    with atomic_write(Path(path)) as unfinished, checksums():
        torch.save(checkpoint, unfinished)


def load_checkpoint(
    path: str | os.PathLike[str], map_location: str | torch.device | None = None
) -> Any:
    """Read a file of ``torch.save`` after all its checksums have been verified, with nothing run.

    ``torch.load`` looks at no checksum: a bit that has changed becomes another weight in silence.

    Args:
        path: The file.
        map_location: Where the tensors go; by default where they were when they were saved.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, it was written without checksums, or it is no file that
            ``torch.load`` reads with ``weights_only=True``.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no checkpoint {file}")
    try:
        verify(file)
        return torch.load(file, map_location=map_location, weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} cannot be read as a checkpoint: {error}") from error


@contextmanager
def checksums() -> Generator[None]:
    """Have checksums written for the length of a block, whatever is set for other files."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def verify(path: Path, *, required: bool = True) -> None:
    """Raise if a checksum in a file of torch is wrong; loading it does not look at them.

    Args:
        path: The file.
        required: Whether to refuse what is no zip file, and files without checksums. Whoever else
            writes files may have reasons for either.

    Raises:
        FileError: It is damaged. Where that is the content of a member, the message names it.
        ValueError: It has no checksums.
    """
    if not required and not _is_zip(path):
        return
    with path.open("rb") as file:
        archive = Archive(file, "it")
        archive.check_unambiguous()
        # torch.serialization.set_crc32_options(False) writes zeros in place of all checksums.
        if any(member.CRC for member in archive.members.values()):
            archive.verify()
        elif required:
            raise ValueError("it was written without checksums; torch.load reads it unverified")


def _is_zip(path: Path) -> bool:
    """Tell whether a file is a zip file or has been one, as those that were cut off."""
    with path.open("rb") as file:
        start = file.read(2)
    return start in {b"", b"PK"} or zipfile.is_zipfile(path)
