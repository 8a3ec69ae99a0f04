import io
import pickle
import pickletools
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
from tests.unit.files.hostile_files import BOMBS, BROKEN, ODD_PICKLES, ONE, REFUSED_PICKLES
from tests.unit.files.raw_zip import replaced, saved, unpacked, with_pickle
from tests.unit.files.same_objects import assert_same, outcome


readers = for_each("reader", OF_CHECKPOINTS)

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
@pytest.mark.parametrize("case", REFUSED_PICKLES)
def test_refused(case, reader, tmp_path):
    """Pickles that cannot be read, wrong tensors, deep ones and bombs are refused with a reason."""
    refusal(reader, written(tmp_path, REFUSED_PICKLES[case](checkpoint())))


@readers
@for_each("case", ODD_PICKLES)
def test_odd_objects(case, reader, tmp_path):
    """A pickle that torch does not write is refused, or read and averaged as torch reads it."""
    path = written(tmp_path, ODD_PICKLES[case](checkpoint()))
    try:
        with limits():
            found = READERS[reader](path)
    except FileError as error:
        assert_readable(error)
        return
    is_average = reader == "average_checkpoints"
    with quiet():
        expected, error = outcome(torch.load, path, "cpu" if is_average else None)
    # A part that torch refuses, besides the content, does not hide the tensors.
    if is_average and error is not None:
        return
    assert error is None
    if is_average:
        expected = {name: tensor.detach().clone() for name, tensor in dict.items(expected)}
    assert_same(found, expected)


@for_each("case", BROKEN)
def test_broken_pickles_in_scripts(case, tmp_path):
    """A broken pickle in a TorchScript archive is an error of modkit or of torch's C++ reader."""
    path = written(tmp_path, replaced(script(), {"data.pkl": BROKEN[case]}))
    with pytest.raises(RuntimeError), limits():
        READERS["jit.load"](path)


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


@for_each("content", [b"1234", b""])
def test_storages_of_scripts(content, tmp_path):
    """Torch reads as many bytes as the pickle states, beyond the end of a smaller storage."""
    path = written(tmp_path, replaced(script(), {"data/0": content}))
    reason = f"'data/0' has {len(content)} bytes, 24 in the pickle"

    assert str(refusal("jit.load", path)).endswith(reason)


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
for how in ("meta", torch.device("meta:0"), "fake"):
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


@pytest.mark.parametrize("reader", [*OF_CHECKPOINTS[::2], "jit.load"])
def test_nothing_of_bare_pickles_is_executed(reader, tmp_path):
    """Pickles without a zip file around them, of each protocol, are refused."""
    marker = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return eval, (f"open({str(marker)!r}, 'w')",)

    for protocol in range(6):
        for suffix in ("pt", "pkl", "ckpt", "bin", "safetensors"):
            data = pickle.dumps(Evil(), protocol)
            refusal(reader, written(tmp_path, data, f"{protocol}.{suffix}"))
    legacy = saved({"w": Evil()}, _use_new_zipfile_serialization=False)
    refusal(reader, written(tmp_path, legacy))
    assert not marker.exists()
