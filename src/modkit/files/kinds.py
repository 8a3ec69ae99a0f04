"""The kind of a file, from its first bytes and its members. No code is executed."""

import hashlib
import re
from collections.abc import Callable, Collection
from typing import Final

from modkit.errors import FileError, printable
from modkit.files import zip_archive
from modkit.files.zip_archive import Archive, read_some, size_of


TORCH_SAVE: Final = "torch.save file"
LEGACY: Final = f"{TORCH_SAVE} (before torch 1.6)"
TORCHSCRIPT: Final = "TorchScript archive"
FLATBUFFER: Final = "TorchScript flatbuffer"
EXPORT: Final = "torch.export archive"
SAFETENSORS: Final = "safetensors file"
SHARDED: Final = "sharded checkpoint"
ZIP: Final = "zip file"
CHAIN: Final = zip_archive.CHAIN
CORRUPT_ZIP: Final = zip_archive.CORRUPT_ZIP
PACKAGE: Final = "torch.package archive"
DISTRIBUTED: Final = "distributed checkpoint"
PACKED: Final = "packed file"
PICKLE: Final = "pickle"
TEXT: Final = "text file"
EMPTY: Final = "empty file"
UNKNOWN: Final = "unknown file"

ADVICE: Final = {
    TORCH_SAVE: "read it with modkit.load_checkpoint",
    LEGACY: "read it with modkit.load_checkpoint; it has no checksums, and `modkit convert` writes "
    "it with them",
    **dict.fromkeys((TORCHSCRIPT, FLATBUFFER), "read it with modkit.jit.load"),
    EXPORT: "read it with torch.export.load",
    SAFETENSORS: "read it with safetensors.torch.load_file",
    PICKLE: "torch.load(..., weights_only=True) may read it; pickle would execute code that it "
    "names. fickling and picklescan analyse such files",
    PACKAGE: "read it with torch.package.PackageImporter, which executes its code",
    PACKED: "unpack it first",
    EMPTY: "nothing was written to it",
}
_HEAD: Final = 1 << 16
# The JSON of a safetensors file or an index, which takes up to 30 times its size in memory: ten
# times that of the largest models.
MOST_JSON: Final = 32 << 20
# gzip, bzip2, xz, zstd, 7z and rar.
_PACKERS: Final = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf", b"Rar!")
_LFS: Final = "version https://git-lfs"
# The first object of the pickles that torch.save wrote before torch 1.6: a number of ten bytes. The
# instructions for the protocol and for a frame may be before it.
_LEGACY_MAGIC: Final = b"\x8a\n" + 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
_MAGIC_END: Final = 2 + 9 + len(_LEGACY_MAGIC)


def kind_of(source: int | bytes) -> str:
    """Return the kind of a file, from its first bytes.

    Args:
        source: The descriptor of the file, or its content.
    """
    if read_some(source, 0, 4) in {b"PK\x03\x04", b"PK\x05\x06"}:
        try:
            return kind_of_members(Archive(source, "").members)
        except FileError as error:
            return error.kind

    head = read_some(source, 0, _HEAD)
    if not head:
        return EMPTY
    # A tar archive has its mark behind the fields of the first file.
    if head.startswith(_PACKERS) or head[257:262] == b"ustar":
        return PACKED
    # The identifier of a flatbuffer comes after an offset of four bytes.
    if head[4:8] == b"PTMF":
        return FLATBUFFER
    # A JSON header after its length.
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= MOST_JSON:
        return SAFETENSORS
    # Pickles of the later protocols begin with their number.
    if head[:1] == b"\x80" and head[1:2] in {b"\2", b"\3", b"\4", b"\5"}:
        return LEGACY if _LEGACY_MAGIC in head[:_MAGIC_END] else PICKLE
    # The last character may be cut off. Surrogates are not printable.
    if len(head) == _HEAD:
        head = head[:-3]
    characters = head.decode("utf-8", "surrogateescape")
    is_text = all(c.isprintable() or c in "\ufeff\t\n\r\f" for c in characters)
    return TEXT if is_text else UNKNOWN


def kind_of_members(names: Collection[str]) -> str:
    """Return the kind of a zip file from the names of its members.

    Args:
        names: The names without the folder that contains all members.
    """
    if ".data/extern_modules" in names:
        return PACKAGE
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return TORCHSCRIPT
    if "serialized_exported_program.json" in names or "archive_format" in names:
        return EXPORT
    return TORCH_SAVE if "data.pkl" in names else ZIP


def wrong_kind(source: int | bytes, what: str, expected: str) -> FileError:
    """Return the error for a file of another kind than expected: its kind, and what reads it.

    Args:
        source: The descriptor of the file, or its content.
        what: How errors name the file.
        expected: The kind that was expected, with its article.
    """
    kind = kind_of(source)
    if kind in {CORRUPT_ZIP, CHAIN, ZIP}:
        try:
            Archive(source, what)
        except FileError as error:
            return error

    advice = first_line(source) if kind == TEXT else ADVICE.get(kind)
    article = "an" if kind[0] in "aeu" else "a"
    message = f"{what} is {article} {kind}, not {expected}"
    return FileError(f"{message}: {advice}" if advice else message, kind)


def first_line(source: int | bytes) -> str:
    """Return how a text file begins, which identifies a Git LFS pointer or an HTML page.

    Args:
        source: The descriptor of the file, or its content.
    """
    beginning = read_some(source, 0, 1000).decode("utf-8", "replace")
    lines = beginning.lstrip("\ufeff \t\r\n").splitlines()
    begin = f"it begins with {printable(lines[0][:60] if lines else '')!r}"
    is_pointer = bool(lines) and lines[0].startswith(_LFS)
    return f"{begin}: a Git LFS pointer; `git lfs pull` downloads the file" if is_pointer else begin


def parse_digest(sha256: str) -> str:
    """Return the hexadecimal digits of a SHA-256 in lower case.

    Args:
        sha256: The digits, in upper or lower case, optionally after ``sha256:``.

    Raises:
        ValueError: If it is not a SHA-256.
    """
    digits = sha256.strip().lower().removeprefix("sha256:")
    if not re.fullmatch("[0-9a-f]{64}", digits):
        raise ValueError(f"{sha256!r} is not a SHA-256 digest: 64 hexadecimal digits")
    return digits


def sha256_of(
    source: int | bytes, progress: Callable[[float], object] = lambda fraction: None
) -> str:
    """Return the SHA-256 of a file, as ``sha256sum`` prints it."""
    digest = hashlib.sha256()
    position = 0
    while chunk := read_some(source, position, 1 << 20):
        digest.update(chunk)
        position += len(chunk)
        progress(position / max(position, size_of(source)))
    return digest.hexdigest()


def compare_digests(what: str, expected: str, actual: str) -> None:
    """Raise FileError if a file has another SHA-256 than expected."""
    if actual != expected:
        raise FileError(f"{what} has the SHA-256 {actual}, not {expected}: it is another file")


def archive_of(source: int | bytes, what: str, kind: str) -> Archive:
    """Open a zip file of torch.

    Args:
        source: The descriptor of the file, or its content.
        what: How errors name the file.
        kind: The kind that it must be of.

    Returns:
        The archive, whose small members were tested.

    Raises:
        FileError: If it is of another kind, or not as torch writes it.
    """  # noqa: DOC501 - wrong_kind() makes a FileError
    if read_some(source, 0, 2) == b"PK":
        archive = Archive(source, what)
        if kind_of_members(archive.members) == kind:
            check_facts(archive)
            return archive
    raise wrong_kind(source, what, f"a {kind}")


_VERSION: Final = re.compile(rb"\s*\d{1,19}\s*")
# The content of the small members of an archive. Its readers trust these: they divide by the
# alignment, which ends the process if it is 0.
_FACTS: Final = {
    "byteorder": re.compile(b"little|big"),
    ".storage_alignment": re.compile(rb"[1-9]\d{0,9}\s*"),
    ".data/serialization_id": re.compile(rb"\d{1,100}"),
    **dict.fromkeys((".format_version", ".data/version", "version"), _VERSION),
}


def check_facts(archive: Archive) -> None:
    """Test the small members, such as the version, for content that torch's readers trust.

    Args:
        archive: The archive, a zip file of torch.

    Raises:
        FileError: If one has content that torch never writes.
    """
    for name in _FACTS.keys() & archive.members.keys():
        content = archive.text(name)
        if not _FACTS[name].fullmatch(content):
            raise archive.corrupt(f"{name} is {content[:40]!r}, which torch never writes")
