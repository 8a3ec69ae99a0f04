import io
import pickle
import re
import sys
import zipfile

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, same
from tests.parity.jit.networks import build, inputs, jit_tests


pytestmark = jit_tests


def one_more(x):
    """Return a tensor plus one."""
    return x + 1


def archive():
    """Return an archive as an open file."""
    return io.BytesIO(build(MODKIT, "scripted").save_to_buffer())


@for_each("device", ["cpu", torch.device("cpu"), "meta", None], ids=repr)
def test_tensors_go_where_map_location_says(device):
    """Parameters and buffers of all parts are on that device, and stay Parameters."""
    module = MODKIT.jit.load(archive(), map_location=device)
    expected = TORCH.jit.load(archive(), map_location=device)

    assert [t.device for t in (*module.parameters(), *module.buffers())] == [
        t.device for t in (*expected.parameters(), *expected.buffers())
    ]
    assert {type(p) for p in module.parameters()} == {torch.nn.Parameter}


@for_each("device", ["cpu", "meta", None], ids=repr)
def test_tensors_of_the_meta_device_stay_there(device, impl, tmp_path):
    """A module that was saved with a part on the meta device is loaded as it was, also from a path."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3, device="meta"), torch.nn.Linear(3, 4))
    archive = tmp_path / "model.pt"
    impl.jit.save(impl.jit.script(model), archive)

    for source in (archive, io.BytesIO(archive.read_bytes())):
        first, second = impl.jit.load(source, map_location=device).children()
        assert {p.device.type for p in first.parameters()} == {"meta"}
        assert [tuple(p.shape) for p in first.parameters()] == [(3, 2), (3,)]
        if device != "meta":
            assert torch.equal(second.weight, model[1].weight)


@pytest.mark.parametrize("where", ["missing.pt", "."], ids=["missing", "folder"])
def test_a_path_that_is_no_file_is_refused_as_in_torch(where, tmp_path, monkeypatch):
    """Torch's errors name the path."""
    monkeypatch.chdir(tmp_path)

    assert same(lambda impl: impl.jit.load(where))[0] == "raised"


def test_the_folder_in_an_archive_has_the_name_of_the_file(impl, tmp_path):
    """All members of an archive are in one folder."""
    impl.jit.save(impl.jit.script(torch.nn.Linear(2, 2)), tmp_path / "net.pt")
    with zipfile.ZipFile(tmp_path / "net.pt") as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}

    assert folders == {"net"}


# Windows does not replace a file that is open.
@pytest.mark.posix
@for_each("kind", ["scripted", "class-based", "function"])
def test_a_module_of_torch_replaces_the_file_at_once(kind, tmp_path):
    """Who has the previous file open reads it to its end."""
    path = tmp_path / "net.pt"
    path.write_bytes(b"previous")
    module = torch.jit.script(one_more) if kind == "function" else build(TORCH, kind)
    with path.open("rb") as previous:
        MODKIT.jit.save(module, path)

        assert previous.read() == b"previous"
    assert path.read_bytes().startswith(b"PK")


def test_what_is_not_compiled_is_not_saved(tmp_path):
    """Saving an eager module, or an extra file that is not text, raises and writes nothing."""
    path = tmp_path / "net.pt"
    module = build(MODKIT, "scripted")

    for target in (path, io.BytesIO()):
        assert same(lambda impl, f=target: impl.jit.save(impl.nn.Linear(1, 1), f))[0] == "raised"
    with pytest.raises(TypeError, match="extra file 'a' must be str or bytes, not int"):
        MODKIT.jit.save(module, path, _extra_files={"a": 1})
    assert list(tmp_path.iterdir()) == []


# Torch ends the process when a module that it loaded from a path writes to a buffer.
@for_each("name, opened", [("scripted", False), ("scripted", True), ("traced", True)])
def test_flatbuffers_are_loaded(name, opened, tmp_path):
    """``load`` reads what ``save_jit_module_to_flatbuffer`` writes: members, results, extra files."""

    def scenario(impl):
        module, path = build(impl, name).eval(), tmp_path / f"{impl}.ff"
        impl.jit.save_jit_module_to_flatbuffer(module, str(path), _extra_files={"a": "text"})
        files = {"a": "", "missing": ""}
        source = io.BytesIO(path.read_bytes()) if opened else str(path)
        loaded = impl.jit.load(source, _extra_files=files)
        assert isinstance(loaded, impl.jit.ScriptModule)
        state = {name: value.tolist() for name, value in loaded.state_dict().items()}
        return loaded(inputs()), state, files

    assert same(scenario)[0] == "returned"


@for_each("restored", [False, True])
def test_shapes_of_a_trace_are_restored_if_asked_for(restored):
    """The graph then has the shapes of the inputs that it was traced with."""

    def scenario(impl):
        saved = io.BytesIO(impl.jit.trace(impl.nn.Linear(3, 2), inputs()).save_to_buffer())
        return str(impl.jit.load(saved, _restore_shapes=restored).graph).count("Float(4, 3")

    assert same(scenario) == ("returned", ("int", "1" if restored else "0"))


@for_each(
    "files",
    [{"a": "text"}, {"a": b"\xff"}, {"a": bytearray(b"x")}, {"a/b": ""}, {"ü": "ü"}, {}, None],
)
@for_each("kind", ["scripted", "function"])
def test_extra_files_are_those_of_torch(files, kind):
    """Text, bytes and bytearrays of any name are written and read."""

    def scenario(impl):
        saved = build(impl, kind) if kind == "scripted" else impl.jit.script(one_more)
        buffer, found = io.BytesIO(), dict.fromkeys([*(files or ()), "missing"], "default")
        impl.jit.save(saved, buffer, _extra_files=files)
        buffer.seek(0)
        impl.jit.load(buffer, _extra_files=found)
        return found

    assert same(scenario)[0] == "returned"


@for_each("files", [[], ["a"], (), "a", 3, {3: ""}], ids=repr)
def test_extra_files_to_read_are_a_dict(files):
    """Anything but a dict of names raises torch's type of error."""
    errors = []
    for impl in (TORCH, MODKIT):
        with pytest.raises((TypeError, RuntimeError)) as caught:
            impl.jit.load(archive(), _extra_files=files)
        errors.append(type(caught.value))

    assert errors[0] is errors[1]


@for_each("record", ["no JSON", "[]", "3", '{"non_persistent_buffers": {"": 3}}'])
def test_a_foreign_file_named_as_modkits_record(record):
    """An archive of torch's may have a file of that name; it loads, and the file is read."""
    buffer, files = io.BytesIO(), {"modkit.json": ""}
    TORCH.jit.save(TORCH.jit.script(one_more), buffer, _extra_files={"modkit.json": record})
    buffer.seek(0)
    loaded = MODKIT.jit.load(buffer, _extra_files=files)

    assert loaded(torch.ones(1)).item() == 2
    assert files == {"modkit.json": record.encode()}


PICKLERS = {
    "pickle": pickle.dumps,
    "torch.save": lambda module: torch.save(module, io.BytesIO()),
    "in a list": lambda module: pickle.dumps([module]),
    "in a module": lambda module: pickle.dumps(torch.nn.Sequential(module)),
}


@for_each("name", ["scripted", "traced", "loaded", "frozen"])
def test_pickling_is_refused_as_in_torch(name):
    """Pickling raises torch's error; a note names what saves the module."""
    modules = {impl: build(impl, name) for impl in (TORCH, MODKIT)}
    for way, pickler in PICKLERS.items():
        errors = []
        for module in modules.values():
            with pytest.raises(RuntimeError) as caught:
                pickler(module)
            errors.append(re.sub("__torch__[^ ]*", "NAME", str(caught.value)))

        assert errors[0] == errors[1], way
        if sys.version_info >= (3, 11):
            advice = "Save a ScriptModule with modkit.jit.save() instead of pickling it."
            assert advice in caught.value.__notes__


def test_a_folder_that_is_not_there_is_named(tmp_path):
    """Saving below a folder that does not exist raises, and makes none."""
    module = build(MODKIT, "scripted")

    with pytest.raises(RuntimeError, match=r"Parent directory .*missing does not exist"):
        module.save(tmp_path / "missing" / "net.pt")
    assert list(tmp_path.iterdir()) == []
