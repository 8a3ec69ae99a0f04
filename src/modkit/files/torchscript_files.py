"""TorchScript archives: verified before torch, which executes code from them, reads them."""

import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from modkit.files import kinds
from modkit.files.kinds import archive_of
from modkit.files.operating_system import path_of
from modkit.files.pickle_limits import pickle_problem
from modkit.files.zip_archive import Archive, content_of, open_regular


# The pickles that jit.load reads, with the folders of their tensors.
_PICKLES: Final = {"data.pkl": "data/", "constants.pkl": "constants/"}
_SHAPES: Final = "traced_inputs.pkl"
_LINES: Final = ".debug_pkl"
_READER: Final = re.compile("PytorchStreamReader|inline_container")


class VerifiedArchive(NamedTuple):
    """The path or bytes for torch's reader, and name and size in bytes of each extra file.

    A flatbuffer does not list its extra files: None.
    """

    source: str | bytes
    extra_files: dict[str, int] | None


@contextmanager
def verified_archive(f: Any, sha256: str | None = None) -> Generator[VerifiedArchive]:
    """Verify a TorchScript archive, and hold the file open for the block that loads it."""
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
        archive.verify()
        extra = {n[6:]: m.size for n, m in archive.members.items() if n.startswith("extra/")}
        try:
            yield VerifiedArchive(source, extra)
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
            if problem := pickle_problem(archive.read(name), stored, folder, script=True):
                raise archive.corrupt(f"{name}: {problem}")
