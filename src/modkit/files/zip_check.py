"""The members of an archive: listed, read and verified without torch.

Torch's own reader is built without the check of checksums, so a flipped bit in the weights loads
without a complaint: https://github.com/pytorch/pytorch/issues/126952.
"""

import copy
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Final, TypeAlias, cast

from modkit.errors import FileError


Source: TypeAlias = str | bytes | os.PathLike[str] | IO[bytes]

_CHUNK: Final = 1 << 20
# Code and pickles are read whole. A member that claims more than this is not read.
MOST_TEXT: Final = 128 << 20
_END: Final = struct.Struct("<4s4H2LH")
_END_64: Final = 20 + 56  # bytes of the two records that large archives have before the last one
_UNKNOWN: Final = 0xFFFFFFFF
_MANY: Final = 0xFFFF
_FOLDER: Final = 0x10  # the attribute that MS-DOS has for it


@contextmanager
def opened(source: Source) -> Generator[tuple[IO[bytes], str]]:
    """Give a file of the whole source, and what it is called in errors.

    An open file is read from where it stands, as loading does, and stands there again afterwards. One
    that has just been written stands at its end; then it is read from the start.

    Raises:
        ValueError: There is no such file, or it is a folder; the texts are those of ``torch.jit.load``.
        TypeError: ``source`` is no path, no bytes and no file that is open for reading.
    """
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        if not os.path.exists(path):  # noqa: PTH110 - the texts show the path as it was given
            raise ValueError(f"The provided filename {source} does not exist")
        if os.path.isdir(path):  # noqa: PTH112
            raise ValueError(f"The provided filename {source} is a directory")
        with open(path, "rb") as file:  # noqa: PTH123
            yield file, repr(path)
    elif isinstance(source, bytes):
        yield io.BytesIO(source), "the data"
    elif hasattr(source, "read") and hasattr(source, "seek"):
        place = source.tell()
        data = source.read()
        if not isinstance(cast("object", data), bytes):
            raise TypeError("the file is open as text; open it in the mode 'rb'")
        if not data and place:
            source.seek(0)
            data = source.read()
            place = 0
        source.seek(place)
        yield io.BytesIO(data), f"the file {getattr(source, 'name', '')!r}".replace(" ''", "")
    else:
        raise TypeError(
            f"an archive is a path, bytes or a file that is open for reading and can seek, not a "
            f"{type(source).__name__}"
        )


class Archive:
    """The members of a zip file as torch reads it: all of them are in one folder.

    Args:
        file: The file.
        what: How it is called in errors.

    Raises:
        FileError: It is no zip file, or readers may disagree about what is in it.
    """

    def __init__(self, file: IO[bytes], what: str) -> None:
        self.what, self._file = what, file
        try:
            self._zip = zipfile.ZipFile(file)
        except (
            zipfile.BadZipFile,
            OSError,
            ValueError,
            NotImplementedError,
            struct.error,
        ) as error:
            raise FileError(f"{what} is a damaged zip file: {error}", "damaged zip file") from error
        listed = self._zip.infolist()
        self.folder = listed[0].filename.partition("/")[0] + "/" if listed else ""
        inside = [info for info in listed if info.filename.startswith(self.folder)]
        self.members: dict[str, zipfile.ZipInfo] = {
            info.filename.removeprefix(self.folder): info for info in inside
        }
        self._names = [info.filename for info in listed]
        # Torch reads nothing of what is marked as a folder, and leaves memory as it was.
        self._folders = [i.filename for i in listed if i.is_dir() or i.external_attr & _FOLDER]

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the members in bytes."""
        return {name: info.file_size for name, info in self.members.items()}

    def check_unambiguous(self) -> None:
        """Refuse a file that torch may read as another one than this class does.

        Raises:
            FileError: Two members have the same name, one is in another folder than the others or
                marked as a folder itself, there is something before or after the zip, or its table has lost members.
        """
        # Torch looks members up without regard to case.
        if len({name.lower() for name in self._names}) < len(self._names):
            raise FileError(
                f"{self.what} is damaged: two members have the same name", "damaged zip file"
            )
        outside = [name for name in self._names if not name.startswith(self.folder)]
        if outside:
            raise FileError(
                f"{self.what} is damaged: {outside[0]!r} is not in the folder {self.folder!r} as the "
                "other members are",
                "damaged zip file",
            )
        if self._folders:
            raise FileError(
                f"{self.what} is damaged: {self._folders[0]!r} is marked as a folder",
                "damaged zip file",
            )
        if not self._is_plain():
            raise FileError(
                f"{self.what} is damaged: its table of members does not fill the end of the file, or "
                "has another length than it should",
                "damaged zip file",
            )

    def _is_plain(self) -> bool:
        """Tell whether the file begins and ends with the zip, and its table is as long as it says."""
        length = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, length - _END.size - _END_64))
        tail = self._file.read()
        if len(tail) < _END.size:
            return False
        magic, _, _, _, count, size, start, comment = _END.unpack(tail[-_END.size :])
        room = length - _END.size - size - start
        if _UNKNOWN in {size, start} or count == _MANY:
            # The true numbers are in the record for large files.
            if len(tail) < _END.size + _END_64:
                return False
            count, size, start = struct.unpack("<3Q", tail[32:56])
            room = length - _END.size - size - start
        fits = room in {0, _END_64} and count == len(self._names)
        return bool(magic == b"PK\x05\x06" and not comment and fits)

    def chunks(self, name: str) -> Generator[bytes]:
        """Yield the content of a member, unpacked; its checksum is not looked at."""
        info = copy.copy(self.members[name])
        info.CRC = cast("Any", None)  # tells zipfile not to check: it takes 0 for a checksum
        left = info.file_size
        try:
            with self._zip.open(info) as member:
                while chunk := member.read(_CHUNK):
                    left -= len(chunk)
                    yield chunk
        except (
            *(zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError),
            *(RuntimeError, ValueError, struct.error),
        ) as error:
            raise FileError(
                f"{self.what} is damaged: {name}: {error}", "damaged zip file"
            ) from error
        if left:
            raise FileError(
                f"{self.what} is damaged: {name} has another size than it should",
                "damaged zip file",
            )

    def read(self, name: str) -> bytes:
        """Return the content of a member of moderate size."""
        size = self.members[name].file_size
        if size > MOST_TEXT:
            raise FileError(f"{self.what}: {name} has {size} bytes, so it is not read")
        return b"".join(self.chunks(name))

    def text(self, name: str) -> str:
        """Return the content of a member as text; what is none is replaced."""
        return self.read(name).decode("utf-8", "replace")

    def verify(self, *names: str) -> dict[str, int]:
        """Compare the content of members, or of all, with their checksums, and return these.

        A checksum of 0 stands for one that has not been computed.

        Raises:
            FileError: A member is not what was written.
        """
        found: dict[str, int] = {}
        for name in names or self.members:
            stated, crc = self.members[name].CRC, 0
            for chunk in self.chunks(name):
                crc = zlib.crc32(chunk, crc)
            if stated not in {0, crc}:
                raise FileError(
                    f"{self.what} is damaged: the content of {name} does not match its checksum",
                    "damaged zip file",
                )
            found[name] = crc
        return found
