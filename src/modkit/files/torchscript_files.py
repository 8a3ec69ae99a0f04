"""TorchScript archives: verified before torch loads anything of them, and while it does.

Torch's own reader ignores checksums, so a flipped bit in the weights loads without a complaint:
https://github.com/pytorch/pytorch/issues/126952.
"""

import hashlib
import io
import mmap
import os
import pickletools
import re
import zlib
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final, cast

from modkit.errors import FileError
from modkit.files.zip_check import MOST_TEXT, Archive


_EXTRA: Final = "extra/"
_PICKLES: Final = ("data.pkl", "constants.pkl")
_TENSORS: Final = ("data/", "constants/")
# Below this many bytes, checksums take less time than starting a thread does.
_WORTH_A_THREAD: Final = 1 << 20
_MOST_THREADS: Final = 16
_HEAD: Final = 4096
_OTHER_FORMS: Final = 0x61  # flags of zip files
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
    """Verify a TorchScript archive around the block that loads it.

    Its structure, code and pickles are verified before the block. The weights are verified in threads
    while the block runs, because torch reads them into memory of its own.

    Args:
        f: A path, or a file that is open for reading.
        sha256: Expected digest of the file, 64 hexadecimal digits, after ``sha256:`` or alone.

    Raises:
        ValueError: There is no such file, or its digest is not ``sha256``.
        FileError: The file is corrupt or not a TorchScript archive. At the end of the block, it
            replaces what the block has raised.
    """
    file, what, source = _opened(f)
    with file, ThreadPoolExecutor(_MOST_THREADS) as pool:
        data = memoryview(b"")
        if isinstance(source, bytes):
            data = memoryview(source)
        elif file.seek(0, io.SEEK_END):
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if sha256 is not None:
            _check_digest(data, what, sha256)
        _check_kind(bytes(data[:_HEAD]), what)
        archive = _checked_archive(file, what)
        weights = [name for name in archive.members if name.startswith(_TENSORS)]
        for name in archive.members.keys() - set(weights):
            _check(archive, data, name)
        names = (name for name in archive.members if name.startswith(_EXTRA))
        extra_files = {name.removeprefix(_EXTRA): archive.sizes[name] for name in names}
        checks = _start_checks(pool, archive, data, weights)
        try:
            yield VerifiedArchive(source, extra_files)
        except Exception as error:
            _finish_checks(checks, error)
            # Texts of torch's reader of zip files have one of these names in them.
            if isinstance(error, RuntimeError) and _READER.search(str(error)):
                reason = str(error).partition("\n")[0]
                raise _corrupt(what, f"torch cannot read it: {reason}") from error
            raise
        _finish_checks(checks, None)


def _opened(f: Any) -> tuple[IO[bytes], str, str | bytes]:
    """Open a path once, or read a file; return a file, its name for errors, and torch's source."""
    if not isinstance(f, (str, os.PathLike)):
        content = _content_of(f)
        return io.BytesIO(content), f"the file {getattr(f, 'name', '')}".rstrip(), content
    path = os.fsdecode(cast("os.PathLike[str]", f))
    # The texts are those of torch.jit.load, and show the path as it was given.
    if not os.path.exists(path):  # noqa: PTH110
        raise ValueError(f"The provided filename {f} does not exist")
    if os.path.isdir(path):  # noqa: PTH112
        raise ValueError(f"The provided filename {f} is a directory")
    if not os.path.isfile(path):  # noqa: PTH113 - opening a pipe would wait for a writer
        raise FileError(f"{path} is not a regular file", "unknown file")
    file = open(path, "rb")  # noqa: PTH123, SIM115
    # Torch opens a path by itself. This one leads to the file that is open here, even if another one
    # has taken its place by then.
    same = f"/proc/self/fd/{file.fileno()}"
    return file, path, same if os.path.exists(same) else path  # noqa: PTH110


def _content_of(f: Any) -> bytes:
    """Read an open file; one that has just been written stands at its end, and is read from the start."""
    content: object = f.read()
    if not content and hasattr(f, "seekable") and f.seekable() and f.tell():
        f.seek(0)
        content = f.read()
    if not isinstance(content, bytes):
        raise TypeError("the file is open as text; open it in the mode 'rb'")
    return content


def _check_digest(data: memoryview, what: str, expected: str) -> None:
    wanted = expected.strip().lower().removeprefix("sha256:")
    if not re.fullmatch("[0-9a-f]{64}", wanted):
        raise ValueError(f"sha256 must be 64 hexadecimal digits; {expected!r} is not a digest")
    found = hashlib.sha256(data).hexdigest()
    if found != wanted:
        raise ValueError(f"{what} has the SHA-256 {found}, not {wanted}: it is another file")


def _checked_archive(file: IO[bytes], what: str) -> Archive:
    try:
        archive = Archive(file, what)
    except IndexError:
        raise _corrupt(what, "a member has no name") from None
    members = archive.members
    _check_kind_of_zip(members.keys(), what)
    archive.check_unambiguous()
    missing = [name for name in _PICKLES if name not in members]
    if not {"version", ".data/version"} & members.keys():
        missing.append("version")
    if missing:
        raise _corrupt(what, f"it has no {', '.join(missing)}")
    packed = {name: info for name, info in members.items() if info.compress_type}
    for name in packed:
        if not name.endswith((".py", ".debug_pkl")):
            raise _corrupt(what, f"{name} is compressed, which torch does for code alone")
    if sum(info.file_size for info in packed.values()) > MOST_TEXT:
        raise _corrupt(what, "its code takes more than 128 MiB unpacked")
    return archive


def _check(archive: Archive, data: memoryview, name: str) -> None:
    """Verify the checksum of a member, and how deep a pickle nests."""
    info = archive.members[name]
    if info.compress_type:
        archive.verify(name)
        return
    head = data[info.header_offset :]
    if info.flag_bits & _OTHER_FORMS:
        raise _corrupt(archive.what, f"{name} is marked as encrypted or patched")
    # The name is there twice, before the content and in the table of members.
    length, further = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
    coding = "utf-8" if info.flag_bits & 0x800 else "cp437"
    name_there = bytes(head[30 : 30 + length])
    if bytes(head[:4]) != b"PK\x03\x04" or name_there != info.orig_filename.encode(coding):
        raise _corrupt(archive.what, f"{name} has another name before its content")
    content = head[30 + length + further :][: info.file_size]
    sizes = {info.file_size, info.compress_size, len(content)}
    if len(sizes) > 1 or info.CRC not in {0, zlib.crc32(content)}:
        raise _corrupt(archive.what, f"the content of {name} does not match its checksum")
    if name in _PICKLES:
        try:
            check_depth(bytes(content))
        except ValueError as error:
            raise _corrupt(archive.what, f"{name}: {error}") from None


def _start_checks(
    pool: ThreadPoolExecutor, archive: Archive, data: memoryview, names: list[str]
) -> list[Future[None]]:
    """Verify members in threads, the largest first; a few bytes are verified at once.

    Torch holds the GIL while it loads. Until it is done, each thread gets through the one member that it
    has begun with, so there are more threads than cores.
    """
    sizes = {name: archive.members[name].file_size for name in names}
    left = iter(sorted(names, key=sizes.__getitem__, reverse=True))

    def check() -> None:
        for name in left:
            _check(archive, data, name)

    if sum(sizes.values()) < _WORTH_A_THREAD:
        check()
        return []
    return [pool.submit(check) for _ in range(min(_MOST_THREADS, len(names)))]


def _finish_checks(checks: list[Future[None]], cause: Exception | None) -> None:
    for check in checks:
        error = check.exception()
        if error is not None:
            raise error from cause


def _corrupt(what: str, reason: str) -> FileError:
    return FileError(f"{what} is corrupt: {reason}", "corrupt zip file")


_ADVICE: Final = {
    "torch.save file": "read it with modkit.load_checkpoint or torch.load(..., weights_only=True)",
    "torch.save file (before torch 1.6)": "read it with torch.load(..., weights_only=True)",
    "torch.export archive": "read it with torch.export.load",
    "safetensors file": "read it with safetensors.torch.load_file",
    "pickle": "if it is from torch.save, read it with torch.load(..., weights_only=True)",
    "zip file": "it has none of the members of one",
    "empty file": "nothing was written to it",
    "unknown file": "its first bytes are not those of a zip file",
}
_LEGACY: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"


def _refuse(what: str, kind: str, advice: str = "") -> None:
    article = "an" if kind[0] in "aeiou" else "a"
    advice = advice or _ADVICE[kind]
    raise FileError(f"{what} is {article} {kind}, not a TorchScript archive: {advice}", kind)


def _check_kind(head: bytes, what: str) -> None:
    """Refuse what is not a zip file."""
    if head.startswith(b"PK"):
        return
    if not head:
        _refuse(what, "empty file")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
        _refuse(what, "safetensors file")
    if _LEGACY in head[:16]:
        _refuse(what, "torch.save file (before torch 1.6)")
    if head[0] == 0x80:
        _refuse(what, "pickle")
    line = head.decode("utf-8", "replace").strip().partition("\n")[0]
    if line.isprintable() and "\ufffd" not in line:
        _refuse(what, "text file", f"it begins with {line[:60]!r}")
    _refuse(what, "unknown file")


def _check_kind_of_zip(names: Iterable[str], what: str) -> None:
    """Refuse a zip file that is not a TorchScript archive."""
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return
    if "serialized_exported_program.json" in names or "archive_format" in names:
        _refuse(what, "torch.export archive")
    _refuse(what, "torch.save file" if "data.pkl" in names else "zip file")


_DEEPEST: Final = 1000
# Codes of the operations that put objects into others: a pickle nests no deeper than it has of these.
_NESTING: Final = b"tldaesuRbioQ\x81\x85\x86\x87\x90\x91\x92\x93"
_FILLS: Final = frozenset(("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"))


def check_depth(data: bytes) -> None:
    """Refuse a pickle that nests so deep that reading it would overflow the stack of the process.

    Raises:
        ValueError: It nests deeper than 1,000 levels, or cannot be followed.
    """
    if len(data) - len(data.translate(None, _NESTING)) <= _DEEPEST:
        return
    try:
        _walk(data)
    except (IndexError, KeyError, TypeError):
        raise ValueError("its operations do not fit together") from None


def _walk(data: bytes) -> None:
    # Of each object there is [how deep it nests, whether another object holds it].
    stack: list[list[int]] = []
    memo: dict[Any, list[int]] = {}
    marks: list[int] = []
    for operation, argument, _ in pickletools.genops(data):
        name, before = operation.name, operation.stack_before
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "DUP":
            stack.append(stack[-1])
        elif before:
            marked = pickletools.markobject in before
            begin = marks.pop() if marked else len(stack)
            begin -= before.index(pickletools.markobject) if marked else len(before)
            if begin < 0:
                raise IndexError
            taken = stack[begin:]
            del stack[begin:]
            if name in _FILLS:
                stack.append(_filled(taken[1:], taken[0]))
            elif operation.stack_after:
                stack.append(_filled(taken, [0, 0]))
        elif "PUT" in name:
            memo[argument] = stack[-1]
        elif "GET" in name:
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif operation.stack_after:
            stack.append([0, 0])


def _filled(inside: list[list[int]], target: list[int]) -> list[int]:
    depth = max(target[0], 1 + max([each[0] for each in inside], default=0))
    if depth > _DEEPEST:
        raise ValueError(f"it nests deeper than {_DEEPEST:,} levels")
    if depth > target[0] and target[1]:
        # The depth of what holds it would no longer be right. No pickler of torch writes this.
        raise ValueError("it fills an object that is part of another one already")
    target[0] = depth
    for each in inside:
        each[1] = 1
    return target
