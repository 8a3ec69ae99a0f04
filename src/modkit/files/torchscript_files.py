"""TorchScript archives: verified before torch loads anything of them."""

import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from modkit.files.kinds import TORCHSCRIPT, check_digest, kind_of, parse_digest, wrong_kind
from modkit.files.pickle_limits import pickle_problem
from modkit.files.zip_archive import Archive, open_regular, path_of


_EXTRA: Final = "extra/"
_PICKLES: Final = ("data.pkl", "constants.pkl")
_READER: Final = re.compile("PytorchStreamReader|inline_container")


@dataclass(frozen=True)
class VerifiedArchive:
    """What torch may load.

    Attributes:
        source: The path or the bytes to give to torch's reader.
        extra_files: Name and size in bytes of each extra file.
    """

    source: str | bytes
    extra_files: dict[str, int]


@contextmanager
def verified_archive(f: Any, sha256: str | None = None) -> Generator[VerifiedArchive]:
    """Verify a TorchScript archive, and hold the file open for the block that loads it.

    Args:
        f: A path, or a file that is open for reading.
        sha256: Expected digest of the file, 64 hexadecimal digits, after ``sha256:`` or alone.

    Raises:
        ValueError: If there is no such file, or ``sha256`` is not a digest.
        FileError: If the file is corrupt, not a TorchScript archive, or has another digest.
    """
    if sha256 is not None:
        parse_digest(sha256)
    with ExitStack() as stack:
        content: int | bytes
        if isinstance(f, (str, os.PathLike)):
            what = os.fsdecode(f)
            _check_path(what)
            content = stack.enter_context(open_regular(what))
            source: str | bytes = path_of(content, what)
        else:
            what = f"the file {getattr(f, 'name', '')}".rstrip()
            content = source = _content_of(f)
        if sha256 is not None:
            check_digest(content, what, sha256)
        if kind_of(content) != TORCHSCRIPT:
            raise wrong_kind(content, what, "a TorchScript archive")
        archive = Archive(content, what)
        _check_pickles(archive)
        archive.verify()
        extra = {n: m.size for n, m in archive.members.items() if n.startswith(_EXTRA)}
        try:
            yield VerifiedArchive(source, {n.removeprefix(_EXTRA): extra[n] for n in extra})
        except (RuntimeError, IndexError) as error:
            # Texts of torch's reader of zip files have one of these names in them. An index that is out of
            # range comes from its reader of pickles.
            if isinstance(error, RuntimeError) and not _READER.search(str(error)):
                raise
            raise archive.corrupt(
                f"torch cannot read it: {str(error).partition(chr(10))[0]}"
            ) from error


def _check_path(path: str) -> None:
    # The texts are those of torch.jit.load, and show the path as it was given.
    if not Path(path).exists():
        raise ValueError(f"The provided filename {path} does not exist")
    if Path(path).is_dir():
        raise ValueError(f"The provided filename {path} is a directory")


def _content_of(f: Any) -> bytes:
    """Read an open file; one that has just been written stands at its end, and is read from the start."""
    content: Any = f.read()
    if not content and hasattr(f, "seekable") and f.seekable() and f.tell():
        f.seek(0)
        content = f.read()
    if not isinstance(content, bytes):
        raise TypeError("the file is open as text; open it in the mode 'rb'")
    return content


def _check_pickles(archive: Archive) -> None:
    missing = [name for name in _PICKLES if name not in archive.members]
    if not {"version", ".data/version"} & archive.members.keys():
        missing.append("version")
    if missing:
        raise archive.corrupt(f"it has no {', '.join(missing)}")
    for name in _PICKLES:
        folder = name.removesuffix(".pkl") + "/"
        content, members = archive.read(name), archive.members
        if problem := pickle_problem(content, members, folder, script=True):
            raise archive.corrupt(f"{name}: {problem}")
