import io
import pickletools
import struct
from pathlib import Path

import pytest
import torch

from modkit.errors import FileError
from modkit.files import inspect
from tests.cases import for_each
from tests.processes import python
from tests.unit.files.checkpoint_zoo import DTYPES, file_written, filled, quiet
from tests.unit.files.hostile import (
    OF_CHECKPOINTS,
    ORDERED,
    READERS,
    assert_readable,
    called,
    checkpoint,
    limits,
    long_int,
    named,
    numbers,
    refusal,
    script,
    state,
    storage,
    tensor,
    text,
    tuple_of,
    with_object,
)
from tests.unit.files.raw_zip import replaced, saved, unpacked, with_pickle
from tests.unit.files.same_objects import assert_same


readers = for_each("reader", OF_CHECKPOINTS)
EMPTY = b"]"
ONE = tuple_of(numbers(1))

# Invalid pickles, and pickles that end early.
BROKEN = {
    "nothing": b"",
    "only the protocol": b"\x80\x02",
    "only the end": b".",
    "nothing to return": b"\x80\x02.",
    "unknown opcode": b"\x80\x02\xff.",
    "unknown protocol": b"\x80\x63N.",
    "no value": b"\x80\x02}X\x01\0\0\0ws.",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xffabc.",
    "text of 2 GB": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "text of 2**60": b"\x80\x04\x8d\0\0\0\0\0\0\0\x10abc.",
    "bytes of 2**60": b"\x80\x04\x8e\0\0\0\0\0\0\0\x10abc.",
    "bytearray of 2**60": b"\x80\x05\x96\0\0\0\0\0\0\0\x10abc.",
    "frame of 2**40": b"\x80\x04\x95\0\0\0\0\0\x01\0\0N.",
    "int of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "negative length": b"\x80\x02\x8b\xff\xff\xff\xffabc.",
    "text that is not UTF-8": b"\x80\x02" + text(b"\xff\xfe") + b".",
    "line without end": b"\x80\x02cos",
    "name that is not UTF-8": b"\x80\x02c\xff\n\xfe\n.",
    "pop from nothing": b"\x80\x020000.",
    "mark without end": b"\x80\x02((((.",
    "tuple without mark": b"\x80\x02t.",
    "odd number of items": b"\x80\x02}(" + numbers(1) + b"u.",
    "append to a number": b"\x80\x02" + numbers(1) + b"Na.",
    "set items of None": b"\x80\x02NNNs.",
    "unhashable key": b"\x80\x02}]Ns.",
    "memo that is not there": b"\x80\x02h\x63.",
    "memo far away": b"\x80\x02j\xff\xff\xff\xff.",
    "memo in text": b"\x80\x02g99999999999999999999\n.",
    "negative memo": b"\x80\x02Np-1\n.",
    "memo that is not a number": b"\x80\x02Npabc\n.",
    "number in text": b"\x80\x02I" + b"9" * 5000 + b"\n.",
    "float in text": b"\x80\x02Fabc\n.",
    "quotes in text": b"\x80\x02S'abc\n.",
    "escapes in text": b"\x80\x02V\\ud8\n.",
    "extension 1": b"\x80\x02\x82\x01.",
    "extension 2": b"\x80\x02\x83\x01\x01.",
    "extension 4": b"\x80\x02\x84\x01\x01\x01\x7f.",
    "buffer": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05N\x98.",
    "id in text": b"\x80\x02Pstorage\n.",
}
# Invalid storages and tensors in a pickle.
WRONG = {
    "id is None": b"NQ",
    "id is a number": numbers(3) + b"Q",
    "id is a text": text("storage") + b"Q",
    "id is empty": b")Q",
    "id is a list": b"](" + text("storage") + b"eQ",
    "id of a module": tuple_of(text("module"), text("x")) + b"Q",
    "id of one part": tuple_of(text("storage")) + b"Q",
    "id of six parts": tuple_of(text("storage"), *([text("0")] * 5)) + b"Q",
    "kind is a dtype": tensor(storage(kind=b"NN0")),
    "kind is a text": tensor(storage(kind=text("FloatStorage"))),
    "kind is a function": tensor(storage(kind=named("torch._utils", "_rebuild_tensor_v2"))),
    "no such storage": tensor(storage(key=text("77"))),
    "key is None": tensor(storage(key=b"N")),
    "key is a list": tensor(storage(key=EMPTY)),
    "key leaves the folder": tensor(storage(key=text("../data.pkl"))),
    "key is a path": tensor(storage(key=text("/etc/passwd"))),
    "key has a zero": tensor(storage(key=text("0\0"))),
    "2**52 elements": tensor(storage(numel=long_int(1 << 52))),
    "2**63 elements": tensor(storage(numel=long_int(1 << 63))),
    "2**200 elements": tensor(storage(numel=long_int(1 << 200))),
    "a million elements": tensor(
        storage(numel=numbers(1_000_000)), size=tuple_of(numbers(1_000_000))
    ),
    "5 elements of 4": tensor(storage(numel=numbers(5)), size=tuple_of(numbers(5))),
    "-1 elements": tensor(storage(numel=numbers(-1))),
    "number of elements is a text": tensor(storage(numel=text("4"))),
    "number of elements is None": tensor(storage(numel=b"N")),
    "wider dtype": tensor(storage(kind=named("torch", "DoubleStorage"))),
    "view behind the end": tensor(offset=numbers(1)),
    "view far behind the end": tensor(offset=long_int(1 << 62)),
    "negative offset": tensor(offset=numbers(-1)),
    "offset of 2**64": tensor(offset=long_int(1 << 64)),
    "negative size": tensor(size=tuple_of(numbers(-1))),
    "negative stride": tensor(stride=tuple_of(numbers(-1))),
    "stride of 2**62": tensor(stride=tuple_of(long_int(1 << 62))),
    "size of 2**62": tensor(size=tuple_of(long_int(1 << 62))),
    "size times stride overflows": tensor(
        size=tuple_of(long_int(1 << 33), long_int(1 << 33)),
        stride=tuple_of(long_int(1 << 31), numbers(1)),
    ),
    "fewer strides": tensor(size=tuple_of(numbers(2), numbers(2))),
    "more strides": tensor(stride=tuple_of(numbers(1), numbers(1))),
    "size is a text": tensor(size=text("4")),
    "sizes are texts": tensor(size=tuple_of(text("4"))),
    "sizes are None": tensor(size=tuple_of(b"N")),
    "offset is None": tensor(offset=b"N"),
    "storage is None": tensor(b"N"),
    "storage is a number": tensor(numbers(0)),
    "storage is its class": tensor(named("torch", "FloatStorage")),
    "one argument": called(named("torch._utils", "_rebuild_tensor_v2"), storage()),
    "no arguments": called(named("torch._utils", "_rebuild_tensor_v2")),
    "arguments are a list": named("torch._utils", "_rebuild_tensor_v2") + b"]R",
    "call of a number": numbers(3) + b")R",
    "call of a text": text("os.system") + b")R",
    "parameter of a number": called(
        named("torch._utils", "_rebuild_parameter"), numbers(3), b"\x88", ORDERED
    ),
    "parameter of integers with a gradient": called(
        named("torch._utils", "_rebuild_parameter"),
        tensor(
            storage(key=text("1"), numel=numbers(2), kind=named("torch", "LongStorage")),
            size=tuple_of(numbers(2)),
        ),
        b"\x88",
        ORDERED,
    ),
    "state of a dict is a number": ORDERED + numbers(3) + b"b",
    "state of a list": EMPTY + b"}b",
    "state of None": b"N}b",
    "new object of a tensor": named("torch", "Tensor") + tuple_of(numbers(-5)) + b"\x81",
}
# Pickles that torch reads or refuses, with the same outcome in modkit.
ODD = {
    "key is a number": tensor(storage(key=numbers(0))),
    "location is a number": tensor(storage(location=numbers(0))),
    "location is a list": tensor(storage(location=EMPTY)),
    "fewer elements than stored": tensor(storage(numel=numbers(2)), size=tuple_of(numbers(2))),
    "narrower dtype": tensor(storage(numel=numbers(8), kind=named("torch", "HalfStorage"))),
    "expanded to 2**62": tensor(size=tuple_of(long_int(1 << 62)), stride=tuple_of(numbers(0))),
    "no elements far away": tensor(size=tuple_of(numbers(0)), offset=numbers(4)),
    "sizes are lists": tensor(size=b"](" + numbers(4) + b"e", stride=b"](" + numbers(1) + b"e"),
    "sizes are bools": tensor(size=tuple_of(b"\x88")),
    "sizes are floats": tensor(size=tuple_of(b"G" + struct.pack(">d", 4.0))),
    "65 dimensions": tensor(size=tuple_of(*[numbers(1)] * 65), stride=tuple_of(*[numbers(1)] * 65)),
    "gradient is None": tensor(grad=b"N"),
    "gradient is a number": tensor(grad=numbers(1)),
    "gradient is a text": tensor(grad=text("x")),
    "hooks are None": tensor(None, numbers(0), ONE, ONE, b"\x89", b"N"),
    "hooks are a number": tensor(None, numbers(0), ONE, ONE, b"\x89", numbers(3)),
    "hooks are a list": tensor(None, numbers(0), ONE, ONE, b"\x89", EMPTY),
    "hooks hold a text": tensor(
        b"", numbers(0), ONE, ONE, b"\x89", ORDERED + numbers(1) + text("x") + b"s"
    ),
    "metadata": tensor(None, numbers(0), ONE, ONE, b"\x89", ORDERED, b"}"),
    "metadata is a number": tensor(None, numbers(0), ONE, ONE, b"\x89", ORDERED, numbers(3)),
    "conj of floats": tensor(
        b"", numbers(0), ONE, ONE, b"\x89", ORDERED, b"}" + text("conj") + b"\x88s"
    ),
    "unknown metadata": tensor(
        b"", numbers(0), ONE, ONE, b"\x89", ORDERED, b"}" + text("data") + b"\x88s"
    ),
    "attribute that is a method": ORDERED + b"}" + text("items") + numbers(5) + b"sb",
    "attribute that is the class": ORDERED + b"}" + text("__class__") + b"}sb",
    "key is bytes": tensor(
        storage(key=called(named("_codecs", "encode"), text("0"), text("latin1")))
    ),
    "location is bytes": tensor(
        storage(location=called(named("_codecs", "encode"), text("cpu"), text("latin1")))
    ),
    "two values": b"N" + tensor(),
}
FUNCTIONS = [
    *(("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec")),
    *(("__builtin__", "eval"), ("builtins", "__import__"), ("subprocess", "Popen")),
    *(("torch", "os.system"), ("torch.serialization", "os.system"), ("torch", "load")),
    *(("torch._utils", "_import_dotted_name"), ("torch.hub", "load"), ("runpy", "run_path")),
    *(("collections", "OrderedDict.__init__.__globals__"), ("pickle", "loads"), ("", "")),
    *(("torch.storage", "os.system"), ("os", "StorageType"), ("torch", "_C._jit_init")),
    *(("sys", "modules"), ("argparse", "_sys.exit"), ("webbrowser", "open"), ("code", "interact")),
]


def written(folder, data, name="file.pt"):
    """Write a file."""
    path = folder / name
    path.write_bytes(data)
    return path


@readers
@pytest.mark.parametrize("case", BROKEN)
def test_broken_pickles(case, reader, tmp_path):
    """A pickle that cannot be read is refused with a reason."""
    refusal(reader, written(tmp_path, with_pickle(checkpoint(), BROKEN[case])))


@for_each("case", BROKEN)
def test_broken_pickles_in_scripts(case, tmp_path):
    """A broken pickle in a TorchScript archive is an error of modkit or of torch's C++ reader."""
    path = written(tmp_path, replaced(script(), {"data.pkl": BROKEN[case]}))
    with pytest.raises(RuntimeError), limits():
        READERS["jit.load"](path)


@readers
@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors(case, reader, tmp_path):
    """Storages that are not in the file and views that leave their storage are refused."""
    refusal(reader, written(tmp_path, with_object(WRONG[case])))


@for_each("reader", ["load_checkpoint", "mmap"])
@for_each("case", ODD)
def test_odd_objects(case, reader, tmp_path):
    """A pickle that torch does not write is refused, or read as torch reads it."""
    path = written(tmp_path, with_object(ODD[case]))
    try:
        with limits():
            found = READERS[reader](path)
    except FileError as error:
        assert_readable(error)
        return
    with quiet():
        assert_same(found, torch.load(path, weights_only=True))


ATTRIBUTES = [
    *("items", "_metadata", "values", "keys", "__class__", "__len__", "get"),
    *("detach", "cpu", "numel", "data_ptr", "untyped_storage", "is_floating_point", "to"),
    *("shape", "dtype", "contiguous", "__dict__", "grad", "requires_grad", "data", "is_meta"),
]


@readers
@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_attributes_that_hide_methods(attribute, reader, tmp_path):
    """Attributes from a file do not reach into the code that reads it."""
    table = b"}" + text(attribute) + numbers(5) + b"s"
    parameter = called(
        named("torch._utils", "_rebuild_parameter_with_state"), tensor(), b"\x88", ORDERED, table
    )
    by_type = called(
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("torch._utils", "_rebuild_tensor_v2"),
        named("torch", "Tensor"),
        tuple_of(storage(), numbers(0), tuple_of(numbers(4)), ONE, b"\x89", ORDERED),
        table,
    )
    entry = text("w") + tensor() + b"s"
    for number, pickled in enumerate(
        (
            b"\x80\x02" + ORDERED + entry + table + b"b.",
            state(parameter),
            state(by_type),
        )
    ):
        path = written(tmp_path, with_pickle(checkpoint(), pickled), f"{number}.pt")
        try:
            with limits():
                READERS[reader](path)
            inspect(path)
        except FileError as error:
            assert_readable(error)


@pytest.mark.parametrize("size", [-2, -1])
def test_negative_dimensions_of_nothing(size, tmp_path):
    """Torch makes tensors without elements that have a negative dimension."""
    sizes = tuple_of(numbers(2), numbers(0), numbers(size))
    strides = tuple_of(numbers(1), numbers(1), numbers(1))
    path = written(tmp_path, with_object(tensor(size=sizes, stride=strides)))

    refusal("average_checkpoints", path)


def test_inspecting_odd_tensors(tmp_path):
    """Torch cannot compute the size of the tensor in this pickle."""
    rebuild = named("torch._utils", "_rebuild_meta_tensor_no_storage")
    sizes = tuple_of(numbers(2), numbers(-3))
    odd = called(rebuild, named("torch", "float32"), sizes, sizes, b"\x89")
    path = written(tmp_path, with_object(odd))
    try:
        inspect(path)
    except FileError as error:
        assert_readable(error)


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    """Return a pickle of containers within containers."""
    return b"\x80\x02" + opening * depth + closing * depth + b"."


DEEP = {
    "lists": nested(b"]", b"a", 200_000)[:-2] + b".",
    "tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "dicts": b"\x80\x02}" + b"N}" * 200_000 + b"s" * 200_000 + b".",
    "marks": b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".",
    "built dicts": b"\x80\x02"
    + (ORDERED + b"}" + text("a")) * 50_000
    + b"N"
    + b"sb" * 50_000
    + b".",
}


@readers
@pytest.mark.parametrize("case", DEEP)
def test_depth(case, reader, tmp_path):
    """Deep nesting is refused: code that walks it would overflow its stack."""
    refusal(reader, written(tmp_path, with_pickle(checkpoint(), DEEP[case])))


def test_storages_of_scripts(tmp_path):
    """Torch reads as many bytes as the pickle states, beyond the end of a smaller storage."""
    path = written(tmp_path, replaced(script(), {"data/0": b"1234"}))

    assert "'archive/data/0' has 4 bytes, not 24" in str(refusal("jit.load", path))


@for_each("dtype", DTYPES, ids=str)
def test_dtypes_of_scripts(dtype, tmp_path):
    """Storages of each dtype that torch writes are known."""
    module = torch.nn.Module()
    module.register_buffer("value", filled(dtype))
    path = tmp_path / "file.pt"
    with quiet():
        torch.jit.save(torch.jit.script(module), path)
        assert_same(READERS["jit.load"](path).value, torch.jit.load(path).value)


@pytest.mark.parametrize("name", ["training", "weight"])
def test_attributes_that_scripts_do_not_have(name, tmp_path):
    """Torch raises IndexError; modkit raises FileError."""
    (pickled,) = (m.data for m in unpacked(script()) if m.name.endswith(b"/data.pkl"))
    changed = pickled.replace(name.encode(), b"x" * len(name))
    path = written(tmp_path, replaced(script(), {"data.pkl": changed}))

    assert "corrupt" in str(refusal("jit.load", path))


def test_float4_is_not_averaged(tmp_path):
    """Torch copies no tensors of this dtype."""
    path = written(tmp_path, saved({"w": filled(torch.float4_e2m1fn_x2)}))

    assert "float4" in str(refusal("average_checkpoints", path))


def shared(depth: int, pair: bytes) -> bytes:
    """Return opcodes for pairs of pairs, which are 2**depth objects for who follows them."""
    return b")" + b"".join(b"q%c" % n + b"h%c" % n + pair for n in range(depth))


BOMBS = {
    "hash of a tuple": b"\x80\x02}" + shared(60, b"\x86") + b"Ns.",
    "hash in an ordered dict": b"\x80\x02" + ORDERED + shared(60, b"\x86") + b"Ns.",
    "hash in a set": b"\x80\x02"
    + called(named("__builtin__", "set"), b"](" + shared(60, b"\x86") + b"e")
    + b".",
    "hash of a key": state(tensor(storage(key=shared(60, b"\x86")))),
    "hash of a location": state(tensor(storage(location=shared(60, b"\x86")))),
    "memo of 16 GB": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo of 4 GB": b"\x80\x02Nr\xff\xff\xff\x0f.",
    "memo in text": b"\x80\x02Np2000000000\n.",
    "bytearray of 64 GB": state(called(named("__builtin__", "bytearray"), long_int(1 << 36))),
    "tensor of 64 GB": state(called(named("torch", "Tensor"), long_int(1 << 34))),
    "typed tensor of 64 GB": state(called(named("torch", "FloatTensor"), long_int(1 << 34))),
    "new tensor of 64 GB": state(named("torch", "Tensor") + tuple_of(long_int(1 << 34)) + b"\x81"),
    "storage of 64 GB": state(called(named("torch.storage", "UntypedStorage"), long_int(1 << 36))),
    "slow encoding": state(
        called(named("_codecs", "encode"), text("\u00e9" * 200_000), text("punycode"))
    ),
    "slow domain name": state(
        called(named("_codecs", "encode"), text("\u00e9" * 200_000), text("idna"))
    ),
}


@readers
@pytest.mark.parametrize("case", BOMBS)
def test_bombs(case, reader, tmp_path):
    """A few bytes do not make a reader compute or allocate without end."""
    path = written(tmp_path, with_pickle(checkpoint(), BOMBS[case]))
    refusal(reader, path)


@for_each("case", [case for case in BOMBS if "memo" not in case])
def test_bombs_in_old_files(case, tmp_path):
    """Bombs in files from before torch 1.6 are refused."""
    intact = saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    parts = pickles_of(intact)
    path = written(tmp_path, b"".join([*parts[:3], BOMBS[case], *parts[4:]]))

    refusal("average_checkpoints", path)


def pickles_of(data):
    """Return the five pickles that an old file begins with, and the rest."""
    file, parts = io.BytesIO(data), []
    for _ in range(5):
        start = file.tell()
        for _ in pickletools.genops(file):
            pass
        parts.append(data[start : file.tell()])
    return [*parts, data[file.tell() :]]


@readers
def test_shared_lists(reader, tmp_path):
    """Lists that hold another list twice are small; nothing may follow all 2**60 paths."""
    pickled = b"\x80\x02}" + text("w") + b"]"
    for n in range(1, 60):
        pickled += b"q%c0](h%ch%ce" % (n, n, n)
    path = written(tmp_path, with_pickle(checkpoint(), pickled + b"s."))
    try:
        with limits():
            found = READERS[reader](path)["w"]
    except FileError as error:
        assert_readable(error)
    else:
        assert found[0] is found[1]


def attempts(marker: Path) -> dict[str, bytes]:
    """Return pickles that would make a file, if anything of them were executed."""
    command, code = f"touch {marker}", f"open({str(marker)!r}, 'w').close()"
    found: dict[str, bytes] = {}
    for module, name in FUNCTIONS:
        argument = text(code if name in {"eval", "exec"} else command)
        full = f"{module}.{name}"
        old, new = named(module, name), text(module) + text(name) + b"\x93"
        found[f"REDUCE {full}"] = state(called(old, argument))
        found[f"STACK_GLOBAL {full}"] = b"\x80\x04" + state(called(new, argument))[2:]
        found[f"NEWOBJ {full}"] = state(old + tuple_of(argument) + b"\x81")
        found[f"NEWOBJ_EX {full}"] = b"\x80\x04" + state(old + tuple_of(argument) + b"}\x92")[2:]
        found[f"OBJ {full}"] = state(b"(" + old + argument + b"o")
        found[f"INST {full}"] = state(b"(" + argument + f"i{module}\n{name}\n".encode())
        found[f"BUILD {full}"] = state(old + b"}" + text("x") + argument + b"sb")
        found[f"name alone {full}"] = state(old)
    for pair in (("argparse", "Namespace"), ("collections", "Counter"), ("torch", "Size")):
        found[f"getattr of {pair[1]}"] = state(
            called(called(named("builtins", "getattr"), named(*pair), text("__init__")), text("x"))
        )
    return found


@readers
def test_nothing_is_executed(reader, tmp_path):
    """Calls of functions that are not on torch's list are refused, whatever opcode makes them."""
    marker = tmp_path / "executed"
    for number, (name, pickled) in enumerate(attempts(marker).items()):
        path = written(tmp_path, with_pickle(checkpoint(), pickled), f"{number}.pt")
        refusal(reader, path)
        assert not marker.exists(), name


def test_refused_files_do_not_change_later_loads(tmp_path):
    """A pickle cannot assign attributes of the objects that all loads share."""
    path = tmp_path / "m.pt"
    path.write_bytes(checkpoint())
    expected = READERS["load_checkpoint"](path)
    change = b"}" + text("dtype") + named("torch", "int32") + b"sb"
    hostile = tmp_path / "hostile.pt"
    hostile.write_bytes(with_object(named("torch", "FloatStorage") + change))

    refusal("load_checkpoint", hostile)
    assert_same(READERS["load_checkpoint"](path), expected)


def test_nothing_of_scripts_is_executed(tmp_path):
    """Calls of functions in TorchScript archives are refused and not executed."""
    marker = tmp_path / "executed"
    for number, (name, pickled) in enumerate(attempts(marker).items()):
        path = written(tmp_path, replaced(script(), {"data.pkl": pickled}), f"{number}.pt")
        with pytest.raises(RuntimeError), limits():
            READERS["jit.load"](path)
        assert not marker.exists(), name


CRASH = """
import sys, torch, modkit
from torch._subclasses.fake_tensor import FakeTensorMode
for how in ("meta", "fake"):
    try:
        if how == "fake":
            with FakeTensorMode():
                found = modkit.load_checkpoint(sys.argv[1])
        else:
            found = modkit.load_checkpoint(sys.argv[1], map_location=how)
    except modkit.errors.FileError:
        pass
    else:
        assert found["w"].shape == (4, 4), found
"""


def test_bytes_of_nothing_are_not_reversed(tmp_path):
    """torch.load dies when it reverses the bytes of storages that have no memory."""
    path = written(tmp_path, file_written("big endian"))
    run = python(CRASH, path)

    assert run.returncode == 0, run.stderr
