"""A list of the members in the archive itself, and further files that are put into it afterwards.

Checksums tell that a member is what was written, not that it stands under the name it was written
under: weights of the same size that have changed places, or come from another archive, pass. The list
tells.

It stands beside the other members and not among the extra files, so that nobody takes it along into an
archive of other members. Torch and C++ pass over it.
"""

import io
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any, Final

from modkit.errors import FileError
from modkit.files.zip_check import Archive


EXTRA: Final = "extra/"
SEAL: Final = "modkit.members.json"
_VERSION: Final = 1
# The same time in every archive, so that saving twice gives the same bytes.
_TIME: Final = (1980, 1, 1, 0, 0, 0)


def check_seal(archive: Archive, checksums: Mapping[str, int]) -> None:
    """Compare the members with those that were saved, if the archive says which those are.

    Members that are not in the list may be there: files can be added to an archive.

    Raises:
        FileError: A member is another one than was saved under its name, or is missing.
    """
    if SEAL not in archive.members:
        return
    try:
        found = json.loads(archive.text(SEAL))
        members: dict[str, Any] = {} if found["version"] != _VERSION else dict(found["members"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(f"{archive.what} is damaged: {SEAL}: {error!r}") from error
    sizes = archive.sizes
    for member, (size, checksum) in members.items():
        if member not in checksums:
            raise FileError(f"{archive.what} is damaged: {member} is missing")
        # A checksum of 0 stands for one that torch has not computed.
        if sizes[member] != size or checksum not in {0, checksums[member]}:
            raise FileError(
                f"{archive.what} is damaged: {member} is not what was saved under that name"
            )


def add_files(path: str | os.PathLike[str], files: Mapping[str, str | bytes]) -> None:
    """Put extra files into an archive on disk that nobody else reads yet.

    Raises:
        ValueError: The archive has a file of that name.
    """
    with open(path, "rb+") as file:  # noqa: PTH123 - a path may be text
        _add(file, repr(os.fspath(path)), {f"{EXTRA}{name}": files[name] for name in files})


def _add(file: Any, what: str, members: Mapping[str, str | bytes]) -> None:
    archive = Archive(file, what)
    for name in members:
        if name in archive.members:
            kind = "an extra file" if name.startswith(EXTRA) else "a member"
            raise ValueError(f"{what} has {kind} {name.removeprefix(EXTRA)!r} already")
    file.seek(0)
    with zipfile.ZipFile(file, "a") as target:
        for name, content in members.items():
            member = zipfile.ZipInfo(f"{archive.folder}{name}", _TIME)
            target.writestr(member, content)


def seal(path: str | os.PathLike[str]) -> None:
    """Write a list of its members into an archive on disk that nobody else reads yet.

    Their checksums are those that the archive already has, so that this takes no time to speak of.

    Raises:
        ValueError: The archive has such a list.
    """
    with open(path, "rb+") as file:  # noqa: PTH123 - a path may be text
        what = repr(os.fspath(path))
        _add(file, what, {SEAL: _list_of(Archive(file, what))})


def sealed(data: bytes) -> bytes:
    """Return the content of an archive with a list of its members in it; see :func:`seal`."""
    file = io.BytesIO(data)
    _add(file, "the data", {SEAL: _list_of(Archive(file, "the data"))})
    return file.getvalue()


def _list_of(archive: Archive) -> str:
    members = {name: [info.file_size, info.CRC] for name, info in archive.members.items()}
    return json.dumps({"version": _VERSION, "members": members})
