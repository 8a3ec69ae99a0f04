"""TorchScript archives: verified before torch, which executes code from them, reads them.

The file stays open in between, so torch reads it even if another one has replaced it meanwhile.
"""

import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from modkit.errors import shown
from modkit.files import kinds
from modkit.files.inert import read_script_pickle
from modkit.files.kinds import archive_of
from modkit.files.operating_system import path_of
from modkit.files.zip_archive import Archive, content_of, open_regular


# The pickles that jit.load reads, with the folders of their tensors.
_PICKLES: Final = {"data.pkl": "data/", "constants.pkl": "constants/"}
_EXTRA: Final = "extra/"
_SHAPES: Final = "traced_inputs.pkl"
_LINES: Final = ".debug_pkl"
# The errors of torch's reader of zip files name one of these.
_READER: Final = re.compile("PytorchStreamReader|inline_container")


class VerifiedArchive(NamedTuple):
    """An archive that torch may load.

    Attributes:
        source: The path or the bytes for torch's reader.
        extra_files: The size in bytes of each extra file; None for a flatbuffer, which does not
            list them.
    """

    source: str | bytes
    extra_files: dict[str, int] | None


@contextmanager
def verified_archive(f: Any, sha256: str | None = None) -> Generator[VerifiedArchive]:
    """Verify a TorchScript archive, and hold it open for the block that loads it.

    Args:
        f: A path, or a file that is open for reading.
        sha256: The expected digest of the file.

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
        if sha256 is not None:
            kinds.compare_digests(what, kinds.parse_digest(sha256), kinds.sha256_of(source))

        if kinds.kind_of(source) == kinds.FLATBUFFER:
            # It has no checksums. From a path, torch maps it into memory that is read-only: writing
            # to a weight, or to the statistics of a batch normalization, ends the process.
            if isinstance(for_torch, str):
                for_torch = Path(for_torch).read_bytes()
            yield VerifiedArchive(for_torch, None)
            return

        archive = archive_of(source, what, kinds.TORCHSCRIPT)
        required = (*_PICKLES, "version")
        absent = [n for n in required if archive.members.keys().isdisjoint((n, f".data/{n}"))]
        if absent:
            raise archive.corrupt(f"it has no {', '.join(absent)}")
        _check_pickles(archive)
        archive.verify()

        extra_files = {
            name.removeprefix(_EXTRA): member.file_size
            for name, member in archive.members.items()
            if name.startswith(_EXTRA)
        }
        try:
            yield VerifiedArchive(for_torch, extra_files)
        except (RuntimeError, IndexError) as error:
            # An IndexError comes from torch's reader of pickles.
            if isinstance(error, RuntimeError) and not _READER.search(str(error)):
                if str(error).replace("\n", "").isprintable():
                    raise
                raise RuntimeError(shown(str(error))) from error
            reason = str(error).partition("\n")[0]
            raise archive.corrupt(f"torch cannot read it: {reason}") from error


def _check_pickles(archive: Archive) -> None:
    """Check all pickles that jit.load reads, those of traces and of line numbers included."""
    for name in archive.members:
        if name not in _PICKLES and name != _SHAPES and not name.endswith(_LINES):
            continue
        pickled = archive.text(name)
        try:
            content = read_script_pickle(pickled)
        # The instructions do not fit together, or exceed a limit.
        except Exception as error:
            raise archive.corrupt(f"{name}: {error}") from error
        # Tensors of the inputs are written without their content.
        if name in _PICKLES:
            stored = content.storages.values()
            # A script has no values of tensors on the meta device, and reads none for them.
            archive.check_storages(
                {one.key: one for one in stored if one.location != "meta"}, _PICKLES[name]
            )
