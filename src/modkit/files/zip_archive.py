"""Zip files as ``torch.save`` and ``torch.jit.save`` write them, verified against their checksums.

torch ignores the checksums: https://github.com/pytorch/pytorch/issues/126952. This reader accepts only the
subset of zip that torch writes, and refuses what two readers could interpret differently.
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
from typing import IO, Any, Final, NamedTuple, TypeAlias

from modkit.errors import FileError
from modkit.files.operating_system import PATH_TYPES, AnyPath, read_at, read_into_at


try:
    # The same values at several times the speed, if the package is installed.
    _zlib: Any = import_module("zlib_ng.zlib_ng")
except ImportError:
    _zlib = zlib
# The checksum of zip files: of bytes, after those of which the checksum is given.
crc32: Final[Callable[..., int]] = _zlib.crc32

_CHUNK: Final = 1 << 18  # stays in the processor's cache between reading and checking
# Pickles and code are read into memory; a member that claims to be larger is refused.
MOST_TEXT: Final = 128 << 20
_MOST_MEMBERS: Final = 1_000_000
# Members up to this size are read together with their header, without another thread.
_SMALL: Final = 1 << 16
_THREADS: Final = min(4, os.cpu_count() or 1)

# Signature; this disk, disk of the table, entries here, entries; size and start of the table, comment.
_END: Final = struct.Struct("<4s4H2LH")
_END_64_LOCATOR: Final = struct.Struct("<4sLQL")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_ENDS: Final = _END_64.size + _END_64_LOCATOR.size + _END.size
_ENTRY: Final = struct.Struct("<4s4B4HL2L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_UNKNOWN: Final = 0xFFFFFFFF
_STORED: Final = 0
_DEFLATED: Final = 8
_FOLDER: Final = 0x10  # MS-DOS attribute
_UNREADABLE: Final = 0x1 | 0x20 | 0x40 | 0x2000  # encrypted, patched, strongly encrypted, masked


# Memory for the content of a member: None to drop it, or what makes, for a size, memory for a piece
# and a function that takes the place of the piece in the content, and its length.
Copier: TypeAlias = Callable[[int], tuple[memoryview, Callable[[int, int], object]]]
Target: TypeAlias = memoryview | Copier | None


class Member(NamedTuple):
    """A member: offset of its local header, compressed and uncompressed size, CRC-32, compression."""

    name: str
    header: int
    packed: int
    size: int
    crc: int
    method: int


@contextmanager
def open_regular(path: AnyPath) -> Generator[int]:
    """Open a regular file for reading and yield the descriptor; never block on a FIFO or a device."""
    name = os.fsdecode(path)
    mode = Path(name).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileError(f"{name} is not a regular file", "special file")
    # For a directory, open() raises IsADirectoryError.
    with Path(name).open("rb", buffering=0) as file:
        yield file.fileno()


@contextmanager
def open_source(file: AnyPath | IO[bytes]) -> Generator[tuple[int | bytes, str]]:
    """Yield a descriptor of a path, or the content of an open file, and how errors name it."""
    if isinstance(file, PATH_TYPES):
        with open_regular(file) as descriptor:
            yield descriptor, os.fsdecode(file)
    else:
        yield content_of(file), f"the file {getattr(file, 'name', '')}".rstrip()


def content_of(file: Any) -> bytes:
    """Return the content of an open file from its position on; of one that was just written, all of it."""
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
    found = b""
    # One call returns at most 2 GiB, and fewer after a signal.
    while len(found) < count and (part := read_at(source, count - len(found), start)):
        found, start = found + part if found else part, start + len(part)
    return found


class Archive:
    """The members of a zip file as torch writes it, by name without the folder that contains all."""

    def __init__(self, source: int | bytes, what: str) -> None:
        self.what = what
        self._source = source
        self._length = os.fstat(source).st_size if isinstance(source, int) else len(source)
        self.members: dict[str, Member] = {}
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
        tail = read_some(self._source, max(0, self._length - _ENDS), _ENDS)
        last = tail[-_END.size :]
        if len(tail) < _END.size or not last.startswith(b"PK\x05\x06"):
            raise self.corrupt("the end of a zip file is missing; copy or download it again")
        end = self._length - _END.size
        _, disk, table_disk, here, count, size, start, comment = _END.unpack(last)
        disks = {disk, table_disk}
        locator = tail[-_END.size - _END_64_LOCATOR.size : -_END.size]
        if locator.startswith(b"PK\x06\x07"):
            end -= _END_64_LOCATOR.size + _END_64.size
            record = _END_64.unpack(tail[: _END_64.size])
            _, on_disk, found, number = _END_64_LOCATOR.unpack(locator)
            short, (here, count, size, start) = (here, count, size, start), record[6:]
            unknown = (0xFFFF, 0xFFFF, _UNKNOWN, _UNKNOWN)
            both = zip(short, record[6:], unknown, strict=True)
            agree = found == end and all(a in {b, c} for a, b, c in both)
            if not agree or record[:2] != (b"PK\x06\x06", _END_64.size - 12) or number > 1:
                raise self.corrupt("its end record for large files is invalid")
            disks |= {record[4], record[5], on_disk}
        if disks != {0} or comment or here != count:
            raise self.corrupt("its end record is not one that torch writes")
        if start + size != end or count * _ENTRY.size > size or count > _MOST_MEMBERS:
            raise self.corrupt("its table of members has another size or place than stated")
        return count, start, end

    def _read_table(self, count: int, start: int, end: int) -> None:
        table = read_some(self._source, start, end - start)
        at, seen = 0, set[str]()
        self._table = start
        self.folder: str = ""
        for _ in range(count):
            entry = _ENTRY.unpack_from(table, at)
            name_at = at + _ENTRY.size
            extra_at = name_at + entry[12]
            at = extra_at + entry[13] + entry[14]
            name = table[name_at:extra_at].decode()
            if entry[0] != b"PK\x01\x02" or at > len(table):
                raise self.corrupt("its table of members cannot be read")
            size, packed, header = entry[11], entry[10], entry[18]
            if _UNKNOWN in {packed, size, header}:
                extra = table[extra_at : extra_at + entry[13]]
                size, packed, header = _long_fields(extra, [size, packed, header])
            if not self.members:
                self.folder = name.partition("/")[0] + "/"
            short = name.removeprefix(self.folder)
            member = Member(name, header, packed, size, entry[9], entry[6])
            self._check_entry(member, short, entry)
            # torch ignores case when it looks a member up.
            seen.add(short.lower())
            self.members[short] = member
        if len(seen) < count:
            raise self.corrupt("two members have the same name")
        if at != len(table):
            raise self.corrupt("its table of members has another size than stated")

    def _check_entry(self, member: Member, short: str, entry: tuple[int, ...]) -> None:
        name, _, packed, size, *_ = member
        stored = entry[6] == _STORED and packed == size
        code = entry[6] == _DEFLATED and short.endswith((".py", ".debug_pkl")) and size <= MOST_TEXT
        problem = "" if stored or code else f"is compressed ({packed} of {size} bytes)"
        if not short or self.folder == "/" or "\0" in name:
            problem = "has no name in a folder"
        elif len(short) == len(name) or entry[17] & _FOLDER or name.endswith("/"):
            problem = "is marked as a folder, or in another folder"
        elif entry[5] & _UNREADABLE or entry[15]:
            problem = "is encrypted, or on another disk"
        if problem:
            text = f"{self.what} is not a zip file as torch writes it: its member {name!r}"
            raise FileError(f"{text} {problem}", "zip file")

    def _check_places(self) -> None:
        """Refuse bytes before the first member, and members that overlap."""
        place = 0
        for member in sorted(self.members.values(), key=attrgetter("header")):
            if member.header < place or (place == 0 and member.header):
                raise self.corrupt(f"its member {member.name!r} is not where it should be")
            place = member.header + _LOCAL.size + len(member.name.encode()) + member.packed
        if place > self._table:
            raise self.corrupt("its last member reaches into the table of members")
        size = sum(m.size for m in self.members.values() if m.method == _DEFLATED)
        if size > MOST_TEXT:
            raise self.corrupt(f"its compressed members have {size} bytes uncompressed")

    @property
    def has_checksums(self) -> bool:
        """False if ``torch.serialization.set_crc32_options(False)`` has written zeros for all."""
        return any(member.crc for member in self.members.values())

    def start_of(self, member: Member, head: bytes = b"") -> int:
        """Return where the content of a member begins, after comparing its local header."""
        head = head or read_some(self._source, member.header, _LOCAL.size + 4 * len(member.name))
        fields = _LOCAL.unpack_from(head.ljust(_LOCAL.size, b"\0"))
        magic, _, flags, method, *_, length, extra = fields
        name = head[_LOCAL.size : _LOCAL.size + length]
        if magic != b"PK\x03\x04" or method != member.method or flags & _UNREADABLE:
            raise self.corrupt(f"the header of {member.name!r} is invalid")
        start: int = member.header + _LOCAL.size + length + extra
        if name != member.name.encode() or start + member.packed > self._table:
            raise self.corrupt(f"the header of {member.name!r} is that of another member")
        return start

    def read(self, name: str) -> bytes:
        """Return the verified content of a member of at most :data:`MOST_TEXT` bytes."""
        member = self.members[name]
        if member.packed > MOST_TEXT:
            raise self.corrupt(f"{name!r} has {member.size} bytes, more than torch would write")
        content = self._content(member)
        if member.method == _DEFLATED:
            unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
            try:
                content = unpacker.decompress(content, member.size + 1)
            except zlib.error as error:
                raise self.corrupt(f"{member.name!r} cannot be decompressed: {error}") from error
            if unpacker.unconsumed_tail or unpacker.unused_data:
                raise self.corrupt(f"{member.name!r} has another size than stated")
        self._check(member, crc32(content), len(content))
        return content

    def _content(self, member: Member) -> bytes:
        if member.packed <= _SMALL:
            # With the header at once; torch pads that to a multiple of 64 bytes.
            room = _LOCAL.size + len(member.name) + 128
            block = read_some(self._source, member.header, room + member.packed)
            start = self.start_of(member, block) - member.header
            if len(content := block[start : start + member.packed]) == member.packed:
                return content
        return read_some(self._source, self.start_of(member), member.packed)

    def is_large(self, name: str) -> bool:
        """Return True for a member for :meth:`read_all`, False for one for :meth:`read`."""
        member = self.members[name]
        return member.size > _SMALL and member.method == _STORED

    def read_all(self, targets: Mapping[str, Target]) -> None:
        """Verify large members in threads, and copy each into its memory."""
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self.read_into, targets, targets.values()))

    def read_into(self, name: str, target: Target) -> None:
        """Verify a large member, and copy it into its memory, unless that is None."""
        member = self.members[name]
        start, crc, done = self.start_of(member), 0, 0
        copy = None
        if target is None:
            memory = memoryview(bytearray(_CHUNK))
        elif isinstance(target, memoryview):
            memory = target
        else:
            memory, copy = target(_CHUNK)

        while done < member.size:
            at = done if memory is target else 0
            piece = memory[at : at + min(_CHUNK, member.size - done)]
            if isinstance(self._source, int):
                count = read_into_at(self._source, piece, start + done)
            else:
                piece[:] = self._source[start + done : start + done + len(piece)]
                count = len(piece)
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

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare the content of members, by default all, with their checksums."""
        chosen = list(self.members if names is None else names)
        self.read_all({name: None for name in chosen if self.is_large(name)})
        for name in chosen:
            if not self.is_large(name):
                self.read(name)


def _long_fields(extra: bytes, short: list[int]) -> list[int]:
    """Return the fields, with those that exceed 32 bits from the extra field."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, 4))
            return [next(values, _UNKNOWN) if value == _UNKNOWN else value for value in short]
        extra = extra[4 + length :]
    return short
