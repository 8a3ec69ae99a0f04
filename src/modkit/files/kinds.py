"""The kind of a file, from its first bytes and the names in its zip directory. No code is executed."""

import io
import itertools
import pickletools
import stat
import warnings
from pathlib import Path
from typing import Final

from modkit.errors import FileError, printable
from modkit.files.zip_check import Archive


TORCH_SAVE: Final = "torch.save file"
LEGACY: Final = "torch.save file (before torch 1.6)"
TORCHSCRIPT: Final = "TorchScript archive"
EXPORT: Final = "torch.export archive"
SAFETENSORS: Final = "safetensors file"
SHARDED: Final = "sharded checkpoint"
ZIP: Final = "zip file"
CORRUPT_ZIP: Final = "corrupt zip file"
PICKLE: Final = "pickle"
TEXT: Final = "text file"
EMPTY: Final = "empty file"
UNKNOWN: Final = "unknown file"

_ADVICE: Final = {
    TORCH_SAVE: "modkit.load_checkpoint reads it",
    LEGACY: "modkit.load_checkpoint reads it",
    TORCHSCRIPT: "modkit.jit.load reads it",
    EXPORT: "torch.export.load reads it",
    SAFETENSORS: "safetensors.torch.load_file reads it",
    PICKLE: "loading it with pickle would execute code",
}
_HEAD: Final = 1 << 20
_MAX_OPCODES: Final = 10_000
# The library safetensors refuses longer headers too.
_MAX_HEADER: Final = 100_000_000
# The first object of the pickles that torch.save wrote before torch 1.6.
_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C
_EXECUTES: Final = {"REDUCE", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD"}
_NOT_REGULAR: Final = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFSOCK: "socket",
    stat.S_IFDIR: "directory",
}


def wrong_kind(path: Path, kind: str, wanted: str) -> FileError:
    """Return the error for an intact file of another kind than the caller wants."""
    advice = first_line(path) if kind == TEXT else _ADVICE.get(kind)
    article = "an" if kind[0] in "aeu" else "a"
    return FileError(
        f"{path} is {article} {kind}, not {wanted}" + (f": {advice}" if advice else ""), kind
    )


def check_regular(path: Path) -> int:
    """Return the size of a regular file without opening it, because opening a FIFO can block.

    Raises:
        FileNotFoundError: If there is no such file.
        FileError: If it is a FIFO, a device, a socket or a directory.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        what = _NOT_REGULAR.get(stat.S_IFMT(found.st_mode), "special file")
        raise FileError(f"{path} is a {what}, not a regular file: nothing was read from it", what)
    return found.st_size


def kind_of(path: Path) -> str:
    """Return the kind of a regular file, as :class:`modkit.files.FileInfo` names it."""
    size = check_regular(path)
    with path.open("rb") as file:
        head = file.read(min(_HEAD, size))
        if not head:
            return EMPTY
        if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            try:
                return _kind_of_zip(Archive(file, str(path)))
            # zipfile raises IndexError for a member with an empty name.
            except (FileError, IndexError):
                return CORRUPT_ZIP
    # A cut-off safetensors file is one too: its header names more bytes than the file has.
    if 2 <= int.from_bytes(head[:8], "little") <= _MAX_HEADER and head[8:9] == b"{":
        return SAFETENSORS
    return _kind_of_pickle(head, whole=len(head) == size) or (TEXT if _is_text(head) else UNKNOWN)


def _kind_of_zip(archive: Archive) -> str:
    names = archive.members.keys()
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return TORCHSCRIPT
    if names & {"serialized_exported_program.json", "archive_format"}:
        return EXPORT
    return TORCH_SAVE if "data.pkl" in names else ZIP


def first_line(path: Path) -> str:
    """Return the start of a text file: a Git LFS pointer and an HTML page are recognized by it."""
    with path.open("rb") as file:
        text = file.read(1000).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    return f"it begins with {printable(text.splitlines()[0][:60] if text else '')!r}"


def _is_text(head: bytes) -> bool:
    try:
        # The last character may be cut off.
        text = (head[:-3] if len(head) == _HEAD else head).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter in "\ufeff\t\n\r\f" for letter in text)


def looks_like_pickle(data: bytes) -> bool:
    """Return True if the bytes are a pickle, or if unpickling them would execute code on the way."""
    return _kind_of_pickle(data[:_HEAD], whole=len(data) <= _HEAD) is not None


def _kind_of_pickle(head: bytes, *, whole: bool) -> str | None:
    """Disassemble the start of a pickle of any protocol, checking that its stack never underflows.

    English text and source code begin with letters that are opcodes of protocol 0, but fail within a
    few instructions.
    """
    stream = io.BytesIO(head)
    # For each open mark, the number of objects above it; the first entry is below all marks.
    stack = [0]
    seen: list[str] = []
    valid = False
    try:
        with warnings.catch_warnings():
            # Python warns of escape sequences that are not valid in its own strings.
            warnings.simplefilter("ignore")
            for opcode, argument, _ in itertools.islice(pickletools.genops(stream), _MAX_OPCODES):
                if not _applied(opcode, argument, stack):
                    break
                if argument == _LEGACY_MAGIC and len(seen) < 3:
                    return LEGACY
                seen.append(opcode.name)
            else:
                valid = True
    except (ValueError, UnicodeError):
        # Where the bytes that were read end, the pickle may go on.
        valid = stream.tell() == len(head) and not whole
    names_code = not {"GLOBAL", "STACK_GLOBAL"}.isdisjoint(seen)
    if "INST" in seen or (names_code and not _EXECUTES.isdisjoint(seen)):
        return PICKLE
    binary = head[0] == 0x80 and len(seen) >= 3
    if not valid:
        return PICKLE if binary and stream.tell() == len(head) else None
    long_enough = binary or len(seen) >= 16 or names_code
    return PICKLE if long_enough or (whole and stream.tell() == len(head)) else None


def _applied(opcode: pickletools.OpcodeInfo, argument: object, stack: list[int]) -> bool:
    """Apply an opcode to the numbers of objects between marks; return False if it cannot be."""
    if opcode.name in {"GLOBAL", "INST"} and not all(
        part.isidentifier() for part in str(argument).replace(" ", ".").split(".")
    ):
        return False
    if opcode.name == "MARK":
        stack.append(0)
        return True
    if opcode.name == "POP" and not stack[-1] and len(stack) > 1:
        stack.pop()
        return True
    takes = list(opcode.stack_before)
    if pickletools.markobject in takes:
        if len(stack) < 2:
            return False
        stack.pop()
        takes = takes[: takes.index(pickletools.markobject)]
    stack[-1] += len(opcode.stack_after) - len(takes)
    return stack[-1] - len(opcode.stack_after) >= 0
