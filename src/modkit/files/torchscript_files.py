"""TorchScript archives: verified before torch loads anything of them."""

import os
import pickletools
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from modkit.files.kinds import TORCHSCRIPT, check_digest, kind_of, parse_digest, wrong_kind
from modkit.files.zip_archive import Archive, open_regular, path_of


_EXTRA: Final = "extra/"
_PICKLES: Final = ("data.pkl", "constants.pkl")
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
    """Verify a TorchScript archive, and hold the file open for the block that loads it.

    Args:
        f: A path, or a file that is open for reading.
        sha256: Expected digest of the file, 64 hexadecimal digits, after ``sha256:`` or alone.

    Raises:
        ValueError: If there is no such file, or ``sha256`` is not a digest.
        FileError: If the file is corrupt, not a TorchScript archive, or has another digest.
    """
    if sha256 is not None:
        parse_digest(sha256)
    with ExitStack() as stack:
        content: int | bytes
        if isinstance(f, (str, os.PathLike)):
            what = os.fsdecode(f)
            _check_path(what)
            content = stack.enter_context(open_regular(what))
            source: str | bytes = path_of(content, what)
        else:
            what = f"the file {getattr(f, 'name', '')}".rstrip()
            content = source = _content_of(f)
        if sha256 is not None:
            check_digest(content, what, sha256)
        if kind_of(content) != TORCHSCRIPT:
            raise wrong_kind(content, what, "a TorchScript archive")
        archive = Archive(content, what)
        _check_pickles(archive)
        archive.verify()
        extra = {n: m.size for n, m in archive.members.items() if n.startswith(_EXTRA)}
        try:
            yield VerifiedArchive(source, {n.removeprefix(_EXTRA): extra[n] for n in extra})
        except RuntimeError as error:
            # Texts of torch's reader of zip files have one of these names in them.
            if not _READER.search(str(error)):
                raise
            raise archive.corrupt(
                f"torch cannot read it: {str(error).partition(chr(10))[0]}"
            ) from error


def _check_path(path: str) -> None:
    # The texts are those of torch.jit.load, and show the path as it was given.
    if not Path(path).exists():
        raise ValueError(f"The provided filename {path} does not exist")
    if Path(path).is_dir():
        raise ValueError(f"The provided filename {path} is a directory")


def _content_of(f: Any) -> bytes:
    """Read an open file; one that has just been written stands at its end, and is read from the start."""
    content: Any = f.read()
    if not content and hasattr(f, "seekable") and f.seekable() and f.tell():
        f.seek(0)
        content = f.read()
    if not isinstance(content, bytes):
        raise TypeError("the file is open as text; open it in the mode 'rb'")
    return content


def _check_pickles(archive: Archive) -> None:
    missing = [name for name in _PICKLES if name not in archive.members]
    if not {"version", ".data/version"} & archive.members.keys():
        missing.append("version")
    if missing:
        raise archive.corrupt(f"it has no {', '.join(missing)}")
    for name in _PICKLES:
        if problem := nesting_problem(archive.read(name)):
            raise archive.corrupt(f"{name}: {problem}")


_DEEPEST: Final = 1000
# Codes of the operations that put objects into others: a pickle nests no deeper than it has of these.
_NESTING: Final = b"tldaesuRbioQ\x81\x85\x86\x87\x90\x91\x92\x93"
_FILLS: Final = frozenset(("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"))


def nesting_problem(data: bytes) -> str | None:
    """Return why reading a pickle could overflow the stack of the process, or None."""
    if len(data) - len(data.translate(None, _NESTING)) <= _DEEPEST:
        return None
    try:
        _walk(data)
    except (IndexError, KeyError, TypeError):
        return "its operations do not fit together"
    except ValueError as error:
        return str(error)
    return None


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
