"""Zip files as ``torch.save`` and ``torch.jit.save`` write them, verified against their checksums.

torch ignores the checksums: https://github.com/pytorch/pytorch/issues/126952. The table of members
is that of :mod:`zipfile`; this reader accepts only the subset of zip that torch writes: members in
one folder, stored, that do not overlap. A file that gets shorter meanwhile is an error, and never a
signal, because content is read and not mapped. Nothing here needs torch.
"""

import errno
import io
import os
import stat
import struct
import sys
import weakref
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from modkit.errors import FileError
from modkit.files.operating_system import PATH_TYPES, AnyPath, read_at, read_into_at


try:
    # The same values at several times the speed, if the package is installed.
    _zlib: Any = import_module("zlib_ng.zlib_ng")
except ImportError:
    _zlib = zlib
# The checksum of zip files: of bytes, after those of which the checksum is given.
crc32: Final[Callable[..., int]] = _zlib.crc32

# Large members are read and checked in pieces, which stay in the processor's cache in between. In
# smaller ones, calls take more of the time.
_PIECE: Final = 1 << 20
# Pickles and code are read into memory; a member that claims to be larger is refused.
MOST_TEXT: Final = 128 << 20
# Members up to this size are read together with their header, without another thread.
_SMALL: Final = 1 << 16
_THREADS: Final = min(4, os.cpu_count() or 1)

# torch compresses these.
_CODE: Final = (".py", ".debug_pkl", "callstack_debug_map.pkl")
_METHODS: Final = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
_UTF8: Final = 0x800
_ENCRYPTED: Final = 0x1 | 0x20 | 0x40 | 0x2000  # also patched, and with a masked table

# The fields that are used of the records at the end of a file: of the end record the signature,
# the number of members, size and offset of their table, and the length of a comment.
_END: Final = struct.Struct("<4s6xH2LH")
_ZIP64_END: Final = struct.Struct("<4s28x3Q")
_LOCATOR: Final = struct.Struct("<4s4xQ4x")
# The lengths of the name and of the extra field, after which the content of a member begins.
_LOCAL_HEADER: Final = struct.Struct("<4s22x2H")

# The signatures of the records that may follow a member.
_NEXT: Final = (b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02")

CORRUPT_ZIP: Final = "corrupt zip file"
CHAIN: Final = "chain of torch.save files"


@contextmanager
def open_regular(path: AnyPath) -> Generator[int]:
    """Open a regular file for reading, without blocking on a FIFO or a device.

    Args:
        path: File to open.

    Yields:
        The descriptor, open for the block.

    Raises:
        FileError: If it is a FIFO or a device.
        OSError: If it cannot be opened, or is a directory.
    """
    name = os.fsdecode(path)
    # Path("") would be the current folder.
    mode = os.stat(name).st_mode  # noqa: PTH116
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileError(f"{name} is not a regular file", "special file")
    if stat.S_ISDIR(mode):
        text = "Is a directory; `modkit inspect` lists the checkpoint in it, and `modkit convert` "
        raise IsADirectoryError(errno.EISDIR, text + "makes one file of it", name)
    with Path(name).open("rb", buffering=0) as file:
        yield file.fileno()


def open_kept(owner: object, path: Path) -> int:
    """Open a regular file for as long as an object lives, so that it stays the same file."""
    with open_regular(path) as descriptor:
        kept = os.dup(descriptor)
    weakref.finalize(owner, os.close, kept)
    return kept


@contextmanager
def open_source(file: AnyPath | IO[bytes]) -> Generator[tuple[int | bytes, str]]:
    """Yield a descriptor of a path, or the content of an open file, and how errors name it.

    Args:
        file: Path, or a file that is open for reading bytes.

    Yields:
        The descriptor or the content, and the name for errors.

    Raises:
        FileError: If a path is not that of a regular file.
        TypeError: If a file is open as text.
    """
    if isinstance(file, PATH_TYPES):
        with open_regular(file) as descriptor:
            yield descriptor, os.fsdecode(file)
    else:
        yield content_of(file), f"the file {getattr(file, 'name', '')}".rstrip()


def content_of(file: Any) -> bytes:
    """Return the content of an open file from its position on; TypeError if it is open as text.

    At the end of a file, such as one that was just written, it is read from its start.
    """
    content = file.read()
    if not content and hasattr(file, "seekable") and file.seekable() and file.tell():
        file.seek(0)
        content = file.read()
    if not isinstance(content, bytes):
        raise TypeError("the file is open as text; open it in the mode 'rb'")
    return content


def read_some(source: int | bytes, start: int, count: int) -> bytes:
    """Return bytes of a file, given as a descriptor or as its content; fewer at its end."""
    if not isinstance(source, int):
        return source[start : start + count]

    content = read_at(source, count, start)
    # One call returns at most 2 GiB, and fewer bytes after a signal.
    while 0 < len(content) < count:
        rest = read_at(source, count - len(content), start + len(content))
        if not rest:
            break
        content += rest
    return content


def file_of(source: int | bytes) -> IO[bytes]:
    """Return an open file for a descriptor, which stays open after it, or for its content."""
    return os.fdopen(os.dup(source), "rb") if isinstance(source, int) else io.BytesIO(source)


def size_of(source: int | bytes) -> int:
    """Return the size of a file, given as a descriptor or as its content."""
    return os.fstat(source).st_size if isinstance(source, int) else len(source)


def fill(source: int | bytes, memory: memoryview, start: int) -> int:
    """Read into memory from a place of a file; return how many bytes there were."""
    if isinstance(source, int):
        return read_into_at(source, memory, start)
    piece = source[start : start + len(memory)]
    memory[: len(piece)] = piece
    return len(piece)


class _Table(NamedTuple):
    """Where the table of members lies in an archive that ends at a place of a file."""

    members: int
    offset: int
    size: int
    start_of_archive: int


def _find_table(source: int | bytes, end: int) -> _Table | None:
    """Read the records at the end of an archive; None if it is cut off, or has bytes behind it."""
    zip64_size = _ZIP64_END.size + _LOCATOR.size
    tail = read_some(source, max(0, end - zip64_size - _END.size), min(end, zip64_size + _END.size))
    if len(tail) < _END.size:
        return None
    signature, members, size, offset, comment = _END.unpack(tail[-_END.size :])
    # A comment may contain another end record, which another reader would take for the end.
    if signature != b"PK\x05\x06" or comment:
        return None

    end -= _END.size
    if len(tail) > zip64_size and tail[_ZIP64_END.size :].startswith(b"PK\x06\x07"):
        end -= zip64_size
        signature, members, size, offset = _ZIP64_END.unpack_from(tail)
        # A locator that leads to a second table, which a reader that follows it would use.
        is_there = _LOCATOR.unpack_from(tail, _ZIP64_END.size)[1] == offset + size
        if signature != b"PK\x06\x06" or not is_there:
            return None
    return _Table(members, offset, size, end - size - offset)


def archives_in(source: int | bytes, length: int) -> list[tuple[int, int]]:
    """Return where each of several archives that follow each other begins and ends.

    ``torch.distributed.checkpoint`` writes such files, and ``torch.save`` into an open file, which
    ``torch.load`` does not read back: it takes the table of the last one for that of the first one.

    Args:
        source: The descriptor of the file, or its content.
        length: Its size.

    Returns:
        The places of the archives; an empty list if the file is something else.
    """
    places: list[tuple[int, int]] = []
    end = length
    while end > 0:
        table = _find_table(source, end)
        if table is None or not 0 <= table.start_of_archive < end:
            return []
        places.append((table.start_of_archive, end))
        end = table.start_of_archive
    return places[::-1]


class Archive:
    """A zip file as torch writes it.

    Opening reads and checks the table of members, and no content.

    Args:
        source: The descriptor of the file, or its content.
        what: How errors name the file.

    Attributes:
        members: The members by name, without the folder that contains all of them.

    Raises:
        FileError: If it is not an archive that torch writes, or two readers could interpret it
            differently.
    """

    def __init__(self, source: int | bytes, what: str) -> None:
        self.what = what
        self._source = source
        self.members: dict[str, zipfile.ZipInfo] = {}

        # Names of members whose content has been compared with the checksum, and contents that are
        # kept.
        self._verified = set[str]()
        self._texts: dict[str, bytes] = {}

        length = size_of(source)
        table = _find_table(source, length)
        # A copy or a download was cut off, or bytes were appended.
        if table is None:
            raise self.corrupt("the end of a zip file is missing; copy or download it again")
        if table.start_of_archive:
            # torch.load would look up members of the first one in the table of the last one.
            if places := archives_in(source, length):
                raise FileError(
                    f"{what} is a chain of {len(places)} torch.save files. If it is a part of a "
                    "distributed checkpoint, name the folder; else cut the files out of its bytes: "
                    f"the first is load_checkpoint(io.BytesIO(content[:{places[0][1]}]))",
                    CHAIN,
                )
            raise self.corrupt("its table of members has another size or place than stated")

        self._table = table.offset
        entries = self._read_table()
        # Entries that one of two readers does not count.
        if len(entries) != table.members:
            raise self.corrupt("its table of members has another size or place than stated")
        self._check_entries(entries)
        self._check_places()

    def corrupt(self, reason: str) -> FileError:
        """Return the error for a corrupt file."""
        return FileError(f"{self.what} is corrupt: {reason}", CORRUPT_ZIP)

    def _read_table(self) -> list[zipfile.ZipInfo]:
        try:
            with file_of(self._source) as file:
                return zipfile.ZipFile(file).infolist()
        except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
            raise self.corrupt(f"its table of members cannot be read ({error})") from error

    def _check_entries(self, entries: list[zipfile.ZipInfo]) -> None:
        folder = entries[0].filename.partition("/")[0] + "/" if entries else ""
        # zip and shutil.make_archive() write the folders too.
        entries = [m for m in entries if not m.filename.endswith("/") or m.file_size]
        for member in entries:
            name = member.filename.removeprefix(folder)
            if problem := _problem_of(member, name):
                raise FileError(
                    f"{self.what} is not a zip file as torch writes it: its member "
                    f"{member.filename!r} {problem}",
                    "zip file",
                )
            self.members[name] = member

        # Two contents under one name: one reader takes the first, another one the last. torch
        # ignores case when it looks a member up.
        if len({member.filename.lower() for member in entries}) < len(entries):
            raise self.corrupt("two members have the same name")
        # Many members of code, each within the limit.
        if sum(m.file_size for m in self.members.values() if m.compress_type) > MOST_TEXT:
            raise self.corrupt("its compressed members are too large uncompressed")

    def _check_places(self) -> None:
        place = 0
        for member in sorted(self.members.values(), key=attrgetter("header_offset")):
            # Members that overlap are small in the file and large in memory.
            if member.header_offset < place:
                raise self.corrupt(f"its member {member.filename!r} is not where it should be")
            place = member.header_offset + _LOCAL_HEADER.size + len(member.filename)
            place += member.compress_size
        # A member that reaches into the table changes with the names in it.
        if place > self._table:
            raise self.corrupt("its last member reaches into the table of members")

    @property
    def has_checksums(self) -> bool:
        """False if ``torch.serialization.set_crc32_options(False)`` has written zeros for all."""
        return any(member.CRC for member in self.members.values())

    @property
    def is_of_other_byte_order(self) -> bool:
        """True if torch has to swap the bytes of tensors. Old files do not say their order."""
        order = self.text("byteorder") if "byteorder" in self.members else b""
        return order not in {b"", sys.byteorder.encode()}

    def check_storages(self, storages: Mapping[str, Any], folder: str = "data/") -> None:
        """Raise FileError unless each storage of a pickle has a member of its size in a folder."""
        for key, stored in storages.items():
            member = self.members.get(f"{folder}{key}")
            if member is None or member.file_size != stored.nbytes:
                size = member.file_size if member else "no"
                reason = f"{folder}{key}' has {size} bytes, {stored.nbytes} in the pickle"
                raise self.corrupt(f"'{reason}")

    def start_of(self, member: zipfile.ZipInfo, head: bytes = b"") -> int:
        """Return where the content of a member begins.

        Args:
            member: One of the members.
            head: The bytes of the file from the local header on, if they have been read.

        Raises:
            FileError: If there is no local header, or the content would reach into the table.
        """
        name = member.orig_filename.encode("utf-8" if member.flag_bits & _UTF8 else "cp437")
        name_at = _LOCAL_HEADER.size
        head = head or read_some(self._source, member.header_offset, name_at + len(name))
        # The file may have become shorter.
        fields = _LOCAL_HEADER.unpack_from(head.ljust(name_at, b"\0"))
        start: int = member.header_offset + name_at + fields[1] + fields[2]
        # An offset into the middle of another member.
        if fields[0] != b"PK\x03\x04":
            raise self.corrupt(f"the header of {member.filename!r} is invalid")
        # One content under two names, or a flipped bit in one of them.
        if fields[1] != len(name) or head[name_at : name_at + len(name)] != name:
            raise self.corrupt(f"the header of {member.filename!r} is that of another member")
        # An extra field that moves the content into the table.
        if start + member.compress_size > self._table:
            raise self.corrupt(f"the header of {member.filename!r} is too long")
        # Zeros in the table would hide the content, since they are also the CRC-32 of nothing.
        if not member.compress_size and read_some(self._source, start, 4) not in _NEXT:
            raise self.corrupt(f"{member.filename!r} has content, and none by the table of members")
        return start

    def read(self, name: str) -> bytes:
        """Return the verified content of a member of at most :data:`MOST_TEXT` bytes.

        Args:
            name: Name of the member, without the archive's folder.

        Returns:
            The content, decompressed.

        Raises:
            FileError: If the member is larger, cannot be decompressed, or is corrupt.
        """
        member = self.members[name]
        if member.compress_size > MOST_TEXT:
            size = member.file_size
            raise self.corrupt(f"{name!r} has {size} bytes, more than torch would write")
        content = self._content(member)
        if member.compress_type:
            content = self._decompressed(member, content)
        self._check(member, crc32(content), len(content))
        return content

    def text(self, name: str) -> bytes:
        """Return the verified content of a pickle or another text, which is read once and kept."""
        if name not in self._texts:
            self._texts[name] = self.read(name)
        return self._texts[name]

    def _decompressed(self, member: zipfile.ZipInfo, content: bytes) -> bytes:
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # One byte more than stated shows that there is more, without decompressing all of it.
            unpacked = unpacker.decompress(content, member.file_size + 1)
        except zlib.error as error:
            raise self.corrupt(f"{member.filename!r} cannot be decompressed: {error}") from error
        # Bytes behind the stream, which another reader could find.
        if unpacker.unconsumed_tail or unpacker.unused_data:
            raise self.corrupt(f"{member.filename!r} has another size than stated")
        return unpacked

    def _content(self, member: zipfile.ZipInfo) -> bytes:
        if member.compress_size <= _SMALL:
            # With the header at once; torch pads that to a multiple of 64 bytes.
            room = _LOCAL_HEADER.size + len(member.filename) + 128
            block = read_some(self._source, member.header_offset, room + member.compress_size)
            start = self.start_of(member, block) - member.header_offset
            content = block[start : start + member.compress_size]
            if len(content) == member.compress_size:
                return content
        return read_some(self._source, self.start_of(member), member.compress_size)

    def read_all(self, targets: Mapping[str, memoryview | None]) -> None:
        """Verify members, large ones in threads, and copy each into its memory.

        Args:
            targets: Names of members, each with memory of its size, or None to drop the content.

        Raises:
            FileError: If a member is corrupt.
        """
        large: list[str] = []
        for name, target in targets.items():
            member = self.members[name]
            if member.file_size > _SMALL and not member.compress_type:
                large.append(name)
                continue
            content = self.read(name)
            if target is not None:
                target[:] = content
        # To start threads takes as long as to open a small file.
        if large:
            with ThreadPoolExecutor(_THREADS) as pool:
                # The list raises what a thread has raised.
                list(pool.map(self._read_large, large, [targets[name] for name in large]))

    def _read_large(self, name: str, target: memoryview | None) -> None:
        """Verify a stored member in pieces while it is copied into memory."""
        member = self.members[name]
        start = self.start_of(member)
        memory = target or memoryview(bytearray(min(_PIECE, member.file_size)))
        crc = 0
        done = 0
        while done < member.file_size:
            # Each piece has a place of its own, or all have the same.
            place = done if target else 0
            piece = memory[place : place + min(_PIECE, member.file_size - done)]
            count = fill(self._source, piece, start + done)
            # The file has become shorter since its table was read.
            if not count:
                raise self.corrupt(f"{name!r} is cut off")
            crc = crc32(piece[:count], crc)
            done += count
        self._check(member, crc, done)

    def _check(self, member: zipfile.ZipInfo, crc: int, size: int) -> None:
        if size != member.file_size or (crc != member.CRC and self.has_checksums):
            raise self.corrupt(f"the content of {member.filename!r} does not match its checksum")
        self._verified.add(member.filename)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare the content of members with their checksums, unless it has been read already.

        Args:
            names: Names of members; by default all.

        Raises:
            FileError: If a member is corrupt.
        """
        if len(self._verified) == len(self.members):
            return
        chosen = self.members if names is None else names
        unread = [name for name in chosen if self.members[name].filename not in self._verified]
        self.read_all(dict.fromkeys(unread))


def _problem_of(member: zipfile.ZipInfo, name: str) -> str:
    """Return why a member, which has a name in the folder, is not one that torch writes."""
    # Readers look members up by their name in the folder.
    if not name or len(name) == len(member.filename):
        return "is not in the one folder of an archive; unpack the file first"
    if member.flag_bits & _ENCRYPTED:
        return "is encrypted"
    # torch reads nothing of it: the tensor has what happened to be in memory.
    if member.external_attr & stat.FILE_ATTRIBUTE_DIRECTORY:
        return "is marked as a folder"
    # Two sizes for one content: readers choose differently.
    if not member.compress_type and member.compress_size != member.file_size:
        return f"is stored, with two sizes ({member.compress_size} and {member.file_size} bytes)"
    # A decompression bomb, except in code, whose size is limited.
    is_code = name.endswith(_CODE) and member.file_size <= MOST_TEXT
    if member.compress_type and not (member.compress_type in _METHODS and is_code):
        sizes = f"{member.compress_size} of {member.file_size} bytes"
        return f"is compressed ({sizes}); unpack the file, and pack it without compression"
    return ""
