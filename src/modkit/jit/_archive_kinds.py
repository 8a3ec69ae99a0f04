"""Which kind of file something is, by its first bytes and its members, and what reads it."""

import json
import pickletools
import struct
import zipfile
from collections.abc import Callable
from typing import IO, Final

from modkit.errors import FileError
from modkit.files.zip_check import Archive


TORCHSCRIPT: Final = "TorchScript archive"
OLD: Final = "TorchScript archive of the format with a model.json"
STATE_DICT: Final = "torch.save file"
LEGACY: Final = "torch.save file of the format before torch 1.6"
PICKLE: Final = "pickle"
EXPORT: Final = "torch.export archive"
INDUCTOR: Final = "AOTInductor package"
PACKAGE: Final = "torch.package archive"
SAFETENSORS: Final = "safetensors file"
ZIP: Final = "zip file"
TRUNCATED_ZIP: Final = "truncated zip file"
DAMAGED_ZIP: Final = "damaged zip file"
EMPTY: Final = "empty file"
LFS: Final = "Git LFS pointer"
HTML: Final = "HTML page"
TEXT: Final = "text file"
UNKNOWN: Final = "file of an unknown format"

# What to do with a file of a kind; the kinds that are missing here are told in other words.
ADVICE: Final[dict[str, str]] = {
    OLD: "load it with an older release of torch, which reads it, and save it again with that",
    STATE_DICT: "its state_dict or checkpoint is read with torch.load(..., weights_only=True)",
    LEGACY: "its state_dict or checkpoint is read with torch.load(..., weights_only=True)",
    PICKLE: "if it comes from torch.save, read it with torch.load(..., weights_only=True)",
    EXPORT: "read it with torch.export.load(...)",
    INDUCTOR: "run it with torch._inductor.aoti_load_package(...)",
    PACKAGE: "read it with torch.package.PackageImporter(...)",
    SAFETENSORS: "read it with safetensors.torch.load_file(...)",
    ZIP: "it has none of the members of an archive of torch",
    TRUNCATED_ZIP: "the end of it is missing, so copy or download it again",
    DAMAGED_ZIP: "its table of members cannot be read, so copy or download it again",
    EMPTY: "the model was not written, or not copied",
    LFS: "it stands for the real file, which `git lfs pull` gets",
    HTML: "a server has sent it in place of the model, so look into it",
    "ONNX model": "read it with onnx.load(...)",
    "ExecuTorch program": "ExecuTorch runs it",
    "HDF5 file": "Keras or h5py read it",
    "NumPy file": "read it with numpy.load(...)",
    "gzip file": "unpack it first",
    "tar file": "unpack it first",
}

# (where, first bytes, kind)
_MAGIC: Final = (
    (0, b"\x89HDF\r\n", "HDF5 file"),
    (0, b"\x93NUMPY", "NumPy file"),
    (0, b"\x1f\x8b", "gzip file"),
    (257, b"ustar", "tar file"),
    (4, b"ET1", "ExecuTorch program"),
    (0, b"version https://git-lfs", LFS),
)
_LEGACY_MAGIC: Final = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_HEAD: Final = 4096


def kind_of(file: IO[bytes]) -> str:
    """Return the kind of a file; it may stand anywhere, before and after."""
    file.seek(0)
    head = file.read(_HEAD)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _kind_of_zip(file)
    if not head:
        return EMPTY
    for place, magic, kind in _MAGIC:
        if head[place:].startswith(magic):
            return kind
    if _LEGACY_MAGIC in head[:16]:
        return LEGACY
    for kind, fits in _TESTS:
        if fits(file, head):
            return kind
    return UNKNOWN


def _kind_of_zip(file: IO[bytes]) -> str:
    try:
        if not zipfile.is_zipfile(file):
            return TRUNCATED_ZIP
        names = Archive(file, "").members.keys()
    except (zipfile.BadZipFile, FileError):
        return DAMAGED_ZIP
    if "model.json" in names and "data.pkl" not in names:
        return OLD
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return TORCHSCRIPT
    if ".data/extern_modules" in names:
        return PACKAGE
    if any(name.startswith("data/aotinductor/") for name in names):
        return INDUCTOR
    if "serialized_exported_program.json" in names or "archive_format" in names:
        return EXPORT
    return STATE_DICT if "data.pkl" in names else ZIP


def read_safetensors_header(file: IO[bytes]) -> dict[str, object] | None:
    """Return the description that a safetensors file begins with, or None if it is none."""
    size = file.seek(0, 2)
    file.seek(0)
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(size - 8, 100_000_000):
        return None
    text = file.read(length)
    if not text.startswith(b"{"):
        return None
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType]


def _is_pickle(file: IO[bytes], head: bytes) -> bool:
    if not (head[0] == 0x80 and 2 <= head[1] <= 5 if len(head) > 1 else False):
        return False
    try:
        for count, _ in enumerate(pickletools.genops(head)):
            if count > 8:
                break
    except ValueError:
        return False
    return True


def _is_onnx(file: IO[bytes], head: bytes) -> bool:
    # The first field is the version of the format, the second mostly the name of the producer.
    return head[0] == 0x08 and 1 <= head[1] < 32 and head[2:3] in b"\x12\x3a" if head[2:] else False


def _is_html(file: IO[bytes], head: bytes) -> bool:
    return head.lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _is_text(file: IO[bytes], head: bytes) -> bool:
    try:
        # A character may be cut in two at the end of what was read.
        text = head[:-3].decode("utf-8") if len(head) == _HEAD else head.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter in "\t\n\r\f" for letter in text)


_TESTS: Final[tuple[tuple[str, Callable[[IO[bytes], bytes], bool]], ...]] = (
    (SAFETENSORS, lambda file, head: read_safetensors_header(file) is not None),
    (PICKLE, _is_pickle),
    ("ONNX model", _is_onnx),
    (HTML, _is_html),
    (TEXT, _is_text),
)


def wrong_kind(kind: str, what: str) -> FileError:
    """Return the error for a file that is no TorchScript archive."""
    article = "an" if kind[0] in "AEHOe" else "a"
    advice = ADVICE.get(kind)
    other = "one that torch still reads" if kind == OLD else "a TorchScript archive"
    text = f"{what} is {article} {kind}, not {other}"
    return FileError(f"{text}: {advice}" if advice else text, kind)
