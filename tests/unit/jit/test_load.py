import functools
import hashlib
import io
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import modkit.nn as nn
from modkit import jit
from modkit.jit import _archive_io, _notice
from tests.integration.torchscript import SharedLayer, scripted_tests
from tests.unit.jit.archives import archive, changed, members
from tests.unit.jit.test_archive_kinds import KINDS


pytestmark = scripted_tests

INPUTS = torch.arange(8.0).div(8).reshape(2, 4)


@functools.cache
def saved():
    """Return an archive with a program of torch.export and an extra file, and what it computes."""
    torch.manual_seed(0)
    module, buffer = jit.script(SharedLayer().eval()), io.BytesIO()
    jit.save(module, buffer, _extra_files={"labels.txt": "cat"}, export_args=(INPUTS,))
    return buffer.getvalue(), module(INPUTS).detach()


@pytest.fixture
def _torchscript_fails(monkeypatch):
    """Have a torch that refuses to read TorchScript."""

    def refuse(*args):
        raise RuntimeError("TorchScript is gone\nand a trace of C++")

    monkeypatch.setattr(_archive_io, "import_module", refuse)
    monkeypatch.setattr(_archive_io, "import_module_from_buffer", refuse)


def as_path(folder, data):
    """Write an archive to a file."""
    path = folder / "net.pt"
    path.write_bytes(data)
    return path


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("case", KINDS)
def test_a_file_of_another_kind_is_named_with_what_reads_it(case, tmp_path):
    """Loading what is no archive says what it is and what reads it, for paths and open files."""
    make, name, advice = KINDS[case]
    path = as_path(tmp_path, make())

    for source in (path, str(path), io.BytesIO(make())):
        with pytest.raises(jit.FileError) as caught:
            jit.load(source)
        assert name in str(caught.value)
        assert advice in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "sha256:"])
@pytest.mark.parametrize("kind", ["path", "file"])
def test_the_right_digest(kind, prefix, tmp_path):
    """A file that has the digest is loaded."""
    data, expected = saved()
    source = as_path(tmp_path, data) if kind == "path" else io.BytesIO(data)
    digest = hashlib.sha256(data).hexdigest()

    assert torch.equal(jit.load(source, sha256=prefix + digest)(INPUTS), expected)


@pytest.mark.parametrize("kind", ["path", "file"])
def test_the_wrong_digest(kind, tmp_path, monkeypatch):
    """A file that has another digest is refused, with both of them, before torch sees it."""
    data, _ = saved()
    source = as_path(tmp_path, data) if kind == "path" else io.BytesIO(data)
    seen = []
    monkeypatch.setattr(_archive_io, "read", lambda *args: seen.append(args))

    with pytest.raises(ValueError, match="it is another file") as caught:
        jit.load(source, sha256="0" * 64)
    assert hashlib.sha256(data).hexdigest() in str(caught.value)
    assert "0" * 64 in str(caught.value)
    with pytest.raises(ValueError, match=r"64 hexadecimal digits, not 'abc'"):
        jit.load(io.BytesIO(data), sha256="abc")
    assert seen == []


def test_what_was_compared_is_what_is_loaded(tmp_path, monkeypatch):
    """A file that is exchanged after its digest was compared is not the one that is loaded."""
    data, expected = saved()
    path = as_path(tmp_path, data)
    check = jit.check_archive

    def exchange(*args):
        found = check(*args)
        path.write_bytes(archive())
        return found

    monkeypatch.setattr("modkit.jit.serialization.check_archive", exchange)
    loaded = jit.load(path, sha256=hashlib.sha256(data).hexdigest())

    assert torch.equal(loaded(INPUTS), expected)
    assert path.read_bytes() == archive()


def test_nothing_runs_of_a_damaged_archive(tmp_path):
    """Code that runs while an archive is loaded does not run where the archive is damaged."""

    class Writes(nn.Module):
        def __init__(self, path: str):
            super().__init__()
            self.path = path

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

        @jit.export
        def __getstate__(self) -> tuple[str, bool]:
            return (self.path, self.training)

        @jit.export
        def __setstate__(self, state: tuple[str, bool]) -> None:
            self.path = state[0]
            self.training = state[1]
            torch.save(torch.ones(1), state[0])

    mark, path = tmp_path / "mark", tmp_path / "net.pt"
    jit.script(Writes(str(mark))).save(path, {"note.txt": "right"})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"right", b"wrong"))

    assert jit.inspect(path).runs_at_load
    with pytest.raises(jit.FileError):
        jit.load(path)
    assert not mark.exists()
    jit.load(io.BytesIO(whole))
    assert mark.exists()


def test_extra_files_are_looked_for_before_loading(tmp_path):
    """A missing extra file is named with those that are there, and nothing is filled in."""
    files = {"labels.txt": "", "other.txt": "before"}

    with pytest.raises(KeyError, match=r"no extra file 'other\.txt'; it has .*'labels\.txt'"):
        jit.load(io.BytesIO(saved()[0]), _extra_files=files)
    assert files == {"labels.txt": "", "other.txt": "before"}


def test_saving_puts_the_program_into_the_archive(tmp_path):
    """One step writes both; torch and torch.export read them, and no other file is left."""
    module, path = jit.script(SharedLayer().eval()), tmp_path / "net.pt"
    jit.save(module, path, export_args=(INPUTS,))

    torch.testing.assert_close(jit.read_export(path).module()(INPUTS), module(INPUTS))
    assert torch.equal(torch.jit.load(path)(INPUTS), module(INPUTS))
    assert torch.equal(jit.load(path)(INPUTS), module(INPUTS))
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["function", "torch"])
def test_what_else_is_saved_with_a_program(kind):
    """Functions, and modules that torch has compiled, get a program too."""

    def double(x):
        return x * 2

    made = jit.trace(double, INPUTS) if kind == "function" else torch.jit.script(nn.Linear(4, 2))
    buffer = io.BytesIO()
    jit.save(made, buffer, export_args=(INPUTS,))

    torch.testing.assert_close(jit.read_export(buffer).module()(INPUTS), made(INPUTS))
    torch.testing.assert_close(jit.load(buffer)(INPUTS), made(INPUTS))


def test_a_failed_conversion_leaves_the_old_file(tmp_path):
    """A module that cannot be converted is not saved, and the file stays as it was."""

    class Loops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in range(x.size(0)):
                x = x + x[index]
            return x

    path = as_path(tmp_path, b"old")
    module = jit.script(Loops())

    with pytest.raises(jit.ConversionError, match="prim::Loop cannot be converted"):
        jit.save(module, path, export_args=(INPUTS,))
    with pytest.raises(TypeError, match="has to be a tuple of inputs, not Tensor"):
        jit.save(module, path, export_args=INPUTS)
    with pytest.raises(ValueError, match=r"_extra_files has 'export\.pt2'"):
        jit.save(module, path, {"export.pt2": b""}, export_args=(INPUTS,))
    assert path.read_bytes() == b"old"
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.usefixtures("_torchscript_fails")
@pytest.mark.parametrize("kind", ["path", "file"])
def test_the_program_is_loaded_where_torchscript_is_gone(kind, tmp_path):
    """A warning says why, and what comes back computes the same, on the device that is asked for."""
    data, expected = saved()
    source = as_path(tmp_path, data) if kind == "path" else io.BytesIO(data)
    files = {"labels.txt": ""}
    text = re.escape("torch cannot load the TorchScript of the archive (TorchScript is gone), so ")

    with pytest.warns(UserWarning, match=text):
        module = jit.load(source, map_location="cpu", _extra_files=files).eval()
    torch.testing.assert_close(module(INPUTS), expected)
    assert files == {"labels.txt": b"cat"}
    assert set(module.state_dict()) >= {"head.weight", "head.bias"}
    with pytest.raises(NotImplementedError, match="train"):
        module.train()


@pytest.mark.usefixtures("_torchscript_fails")
def test_the_program_goes_where_map_location_says():
    """The tensors of the program are put on the device."""
    with pytest.warns(UserWarning, match="torch cannot load the TorchScript"):
        module = jit.load(io.BytesIO(saved()[0]), map_location="meta")

    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}


@pytest.mark.usefixtures("_torchscript_fails")
def test_without_a_program_the_error_is_that_of_torch():
    """An archive that has no program raises what torch raises."""
    with pytest.raises(RuntimeError, match="TorchScript is gone"):
        jit.load(io.BytesIO(archive()))


def test_a_torch_without_torchscript_says_so(monkeypatch):
    """Where torch has nothing that reads TorchScript the error says that."""
    monkeypatch.setattr(_archive_io, "import_module", None)

    with pytest.raises(RuntimeError, match="this release of torch reads no TorchScript"):
        jit.load(io.BytesIO(archive()))


def test_an_error_that_is_no_text_is_one_all_the_same(monkeypatch):
    """Where the message of torch has bytes of a damaged file in it, it is shown without them."""

    def refuse(*args):
        return b"bad name \xc0".decode()

    monkeypatch.setattr(_archive_io, "import_module_from_buffer", refuse)

    with pytest.raises(RuntimeError, match="torch cannot load the archive: bad name \ufffd"):
        jit.load(io.BytesIO(archive()))


def test_a_file_that_torch_cannot_read_is_not_replaced_by_the_program():
    """What is damaged where no checksum covers it is refused, though the program may be whole."""
    data = bytearray(saved()[0])
    data[-18] ^= 0x01  # the number of this disk

    with pytest.raises(RuntimeError):
        jit.load(io.BytesIO(bytes(data)))


def test_damage_is_no_reason_to_take_the_program():
    """A damaged archive is refused, though the program in it may be whole."""
    code = next(name for name in _names(saved()[0]) if name.endswith(".py"))
    damaged = changed(saved()[0], {code: b"def forward("})

    with pytest.raises(jit.FileError, match="is not what was saved under that name"):
        jit.load(io.BytesIO(damaged))


def _names(data):
    """Return the members of an archive without their folder."""
    return [name.partition("/")[2] for name in members(data)]


def test_members_that_were_exchanged_are_found(tmp_path):
    """Weights of two layers that have changed places are refused, with right checksums too."""
    path = tmp_path / "net.pt"
    module = jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    module.save(path)
    places = {each.name: each.storage for each in jit.inspect(path).tensors}
    first, second = places["0.weight"], places["1.weight"]
    weights = [module[index].weight.detach().numpy().tobytes() for index in (0, 1)]
    path.write_bytes(changed(path.read_bytes(), {first: weights[1], second: weights[0]}))

    assert torch.equal(torch.jit.load(path).state_dict()["0.weight"], module[1].weight)
    with pytest.raises(jit.FileError, match="is not what was saved under that name"):
        jit.load(path)


def test_a_link_and_a_path_as_bytes(tmp_path):
    """A path may be anything that stands for one."""
    real = as_path(tmp_path, saved()[0])
    link = tmp_path / "link.pt"
    link.symlink_to(real)

    assert torch.equal(jit.load(link)(INPUTS), saved()[1])
    assert torch.equal(jit.load(shutil.copy(real, tmp_path / "größe.pt"))(INPUTS), saved()[1])


@pytest.mark.parametrize(("version", "named"), [((3, 13), False), ((3, 14), True)], ids=str)
def test_the_notice_names_a_python_that_is_not_supported(version, named, monkeypatch):
    """From Python 3.14 on the notice says that compiling may fail."""
    monkeypatch.setattr(_notice, "sys", SimpleNamespace(version_info=version))

    assert ("does not support it on Python 3.14" in _notice.message()) == named
    assert _notice.message().startswith(_notice.MESSAGE)
    assert sys.version_info >= (3, 10)
