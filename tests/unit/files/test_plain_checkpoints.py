import struct
import sys

import pytest
import torch

import modkit
from modkit.errors import FileError
from modkit.files.checkpoint_values import readable_names
from modkit.files.plain_pickles import _has_known_instructions
from modkit.files.torch_files import TorchFile
from modkit.files.weights_only import is_usual
from tests.cases import for_each
from tests.unit.files.hostile import (
    ORDERED,
    called,
    checkpoint,
    long_int,
    named,
    numbers,
    storage,
    tensor,
    text,
    tuple_of,
    with_object,
)
from tests.unit.files.raw_zip import replaced, unpacked
from tests.unit.files.same_objects import assert_same


def is_filled(data):
    """Return True if a file is not left to torch."""
    opened = TorchFile(data, "x")
    return is_usual(opened, readable_names(opened.content.names))


def place(number):
    """Return the instruction that stores an object at a place of the memo."""
    return b"r" + struct.pack("<I", number)


def line_of(length, other=b"N"):
    """Return an instruction for a name of this length."""
    return b"c" + b"m" * length + b"\n" + other + b"\n"


ACCEPTED = {
    "nothing": b"",
    "number of one byte": b"K\xff",
    "number of two bytes": b"M\xff\xff",
    "number of four bytes": b"J\xff\xff\xff\xff",
    "float": b"G" + b"\n" * 8,
    "constants": b"\x88\x89N",
    "string": text("name"),
    "empty string": text(""),
    "long integer": long_int(1 << 70),
    "name": named("torch", "FloatStorage"),
    "name of 99 letters": line_of(99, b"n" * 99),
    "empty name": b"c\n\n",
    "empty containers": b")]}",
    "list": b"](" + numbers(1) + text("x") + b"e",
    "dict": b"}(" + text("x") + numbers(1) + b"u",
    "single items": b"]Na}NNs",
    "memo": b"Nq\xffh\xffj\xff\xff\xff\xff",
    "last place of the memo": b"N" + place((1 << 21) - 1),
    "tuple of a number": b"N\x85",
    "tuple of two numbers": b"K\1K\2\x86",
    "tuple of three numbers": b"K\1M\2\2J\3\3\3\3\x87",
    "tuple after numbers": b"NNN\x85",
    "tuple of 99 numbers": b"(" + b"K\1" * 99 + b"t",
    "call": called(named("a", "b")),
    "call with a text": named("a", "b") + text("x") + b"\x85R",
    "call with tuples": named("a", "b") + b"N\x85N\x85\x86R",
    "call, memoized": named("a", "b") + b"(" + text("x") + b"tq\1R",
    "call, memoized far away": named("a", "b") + b"]]]\x87" + place(1 << 20) + b"R",
    "storage": storage(),
    "storage of a pair": text("a") + text("b") + b"\x86Q",
    "state": ORDERED + b"}b",
    "empty batch after one of a dict": b"}(" + text("a") + b"Nu(u",
    "many instructions": (b"N" * 999 + text("x")) * 3 + b"N" * 2001,
}
REFUSED = {
    "empty batch of a dict": b"}(u",
    "unknown instruction": b"\xff",
    "extension": b"\x82\1",
    "end in the middle": b"N.N",
    "another protocol": b"\x80\x03",
    "name of 100 letters": line_of(100),
    "second line of 100 letters": line_of(1, b"n" * 100),
    "name without end": b"cabc",
    "number cut off": b"J\1\1\1",
    "string of another length": b"X\5\0\0\0name",
    "string of 4 GB": b"X\xff\xff\xff\xffname",
    "long integer of another length": b"\x8a\5abcd",
    "memo in text": b"Np0\n",
    "place 2 ** 21 of the memo": b"N" + place(1 << 21),
    "place 2 ** 24 of the memo": b"N" + place(1 << 24),
    "tuple of 100 numbers": b"(" + b"K\1" * 100 + b"t",
    "tuple of a text": text("x") + b"\x85",
    "tuple of a tuple": b"N\x85\x85",
    "tuple of an empty tuple": b")\x85",
    "tuple of a list": b"(]t",
    "empty tuple by a mark": b"(t",
    "empty batch of a list": b"](e",
    "tuple, memoized at place 2 ** 21": b"]\x85" + place(1 << 21) + b"R",
    "tuple in the memo": b"]\x85q\1",
    "pop": b"N0",
    "pop to a mark": b"(N1",
    "copy": b"N2",
    "new object": named("torch", "Tensor") + b")\x81",
    "name from the stack": text("os") + text("system") + b"\x93",
    "short string": b"U\1a",
    "set": b"\x8f",
    "frame": b"\x95" + bytes(8),
}


@for_each("case", ACCEPTED)
def test_accepted_instructions(case):
    """Sequences that torch.save writes."""
    assert _has_known_instructions(b"\x80\x02" + ACCEPTED[case] + b".")


@for_each("case", REFUSED)
def test_refused_instructions(case):
    """Sequences that torch.save never writes are left to torch."""
    assert not _has_known_instructions(b"\x80\x02" + REFUSED[case] + b".")


@for_each("content", [b"", b".", b"\x80\x02", b"\x80\x02N", b"\x80\x03N.", b"N."])
def test_the_frame_of_a_pickle(content):
    """A pickle begins with its protocol, 2, and ends with STOP."""
    assert not _has_known_instructions(content)


# Offset, size and stride of tensors whose last element is the last one of a storage of four.
WITHIN = {
    "vector": (0, [4], [1]),
    "last element": (3, [1], [1]),
    "scalar": (3, [], []),
    "strided": (1, [2], [2]),
    "matrix": (0, [2, 2], [2, 1]),
    "transposed": (0, [2, 2], [1, 2]),
    "overlapping": (1, [2, 2], [1, 1]),
    "expanded": (3, [5], [0]),
    "one dimension of one": (0, [1, 4], [1 << 40, 1]),
    "nothing at the end": (4, [0], [1]),
    "nothing far away": (1 << 40, [3, 0], [1, 1]),
}


def described(offset, size, stride):
    """Return the opcodes for a tensor."""
    sizes, strides = (tuple_of(*map(long_int, each)) if each else b")" for each in (size, stride))
    # Tuples hold numbers of up to four bytes.
    small = max([*size, *stride], default=0) < 1 << 31
    if small:
        sizes, strides = (
            tuple_of(*map(numbers, each)) if each else b")" for each in (size, stride)
        )
    return tensor(offset=long_int(offset), size=sizes, stride=strides)


@for_each("case", WITHIN)
def test_tensors_up_to_the_end_of_their_storage(case, tmp_path):
    """They are read as torch reads them."""
    path = tmp_path / "file.pt"
    path.write_bytes(with_object(described(*WITHIN[case])))

    for options in ({}, {"mmap": True}):
        found = modkit.load_checkpoint(path, **options)
        assert_same(found, torch.load(path, weights_only=True, **options))


@for_each("case", [case for case in WITHIN if "nothing" not in case])
def test_tensors_one_element_beyond_their_storage(case, tmp_path):
    """They are refused: torch would allocate a larger storage, with values that are not in the file."""
    offset, size, stride = WITHIN[case]
    path = tmp_path / "file.pt"
    path.write_bytes(with_object(described(offset + 1, size, stride)))

    for options in ({}, {"mmap": True}):
        with pytest.raises(FileError, match="a tensor extends beyond the end of its storage"):
            modkit.load_checkpoint(path, **options)
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)


@for_each(("version", "plain"), [("0", False), ("1", True), ("10", True), ("11", False)])
def test_versions_of_the_container(version, plain):
    """Versions that torch has had; torch reads others, or refuses them."""
    data = checkpoint()
    names = {member.name.partition(b"/")[2].decode() for member in unpacked(data)}
    changes = {name: version.encode() for name in names & {"version", ".data/version"}}

    assert is_filled(replaced(data, changes)) == plain


@for_each("order", [None, "little", "big"])
def test_byte_orders(order):
    """A file of the byte order of this machine is plain; one that states none is little-endian."""
    data = replaced(checkpoint(), {"byteorder": order and order.encode()})
    is_of_this_machine = (order or "little") == sys.byteorder

    assert is_filled(data) == is_of_this_machine
