import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile

import pytest
import safetensors.torch
import torch

from modkit.errors import FileError
from modkit.jit._archive import ArchiveInfo, inspect
from modkit.jit._archive_tensors import TensorInfo
from tests.integration.torchscript import scripted_tests
from tests.unit.jit.archives import Net, Restored, archive, changed, compiled, loaded, net, traced


pytestmark = scripted_tests


def named(info):
    """Return the tensors of a file by name."""
    return {each.name: each for each in info.tensors}


def described(tensor):
    """Return what a file should say of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tuple(tensor.shape), dtype, tensor.nbytes, str(tensor.device), tensor.requires_grad


def stated(info):
    """Return what a file says of a tensor."""
    return info.shape, info.dtype, info.nbytes, info.device, info.requires_grad


def test_names_and_kinds_are_those_of_the_module():
    """The parameters and buffers in the file are those that torch loads, with their facts."""
    module, info = loaded(archive()), inspect(archive())

    found = named(info)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    kinds = {
        kind: {each.name for each in info.tensors if each.kind == kind}
        for kind in ("parameter", "buffer", "attribute")
    }
    assert kinds["parameter"] == set(parameters)
    assert kinds["buffer"] == set(buffers)
    assert kinds["attribute"] == {"table.a", "parts.0", "parts.1"}
    for name, tensor in {**parameters, **buffers}.items():
        assert stated(found[name]) == described(tensor)


def test_tied_weights_have_one_storage():
    """Two names of one parameter point to the same member of the file, others do not."""
    found = named(inspect(archive()))

    assert found["head.weight"].storage == found["body.0.weight"].storage
    assert found["body.0.bias"].storage != found["body.0.weight"].storage


def test_classes_and_their_methods():
    """The classes are listed under their qualified names, each with its own methods and members."""
    info = inspect(archive())

    classes = {each.name: each for each in info.classes}
    module = loaded(archive())
    # Torch gives a class another name where there was one of its name before.
    linear, norm = (
        classes[str(child._c._type().qualified_name())] for child in module.body.children()
    )
    assert info.root == str(module._c._type().qualified_name())
    assert set(module._c._method_names()) == set(classes[info.root].methods)
    assert linear.parameters == ("weight", "bias")
    assert norm.buffers == ("running_mean", "running_var", "num_batches_tracked")


def test_versions_extra_files_and_digest():
    """The file tells its versions, its extra files and the digest that other tools print."""
    info = inspect(archive())

    record = zipfile.ZipFile(io.BytesIO(archive()))
    version = record.read(f"{record.namelist()[0].partition('/')[0]}/version")
    assert info.format_version == int(version)
    assert info.bytecode_version is None
    assert info.extra_files == {"labels.txt": 7}
    assert info.sha256 == hashlib.sha256(archive()).hexdigest()
    assert info.nbytes == len(archive())


@pytest.mark.filterwarnings("ignore:Lite Interpreter is deprecated:DeprecationWarning")
def test_bytecode_of_the_mobile_interpreter(tmp_path):
    """An archive for the mobile interpreter tells the version of its bytecode, as torch does."""
    path = tmp_path / "net.ptl"
    net()._save_for_lite_interpreter(str(path))

    from torch.jit.mobile import _get_model_bytecode_version

    assert inspect(path).bytecode_version == _get_model_bytecode_version(str(path))


def test_constants_of_the_code():
    """A tensor that the code holds as a constant is listed under the name that the code uses."""
    module = traced(Net(), torch.ones(2, 3))
    info = inspect(module.save_to_buffer())

    expected = module.code_with_constants[1].const_mapping
    constants = [each for each in info.tensors if each.kind == "constant"]
    assert {each.name: each.shape for each in constants} == {
        f"CONSTANTS.{name}": tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert expected


def test_code_that_runs_at_load_is_named():
    """A class that is restored by a method of its own is named, and one that is not is not."""
    assert inspect(archive()).runs_at_load == ()
    assert [name.rpartition(".")[2] for name in inspect(_restored()).runs_at_load] == [
        "__setstate__"
    ]
    assert "Restored" in inspect(_restored()).runs_at_load[0]


def _restored():
    """Return the archive of a module that restores itself."""
    return compiled(Restored()).save_to_buffer()


def test_code_that_runs_at_load_cannot_hide():
    """A method is found however its lines are written, and in whatever file of code it is."""
    content = _restored()
    name = next(
        member.partition("/")[2]
        for member in zipfile.ZipFile(io.BytesIO(content)).namelist()
        if member.endswith(".py")
    )
    code = zipfile.ZipFile(io.BytesIO(content)).read(f"archive/{name}").decode()
    hidden = code.replace("  def __setstate__(", "  def  __setstate__  (")
    renamed = changed(content, {name: None, name[:-2] + "PY": code.encode()})

    assert hidden != code
    assert inspect(changed(content, {name: hidden.encode()})).runs_at_load
    assert inspect(renamed).runs_at_load


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_objects_of_classes_in_cpp_are_named():
    """Packed weights of quantized layers are made by C++ code at load, which is said."""
    with pytest.warns(DeprecationWarning, match="quantize_dynamic|torch.ao.quantization"):
        quantized = torch.ao.quantization.quantize_dynamic(
            torch.nn.Sequential(torch.nn.Linear(2, 2)), {torch.nn.Linear}
        )

    info = inspect(compiled(quantized).save_to_buffer())

    assert any("torch.classes.quantized" in name for name in info.runs_at_load)
    assert "qint8" in {each.dtype for each in info.tensors}


def test_the_content_digest_does_not_know_the_file_name(tmp_path):
    """Two saves of one model under two names have equal contents, and another model has not."""
    for name in ("one.pt", "two.pt"):
        net().save(tmp_path / name)
    other = compiled(torch.nn.Linear(2, 2))
    first, second = (inspect(tmp_path / name) for name in ("one.pt", "two.pt"))

    assert first.sha256 != second.sha256
    assert first.content_sha256 == second.content_sha256
    assert first.content_sha256 != inspect(other.save_to_buffer()).content_sha256


def test_nothing_is_run(tmp_path):
    """A pickle that would write a file when it is loaded is inspected without that happening."""
    victim = tmp_path / "written"

    class Writes:
        def __reduce__(self):
            return os.system, (f"touch {victim}",)

    plain, saved = tmp_path / "plain.pkl", tmp_path / "saved.pt"
    plain.write_bytes(pickle.dumps({"weight": Writes()}))
    torch.save({"weight": torch.ones(2), "bad": Writes()}, saved)
    names = [inspect(path).runs_at_load for path in (plain, saved)]

    assert not victim.exists()
    assert [(f"{os.system.__module__}.system",)] * 2 == names
    # The files do what they are here for, where somebody loads them.
    pickle.loads(plain.read_bytes())
    assert victim.exists()


def test_a_state_dict():
    """A file of torch.save is told by its entries, nested ones with dots, and imports nothing."""
    state = {"model": net().state_dict(), "step": 3}
    buffer = io.BytesIO()
    torch.save(state, buffer)

    info = inspect(buffer)
    assert info.kind == "torch.save file"
    assert info.runs_at_load == ()
    assert {name: stated(each) for name, each in named(info).items()} == {
        f"model.{name}": described(tensor) for name, tensor in state["model"].items()
    }


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_tensors_of_all_kinds(legacy):
    """Every kind of tensor that torch.save writes is listed with its shape and dtype."""
    dtypes = (torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.complex64, torch.int16)
    entries = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in dtypes}
    entries |= {
        "view": torch.arange(12.0).view(3, 4)[1:, ::2],
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "uint16": torch.zeros(2, dtype=torch.uint16),
        "meta": torch.empty(5, 2, device="meta"),
    }
    buffer = io.BytesIO()
    torch.save(entries, buffer, _use_new_zipfile_serialization=not legacy)

    info = inspect(buffer)
    facts = {name: (each.shape, each.dtype) for name, each in named(info).items()}
    assert facts == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in entries.items()
    }
    assert named(info)["parameter"].kind == "parameter"
    assert info.runs_at_load == ()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr"])
def test_sparse_tensors(layout):
    """A sparse tensor is listed with its shape and the bytes of its parts."""
    tensor = getattr(torch.eye(4), layout)()
    buffer = io.BytesIO()
    torch.save({"sparse": tensor}, buffer)

    found = named(inspect(buffer))["sparse"]
    assert (found.shape, found.dtype) == ((4, 4), "float32")
    # Four values of 4 bytes, and at least one index of 8 bytes for each.
    assert found.nbytes >= 48


def test_a_whole_module_names_the_classes_that_it_imports():
    """A pickled module is told by the classes that loading it would import."""
    buffer = io.BytesIO()
    torch.save(torch.nn.Linear(2, 3), buffer)

    info = inspect(buffer)
    assert info.runs_at_load == ("torch.nn.modules.linear.Linear",)
    assert {each.shape for each in info.tensors} == {(3, 2), (3,)}


def test_safetensors():
    """A safetensors file is listed by its own description."""
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.ones(4)}
    info = inspect(safetensors.torch.save(tensors, metadata={"format": "pt"}))

    assert info.kind == "safetensors file"
    assert named(info)["a"] == TensorInfo("a", "entry", (2, 3), "bfloat16", 12)
    assert named(info)["b"] == TensorInfo("b", "entry", (4,), "float32", 16)


@pytest.mark.parametrize("change", ["size", "end"])
def test_safetensors_that_promise_too_much(change):
    """A description that does not fit the file, or itself, is an error that names the tensor."""
    facts = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    facts |= {"shape": [5]} if change == "size" else {"shape": [1000], "data_offsets": [0, 4000]}
    header = json.dumps({"weight": facts}).encode()

    with pytest.raises(FileError, match=r"weight: its size|weight: it reaches beyond"):
        inspect(len(header).to_bytes(8, "little") + header + bytes(16))


def test_an_export_archive():
    """A file of torch.export is told by its weights and buffers."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).eval()
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(module, (torch.ones(2, 3),)), buffer)

    info = inspect(buffer)
    assert info.kind == "torch.export archive"
    assert {name: stated(each) for name, each in named(info).items()} == {
        name: described(tensor)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    assert {each.name for each in info.tensors if each.kind == "parameter"} == {
        name for name, _ in module.named_parameters()
    }


def test_printing():
    """The repr says what matters on one line, and does not list thousands of tensors."""
    text = repr(inspect(archive()))

    assert "\n" not in text
    assert text.startswith("ArchiveInfo(kind='TorchScript archive'")
    assert "extra_files={'labels.txt': 7}" in text
    assert f"tensors=<{len(inspect(archive()).tensors)} of " in text


def test_what_is_found_cannot_be_changed():
    """The facts are frozen, the extra files too."""
    info = inspect(archive())

    with pytest.raises(AttributeError):
        info.kind = "other"
    with pytest.raises(TypeError):
        info.extra_files["more"] = 1
    assert isinstance(info, ArchiveInfo)


def test_files_are_read_from_where_they_stand():
    """An open file is left where it was; one that has just been written is read from its start."""
    shifted = io.BytesIO(b"12345" + archive())
    shifted.seek(5)
    written = io.BytesIO()
    written.write(archive())

    assert inspect(shifted).sha256 == inspect(archive()).sha256
    assert shifted.tell() == 5
    assert inspect(written).sha256 == inspect(archive()).sha256
    assert written.tell() == 0


@pytest.mark.parametrize("source", [3, None, io.StringIO("text")])
def test_what_is_no_file(source):
    """Something else than a path, bytes or a binary file is refused by its type."""
    with pytest.raises(TypeError, match=r"an archive is a path|open as text"):
        inspect(source)


def test_missing_files_and_folders(tmp_path):
    """A missing file and a folder have the texts of torch.jit.load."""
    for path in (tmp_path / "missing.pt", tmp_path):
        with pytest.raises(ValueError) as theirs:
            torch.jit.load(path)
        with pytest.raises(ValueError) as ours:
            inspect(path)

        assert str(theirs.value) == str(ours.value)


def test_reading_archives_does_not_need_torchscript(tmp_path):
    """The files that read archives import neither the compiler nor torch.export."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())
    program = (
        "import sys; from modkit.jit import _archive; before = set(sys.modules);"
        f"print(_archive.inspect({str(path)!r}).kind);"
        "assert not [n for n in set(sys.modules) - before if n.startswith('torch')]"
    )

    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "TorchScript archive", run.stderr
