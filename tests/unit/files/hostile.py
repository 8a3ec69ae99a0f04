"""Readers and files for the tests of hostile input."""

from __future__ import annotations

import contextlib
import functools
import resource
import struct
import time
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

import modkit
from modkit import jit
from modkit.errors import FileError
from tests.unit.files import checkpoint_zoo
from tests.unit.files.checkpoint_zoo import quiet
from tests.unit.files.raw_zip import Member, build, saved, unpacked, with_pickle


def load(path: Path) -> Any:
    """Read a checkpoint."""
    return modkit.load_checkpoint(path)


def load_mapped(path: Path) -> Any:
    """Read a checkpoint from mapped memory."""
    return modkit.load_checkpoint(path, mmap=True)


def average(path: Path) -> Any:
    """Average one checkpoint."""
    return modkit.average_checkpoints([path])


def load_script(path: Path) -> Any:
    """Read a TorchScript archive."""
    with quiet():
        return jit.load(path)


READERS: dict[str, Callable[[Path], Any]] = {
    "load_checkpoint": load,
    "mmap": load_mapped,
    "average_checkpoints": average,
    "jit.load": load_script,
}
OF_CHECKPOINTS = ["load_checkpoint", "mmap", "average_checkpoints"]


@functools.cache
def checkpoint() -> bytes:
    """Return a small file of ``torch.save``."""
    return saved({"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int64)})


@functools.cache
def script() -> bytes:
    """Return a small TorchScript archive."""
    return checkpoint_zoo.scripted()


def seed_of(reader: str) -> bytes:
    """Return an intact file that a reader reads."""
    return script() if reader == "jit.load" else checkpoint()


def folder_of(data: bytes) -> bytes:
    """Return the name of the folder in a file, with a slash."""
    return unpacked(data)[0].name.partition(b"/")[0] + b"/"


@contextlib.contextmanager
def limits(seconds: float = 2.0, memory: int = 1 << 30) -> Generator[None]:
    """Fail if the block takes longer, or let it run out of memory if it takes much more."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + memory, hard))
    start = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    taken = time.process_time() - start
    assert taken < seconds, f"{taken:.1f} s"


def assert_readable(error: Exception) -> None:
    """Check that the text of an error is short and printable."""
    assert str(error).isprintable()
    assert len(str(error)) < 1000


def refusal(reader: str, path: Path) -> FileError:
    """Return the error of a reader, which is quick, names the file and gives a printable reason."""
    with limits():
        try:
            found = READERS[reader](path)
        except FileError as error:
            text = str(error)
        else:
            raise AssertionError(f"{reader} returned {type(found)}")
    assert str(path) in text
    assert text.isprintable()
    assert len(text.rpartition(str(path))[2]) > 12, f"without a reason: {text}"
    return FileError(text)


def numbers(count: int) -> bytes:
    """Return the opcode for an int of 4 bytes."""
    return b"J" + struct.pack("<i", count)


def text(value: str | bytes) -> bytes:
    """Return the opcode for a text."""
    raw = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(raw)) + raw


def long_int(value: int) -> bytes:
    """Return the opcode for an int of any length."""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def tuple_of(*parts: bytes) -> bytes:
    """Return the opcodes for a tuple."""
    return b"(" + b"".join(parts) + b"t"


def named(module: str, name: str) -> bytes:
    """Return the opcode for a class or function."""
    return f"c{module}\n{name}\n".encode()


def called(function: bytes, *arguments: bytes) -> bytes:
    """Return the opcodes for a call, with the empty tuple as pickle writes it."""
    return function + (tuple_of(*arguments) if arguments else b")") + b"R"


def storage(
    key: bytes = text("0"),
    numel: bytes = numbers(4),
    kind: bytes = named("torch", "FloatStorage"),
    location: bytes = text("cpu"),
) -> bytes:
    """Return the opcodes for a storage."""
    return tuple_of(text("storage"), kind, key, location, numel) + b"Q"


ORDERED = called(named("collections", "OrderedDict"))


def tensor(
    of: bytes | None = None,
    offset: bytes = numbers(0),
    size: bytes = tuple_of(numbers(4)),
    stride: bytes = tuple_of(numbers(1)),
    grad: bytes = b"\x89",
    hooks: bytes = ORDERED,
    *more: bytes,
) -> bytes:
    """Return the opcodes for a tensor."""
    rebuild = named("torch._utils", "_rebuild_tensor_v2")
    return called(rebuild, of or storage(), offset, size, stride, grad, hooks, *more)


def state(value: bytes) -> bytes:
    """Return a pickle of a state dict with one entry."""
    return b"\x80\x02}" + text("w") + value + b"s."


def with_object(value: bytes) -> bytes:
    """Return a file whose state dict has one entry."""
    return with_pickle(checkpoint(), state(value))


@functools.cache
def zeros_deflated(count: int) -> tuple[bytes, int]:
    """Return a deflate stream that unpacks to many blocks of 16 MB of zeros, and their checksum."""
    packer, block = zlib.compressobj(9, zlib.DEFLATED, -15), bytes(1 << 24)
    packer.compress(block)
    packer.flush(zlib.Z_FULL_FLUSH)
    repeated = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    crc = 0
    for _ in range(count):
        crc = zlib.crc32(block, crc)
    return repeated * count + packer.flush(zlib.Z_FINISH), crc


def bomb(data: bytes, name: str, blocks: int, *, copies: int = 1) -> bytes:
    """Return a file with deflated members that are huge when unpacked, in place of one of this name."""
    packed, crc = zeros_deflated(blocks)
    size = blocks << 24
    folder = folder_of(data)
    members = [member for member in unpacked(data) if member.name != folder + name.encode()]
    fields = {"crc": crc, "size": size}
    for copy in range(copies):
        stem, _, suffix = name.rpartition(".")
        full = f"{stem}{copy}.{suffix}" if copies > 1 else name
        member = Member(folder + full.encode(), b"", 8, packed, central=fields, descriptor=fields)
        members.append(member)
    return build(members)
