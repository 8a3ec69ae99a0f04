"""TorchScript archives: verified before torch, which executes code from them, reads them.

An archive is read once, if possible: tensors into their memory, and the code and the pickles,
verified, into a ``torch.package`` in memory, from which torch loads them. So nothing that torch
executes comes from the file itself, which may change meanwhile. Other archives are verified, and
then read by torch.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from modkit._upstream import package_writer
from modkit.files import kinds
from modkit.files.kinds import archive_of
from modkit.files.operating_system import path_of
from modkit.files.pickle_limits import pickle_problem
from modkit.files.storages import Storages
from modkit.files.zip_archive import MOST_TEXT, Archive, content_of, open_regular


# The pickles that jit.load reads, with the folders of their tensors.
_PICKLES: Final = {"data.pkl": "data/", "constants.pkl": "constants/"}
_FOLDERS: Final = ("data/", "constants/")
_EXTRA: Final = "extra/"
# Versions of archives that a package can have.
_OLDEST, _NEWEST = 3, 100
_SHAPES: Final = "traced_inputs.pkl"
_LINES: Final = ".debug_pkl"
# The errors of torch's reader of zip files name one of these.
_READER: Final = re.compile("PytorchStreamReader|inline_container")


class Parts(NamedTuple):
    """The verified content of an archive, in memory.

    Attributes:
        package: A ``torch.package`` with the code and the pickles, without tensors.
        storages: Those of the tensors, by key.
        read: Returns the content of another member.
    """

    package: io.BytesIO
    storages: dict[str, torch.UntypedStorage]
    read: Callable[[str], bytes]


class VerifiedArchive(NamedTuple):
    """An archive that torch may load.

    Attributes:
        source: The path or the bytes for torch's reader.
        extra_files: The size in bytes of each extra file; None for a flatbuffer, which does not
            list them.
        parts: The content, if torch need not read ``source``.
    """

    source: str | bytes
    extra_files: dict[str, int] | None
    parts: Parts | None = None


@contextmanager
def verified_archive(
    f: Any, sha256: str | None = None, *, in_parts: bool = False
) -> Generator[VerifiedArchive]:
    """Verify a TorchScript archive, and hold it open for the block that loads it.

    Args:
        f: A path, or a file that is open for reading.
        sha256: The expected digest of the file.
        in_parts: Read the archive once, into memory, where torch can load it from there.

    Yields:
        The archive, for the reader of torch.

    Raises:
        ValueError: If the file does not exist, is a directory, or ``sha256`` is not a digest.
        FileError: If the file is corrupt, of another kind, or has another digest. Errors of torch's
            reader inside the block become one, too.
        RuntimeError: Any other RuntimeError of the block.
    """  # noqa: DOC501 - an IndexError becomes a FileError
    with ExitStack() as stack:
        source: int | bytes
        if isinstance(f, (str, os.PathLike)):
            what = os.fsdecode(f)
            # The messages of torch.jit.load.
            if not Path(what).exists():
                raise ValueError(f"The provided filename {what} does not exist")
            if Path(what).is_dir():
                raise ValueError(f"The provided filename {what} is a directory")
            source = stack.enter_context(open_regular(what))
            for_torch: str | bytes = path_of(source, what)
        else:
            what = f"the file {getattr(f, 'name', '')}".rstrip()
            source = for_torch = content_of(f)
        kinds.check_digest(source, what, sha256)

        if kinds.kind_of(source) == kinds.FLATBUFFER:
            # It has no checksums. From a path, torch maps it into memory that is read-only: writing
            # to a weight, or to the statistics of a batch normalization, ends the process.
            if isinstance(for_torch, str):
                for_torch = Path(for_torch).read_bytes()
            yield VerifiedArchive(for_torch, None)
            return

        archive = archive_of(source, what, kinds.TORCHSCRIPT)
        _check_members(archive)
        parts = _parts(archive) if in_parts else None
        archive.verify()

        extra_files = {
            name.removeprefix(_EXTRA): member.size
            for name, member in archive.members.items()
            if name.startswith(_EXTRA)
        }
        try:
            yield VerifiedArchive(for_torch, extra_files, parts)
        except (RuntimeError, IndexError) as error:
            # An IndexError comes from torch's reader of pickles.
            if isinstance(error, RuntimeError) and not _READER.search(str(error)):
                raise
            reason = str(error).partition("\n")[0]
            raise archive.corrupt(f"torch cannot read it: {reason}") from error


def _check_members(archive: Archive) -> None:
    """Raise FileError if members are missing, or a pickle exceeds the limits."""
    has_version = not {"version", ".data/version"}.isdisjoint(archive.members)
    absent = [name for name in _PICKLES if name not in archive.members]
    if not has_version:
        absent.append("version")
    if absent:
        raise archive.corrupt(f"it has no {', '.join(absent)}")
    _check_pickles(archive)


def _check_pickles(archive: Archive) -> None:
    """Check all pickles that jit.load reads, those of traces and of line numbers included."""
    for name in archive.members:
        if name in _PICKLES or name == _SHAPES or name.endswith(_LINES):
            # Tensors of the inputs are written without their content.
            stored = archive.members if name in _PICKLES else {}
            folder = _PICKLES.get(name, "")
            if problem := pickle_problem(archive.text(name), stored, folder, script=True):
                raise archive.corrupt(f"{name}: {problem}")


def _parts(archive: Archive) -> Parts | None:
    """Read an archive once, and verify it; None if only torch's own reader can load it."""
    members = archive.members
    tensors = {name: name.partition("/")[2] for name in members if name.startswith(_FOLDERS)}
    texts = members.keys() - tensors.keys()
    version = archive.text("version" if "version" in members else ".data/version")
    order = archive.text("byteorder") if "byteorder" in members else sys.byteorder.encode()
    # A package has one folder for all storages, and the members that torch has written since 1.4.
    # The storage of a tensor on the meta device is empty, which a package cannot have.
    if (
        len({*tensors.values()}) < len(tensors)
        or not _OLDEST <= int(version) < _NEWEST
        or order != sys.byteorder.encode()
        or any(members[name].size > MOST_TEXT for name in texts)
        or not all(members[name].size for name in tensors)
    ):
        return None

    package = io.BytesIO()
    writer = package_writer(package)
    writer.set_min_version(int(version))
    for name in texts:
        content = archive.text(name)
        if name in _PICKLES:
            writer.write_record(f".data/ts_code/0/{name}", content, len(content))
        elif name.startswith("code/"):
            writer.write_record(f".data/ts_code/{name}", content, len(content))
    writer.write_end_of_file()
    package.seek(0)

    with Storages(archive, "cpu", None) as storages:
        by_key = {key: storages.allocate(name, "cpu") for name, key in tensors.items()}
        archive.read_all(storages.unread)
    return Parts(package, by_key, archive.text)
