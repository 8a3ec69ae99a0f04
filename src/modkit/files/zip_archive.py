"""Zip files as ``torch.save`` and ``torch.jit.save`` write them, verified against their checksums.

torch ignores the checksums: https://github.com/pytorch/pytorch/issues/126952. This reader accepts
only the subset of zip that torch writes, and refuses what two readers could interpret differently.

The records of a file, whose fields are in :mod:`~modkit.files.zip_records`, in their order::

    for each member:  local header, name, padding, content
    for each member:  entry of the table: name, sizes, CRC-32, offset of the local header
    zip64 end record: number of members, size and offset of the table
    zip64 locator:    offset of the zip64 end record
    end record:       the same numbers, or markers for those in the zip64 end record

:class:`Archive` reads them from the end to the start. The table has no checksum, so each number in
it is compared with another one: that of another record, or the size of the file. Members are read
only where they lie before the table and do not overlap. A file that gets shorter meanwhile is an
error, and never a signal, because content is read and not mapped.
"""

import os
import stat
import struct
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

from modkit.errors import FileError
from modkit.files import zip_records as records
from modkit.files.operating_system import PATH_TYPES, AnyPath, read_at, read_into_at
from modkit.files.zip_records import (
    DEFLATED,
    LOCAL_HEADER,
    STORED,
    EndRecord,
    LocalHeader,
    Member,
    TableEntry,
    Zip64EndRecord,
    Zip64Locator,
    member_of,
)


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
# Small members that follow each other are read together, this many bytes at most.
_WINDOW: Final = 1 << 15
# Pickles and code are read into memory; a member that claims to be larger is refused.
MOST_TEXT: Final = 128 << 20
_MOST_MEMBERS: Final = 1_000_000
# Members up to this size are read together with their header, without another thread.
_SMALL: Final = 1 << 16
_THREADS: Final = min(4, os.cpu_count() or 1)

_CODE: Final = (".py", ".debug_pkl")  # torch compresses these
_UNREADABLE: Final = (
    records.ENCRYPTED | records.PATCHED | records.STRONGLY_ENCRYPTED | records.MASKED
)

# The fields of both end records, with the value that leaves a field of the short one to the long
# one.
_IN_BOTH_ENDS: Final = {
    "entries_on_this_disk": records.IN_ZIP64_16,
    "total_entries": records.IN_ZIP64_16,
    "size_of_central_directory": records.IN_ZIP64_32,
    "offset_of_central_directory": records.IN_ZIP64_32,
}

# Makes, for a size, memory for a piece of a member, and a function that copies the piece elsewhere:
# it takes the place of the piece in the content, and its length.
Copier: TypeAlias = Callable[[int], tuple[memoryview, Callable[[int, int], object]]]
Target: TypeAlias = memoryview | Copier | None


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
    # For a directory, open() raises IsADirectoryError.
    with Path(name).open("rb", buffering=0) as file:
        yield file.fileno()


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
    """Return the content of an open file from its position on.

    At the end of a file, such as one that was just written, it is read from its start.

    Args:
        file: File that is open for reading bytes.

    Returns:
        The bytes that were read.

    Raises:
        TypeError: If the file is open as text.
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


class Archive:
    """A zip file as torch writes it.

    Opening reads and checks the table of members, and no content.

    Args:
        source: The descriptor of the file, or its content.
        what: How errors name the file.

    Attributes:
        members: The members by name, without the folder that contains all of them.
        folder: The name of that folder, with a slash.

    Raises:
        FileError: If two readers could interpret the table differently, if it is not one that torch
            writes, or if it has sizes that no model has.
    """

    def __init__(self, source: int | bytes, what: str) -> None:
        self.what = what
        self._source = source
        self._length = os.fstat(source).st_size if isinstance(source, int) else len(source)
        self.members: dict[str, Member] = {}

        # Names of members whose content has been compared with the checksum, and contents that are
        # kept.
        self._verified = set[str]()
        self._texts: dict[str, bytes] = {}
        # The bytes of the file that were read last for small members.
        self._window = b""
        self._window_start = 0

        try:
            self._read_table(*self._find_table())
        except (struct.error, UnicodeDecodeError) as error:
            raise self.corrupt(f"its table of members cannot be read ({error})") from error
        self._check_places()

    def corrupt(self, reason: str) -> FileError:
        """Return the error for a corrupt file."""
        return FileError(f"{self.what} is corrupt: {reason}", "corrupt zip file")

    def _find_table(self) -> tuple[int, int, int]:
        """Return the number of members, and where their table begins and ends."""
        zip64_size = records.ZIP64_END.size + records.ZIP64_LOCATOR.size
        size = zip64_size + records.END.size
        tail = read_some(self._source, max(0, self._length - size), size)
        in_zip64, last = tail[: -records.END.size], tail[-records.END.size :]

        # A copy or a download was cut off, or bytes were appended.
        if not last.startswith(records.END_SIGNATURE) or len(last) < records.END.size:
            raise self.corrupt("the end of a zip file is missing; copy or download it again")
        end_record = EndRecord._make(records.END.unpack(last))
        # A comment may contain another end record, which another reader would take for the end.
        if end_record.comment_length:
            raise self.corrupt("its end record is not one that torch writes")
        self._check_disks(end_record)

        table: EndRecord | Zip64EndRecord = end_record
        end = self._length - records.END.size
        if in_zip64[records.ZIP64_END.size :].startswith(records.ZIP64_LOCATOR_SIGNATURE):
            end -= zip64_size
            table = self._zip64_end(end_record, in_zip64, end)

        # A table that begins elsewhere, or has a gap behind it, hides a second table.
        if table.offset_of_central_directory + table.size_of_central_directory != end:
            raise self.corrupt("its table of members has another size or place than stated")
        # Memory for entries that the table has no room for.
        if table.total_entries * records.TABLE_ENTRY.size > table.size_of_central_directory:
            raise self.corrupt("its table of members has another size or place than stated")
        # Memory and time for more members than any model has.
        if table.total_entries > _MOST_MEMBERS:
            raise self.corrupt(
                f"it has {table.total_entries:,} members, more than {_MOST_MEMBERS:,}"
            )
        return table.total_entries, table.offset_of_central_directory, end

    def _zip64_end(self, end_record: EndRecord, tail: bytes, place: int) -> Zip64EndRecord:
        """Return the end record for large files, which must be in its place and agree."""
        zip64_end = Zip64EndRecord._make(records.ZIP64_END.unpack_from(tail))
        locator = Zip64Locator._make(
            records.ZIP64_LOCATOR.unpack_from(tail, records.ZIP64_END.size)
        )

        # A locator that leads to a second record, which a reader that follows it would use.
        if locator.offset_of_zip64_end != place:
            raise self.corrupt("its end record for large files is not where it should be")
        if zip64_end.signature != records.ZIP64_END_SIGNATURE:
            raise self.corrupt("its end record for large files is not where it should be")
        # A longer record has bytes that readers interpret differently.
        if zip64_end.size_of_record != records.ZIP64_END_STATED_SIZE:
            raise self.corrupt("its end record for large files has another size than stated")
        # Two tables: one for readers of this record, one for those of the short one.
        for field, marker in _IN_BOTH_ENDS.items():
            if getattr(end_record, field) not in {getattr(zip64_end, field), marker}:
                raise self.corrupt(f"its end records do not agree about {field}")
        # An archive in parts; torch writes 1, other writers 0.
        if locator.total_number_of_disks > 1 or locator.disk_of_zip64_end:
            raise self.corrupt("its end record is not one that torch writes")
        self._check_disks(zip64_end)
        return zip64_end

    def _check_disks(self, end: EndRecord | Zip64EndRecord) -> None:
        # An archive in parts: its offsets are those of another file.
        if end.number_of_this_disk or end.disk_of_central_directory:
            raise self.corrupt("its end record is not one that torch writes")
        # Some readers take one of these numbers, some the other.
        if end.entries_on_this_disk != end.total_entries:
            raise self.corrupt("its end record is not one that torch writes")

    def _read_table(self, count: int, start: int, end: int) -> None:
        table = read_some(self._source, start, end - start)
        self._table = start
        self.folder: str = ""
        names_in_lower_case = set[str]()
        place = 0
        for _ in range(count):
            entry = TableEntry._make(records.TABLE_ENTRY.unpack_from(table, place))
            name_at = place + records.TABLE_ENTRY.size
            extra_at = name_at + entry.file_name_length
            comment_at = extra_at + entry.extra_field_length
            place = comment_at + entry.file_comment_length

            # An entry that another reader would skip, or look for elsewhere.
            if entry.signature != records.TABLE_ENTRY_SIGNATURE:
                raise self.corrupt("its table of members cannot be read")
            # A name, an extra field or a comment that reaches into the end records.
            if place > len(table):
                raise self.corrupt("its table of members cannot be read")

            name = table[name_at:extra_at].decode()
            if not self.members:
                self.folder = name.partition("/")[0] + "/"
            short = name.removeprefix(self.folder)
            member = member_of(entry, name, table[extra_at:comment_at])
            self._check_entry(entry, member, short)
            # torch ignores case when it looks a member up.
            names_in_lower_case.add(short.lower())
            self.members[short] = member

        # Two contents under one name: one reader takes the first, another one the last.
        if len(names_in_lower_case) < count:
            raise self.corrupt("two members have the same name")
        # Entries behind the stated number, which a reader that does not count would find.
        if place != len(table):
            raise self.corrupt("its table of members has another size than stated")

    def _check_entry(self, entry: TableEntry, member: Member, short: str) -> None:
        name = member.name
        method = member.method
        problem = ""
        # Readers look members up by their name in the folder.
        if not short or self.folder == "/":
            problem = "has no name in a folder"
        # C++ ends the name at the zero, Python does not.
        elif "\0" in name:
            problem = "has a name with a zero in it"
        # torch takes the folder of the first member for that of all.
        elif len(short) == len(name):
            problem = "is in another folder"
        # A folder has no content, whatever its sizes state.
        elif entry.external_file_attributes & records.MS_DOS_DIRECTORY or name.endswith("/"):
            problem = "is marked as a folder"
        # Readers that ignore these flags would return other bytes.
        elif entry.general_purpose_flags & _UNREADABLE:
            problem = "is encrypted"
        # The content would be in another part of the archive.
        elif entry.disk_number_start:
            problem = "is on another disk"
        # Two sizes for one content: readers choose differently.
        elif method == STORED and member.packed != member.size:
            problem = f"is stored, with two sizes ({member.packed} and {member.size} bytes)"
        # A decompression bomb, except in code, whose size is limited.
        elif method == DEFLATED and not (short.endswith(_CODE) and member.size <= MOST_TEXT):
            problem = f"is compressed ({member.packed} of {member.size} bytes)"
        # Only some readers have other methods.
        elif method != STORED and method != DEFLATED:  # noqa: PLR1714 - a set is made each time
            problem = f"is compressed by the method {method}"

        if problem:
            raise FileError(
                f"{self.what} is not a zip file as torch writes it: its member {name!r} {problem}",
                "zip file",
            )

    def _check_places(self) -> None:
        place = 0
        for member in sorted(self.members.values(), key=attrgetter("header")):
            # Bytes before the first member make the file one of another kind as well, such as a
            # script.
            if place == 0 and member.header:
                raise self.corrupt(f"its member {member.name!r} is not where it should be")
            # Members that overlap are small in the file and large in memory.
            if member.header < place:
                raise self.corrupt(f"its member {member.name!r} is not where it should be")
            place = member.header + LOCAL_HEADER.size + len(member.name.encode()) + member.packed

        # A member that reaches into the table changes with the names in it.
        if place > self._table:
            raise self.corrupt("its last member reaches into the table of members")
        # Many members of code, each within the limit.
        size = sum(member.size for member in self.members.values() if member.method == DEFLATED)
        if size > MOST_TEXT:
            raise self.corrupt(f"its compressed members have {size} bytes uncompressed")

    @property
    def has_checksums(self) -> bool:
        """False if ``torch.serialization.set_crc32_options(False)`` has written zeros for all."""
        return any(member.crc for member in self.members.values())

    def start_of(self, member: Member, head: bytes = b"") -> int:
        """Return where the content of a member begins, after comparing its local header.

        Args:
            member: One of the members.
            head: The bytes of the file from the local header on, if they have been read.

        Raises:
            FileError: If the local header differs from the table of members, or the member is empty
                by the table alone.
        """
        if not head:
            room = LOCAL_HEADER.size + 4 * len(member.name)
            head = read_some(self._source, member.header, room)
        header = LocalHeader._make(LOCAL_HEADER.unpack_from(head.ljust(LOCAL_HEADER.size, b"\0")))
        extra_at = LOCAL_HEADER.size + header.file_name_length
        start = member.header + extra_at + header.extra_field_length

        # An offset into the middle of another member.
        if header.signature != records.LOCAL_HEADER_SIGNATURE:
            raise self.corrupt(f"the header of {member.name!r} is invalid")
        # A reader of local headers would decompress or decrypt where a reader of the table does
        # not.
        if header.compression_method != member.method:
            raise self.corrupt(f"the header of {member.name!r} is invalid: another compression")
        if header.general_purpose_flags & _UNREADABLE:
            raise self.corrupt(f"the header of {member.name!r} is invalid: it is encrypted")
        # One content under two names, one in the table and one here.
        if head[LOCAL_HEADER.size : extra_at] != member.name.encode():
            raise self.corrupt(f"the header of {member.name!r} is that of another member")
        # An extra field that moves the content into the table.
        if start + member.packed > self._table:
            raise self.corrupt(f"the header of {member.name!r} is too long")
        # Zeros in the table would hide the content, since they are also the CRC-32 of nothing.
        if not member.packed and read_some(self._source, start, 4) not in records.SIGNATURES:
            raise self.corrupt(f"{member.name!r} has content, and none by the table of members")
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
        if member.packed > MOST_TEXT:
            raise self.corrupt(f"{name!r} has {member.size} bytes, more than torch would write")
        content = self._content(member)
        if member.method == DEFLATED:
            content = self._decompressed(member, content)
        self._check(member, crc32(content), len(content))
        return content

    def text(self, name: str) -> bytes:
        """Return the verified content of a pickle or another text, which is read once and kept."""
        if name not in self._texts:
            self._texts[name] = self.read(name)
        return self._texts[name]

    def _decompressed(self, member: Member, content: bytes) -> bytes:
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # One byte more than stated shows that there is more, without decompressing all of it.
            unpacked = unpacker.decompress(content, member.size + 1)
        except zlib.error as error:
            raise self.corrupt(f"{member.name!r} cannot be decompressed: {error}") from error
        # Bytes behind the stream, which another reader could find.
        if unpacker.unconsumed_tail or unpacker.unused_data:
            raise self.corrupt(f"{member.name!r} has another size than stated")
        return unpacked

    def _content(self, member: Member) -> bytes:
        if member.packed <= _SMALL:
            # With the header at once; torch pads that to a multiple of 64 bytes.
            room = LOCAL_HEADER.size + len(member.name) + 128
            block = self._block(member.header, room + member.packed)
            start = self.start_of(member, block) - member.header
            content = block[start : start + member.packed]
            if len(content) == member.packed:
                return content
        return read_some(self._source, self.start_of(member), member.packed)

    def _block(self, start: int, count: int) -> bytes:
        """Return bytes of the file; more and more is read ahead while one block follows another."""
        place = start - self._window_start
        if place < 0 or place + count > len(self._window):
            follows = 0 < place <= len(self._window)
            ahead = min(2 * len(self._window), _WINDOW, self._table - start) if follows else 0
            self._window = read_some(self._source, start, max(count, ahead))
            self._window_start = start
            place = 0
        return self._window[place : place + count]

    def is_large(self, name: str) -> bool:
        """Return True for a member that is read in pieces, by :meth:`read_into` and in threads."""
        member = self.members[name]
        return member.size > _SMALL and member.method == STORED

    def read_all(self, targets: Mapping[str, Target]) -> None:
        """Verify large members in threads, and copy each into its memory.

        Args:
            targets: Names of members, each with its memory as in :meth:`read_into`.

        Raises:
            FileError: If a member is corrupt.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            # The list raises what a thread has raised.
            list(pool.map(self.read_into, targets, targets.values()))

    def read_into(self, name: str, target: Target) -> None:
        """Verify a large member while it is copied into memory.

        Args:
            name: The name of a stored member.
            target: Memory of its size, a function that makes memory for a piece and one that copies
                it elsewhere, or None to drop the content.

        Raises:
            FileError: If the content is cut off, or does not match its checksum.
        """
        member = self.members[name]
        start = self.start_of(member)
        copy = None
        if isinstance(target, memoryview):
            memory = target
        elif target is None:
            memory = memoryview(bytearray(min(_PIECE, member.size)))
        else:
            memory, copy = target(_PIECE)

        crc = 0
        done = 0
        while done < member.size:
            # Each piece has a place of its own, or all have the same.
            place = done if memory is target else 0
            piece = memory[place : place + min(_PIECE, member.size - done)]
            if isinstance(self._source, int):
                count = read_into_at(self._source, piece, start + done)
            else:
                piece[:] = self._source[start + done : start + done + len(piece)]
                count = len(piece)

            # The file has become shorter since its table was read.
            if not count:
                raise self.corrupt(f"{name!r} is cut off")
            crc = crc32(piece[:count], crc)
            if copy is not None:
                copy(done, count)
            done += count
        self._check(member, crc, done)

    def _check(self, member: Member, crc: int, size: int) -> None:
        if size != member.size or (crc != member.crc and self.has_checksums):
            raise self.corrupt(f"the content of {member.name!r} does not match its checksum")
        self._verified.add(member.name)

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
        unread = [name for name in chosen if self.members[name].name not in self._verified]

        self.read_all({name: None for name in unread if self.is_large(name)})
        for name in unread:
            if not self.is_large(name):
                self.read(name)
