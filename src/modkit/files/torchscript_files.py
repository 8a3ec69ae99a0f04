"""TorchScript archives: verified before torch, which executes code from them, reads them."""

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
# Versions of archives that a package can have.
_OLDEST, _NEWEST = 3, 100
_SHAPES: Final = "traced_inputs.pkl"
_LINES: Final = ".debug_pkl"
_READER: Final = re.compile("PytorchStreamReader|inline_container")


class Parts(NamedTuple):
    """Verified content: a ``torch.package`` without tensors, storages by key, and what reads other members."""

    package: io.BytesIO
    storages: dict[str, torch.UntypedStorage]
    read: Callable[[str], bytes]


class VerifiedArchive(NamedTuple):
    """The path or bytes for torch's reader, and name and size in bytes of each extra file.

    A flatbuffer does not list its extra files: None. ``parts`` are there if torch need not read the source.
    """

    source: str | bytes
    extra_files: dict[str, int] | None
    parts: Parts | None = None


@contextmanager
def verified_archive(
    f: Any, sha256: str | None = None, *, in_parts: bool = False
) -> Generator[VerifiedArchive]:
    """Verify a TorchScript archive, in parts if possible, and hold it open for the block that loads it."""
    with ExitStack() as stack:
        content: int | bytes
        if isinstance(f, (str, os.PathLike)):
            what = os.fsdecode(f)
            # The messages of torch.jit.load.
            if not Path(what).exists():
                raise ValueError(f"The provided filename {what} does not exist")
            if Path(what).is_dir():
                raise ValueError(f"The provided filename {what} is a directory")
            content = stack.enter_context(open_regular(what))
            source: str | bytes = path_of(content, what)
        else:
            what = f"the file {getattr(f, 'name', '')}".rstrip()
            content = source = content_of(f)
        kinds.check_digest(content, what, sha256)
        if kinds.kind_of(content) == kinds.FLATBUFFER:
            # It has no checksums. From a path, torch maps it into memory that is read-only: writing to
            # a weight, or to the statistics of a batch normalization, ends the process.
            if isinstance(source, str):
                source = Path(source).read_bytes()
            yield VerifiedArchive(source, None)
            return
        archive = archive_of(content, what, kinds.TORCHSCRIPT)
        known = {*archive.members, "version" if ".data/version" in archive.members else ""}
        if absent := [name for name in (*_PICKLES, "version") if name not in known]:
            raise archive.corrupt(f"it has no {', '.join(absent)}")
        _check_pickles(archive)
        parts = _parts(archive) if in_parts else None
        if parts is None:
            archive.verify()
        extra = {n[6:]: m.size for n, m in archive.members.items() if n.startswith("extra/")}
        try:
            yield VerifiedArchive(source, extra, parts)
        except (RuntimeError, IndexError) as error:
            # An IndexError comes from torch's reader of pickles.
            if isinstance(error, RuntimeError) and not _READER.search(str(error)):
                raise
            reason = str(error).partition("\n")[0]
            raise archive.corrupt(f"torch cannot read it: {reason}") from error


def _check_pickles(archive: Archive) -> None:
    """Check all pickles that jit.load reads: also inputs of a trace, and line numbers for errors."""
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
    rest = members.keys() - tensors.keys()
    version = archive.text("version" if "version" in members else ".data/version")
    order = archive.text("byteorder") if "byteorder" in members else sys.byteorder.encode()
    # A package has one folder for all storages, and the members that torch has written since 1.4.
    if (
        len({*tensors.values()}) < len(tensors)
        or not _OLDEST <= int(version) < _NEWEST
        or order != sys.byteorder.encode()
        or any(members[name].size > MOST_TEXT for name in rest)
    ):
        return None

    package = io.BytesIO()
    writer = package_writer(package)
    writer.set_min_version(int(version))
    for name in rest:
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
