"""Archives that are read once: tensors into their memory, code and pickles for torch."""

import io
import os
import zipfile

import pytest
import torch

from modkit import jit
from modkit.errors import FileError
from modkit.files import zip_archive
from modkit.jit import _archives
from tests.cases import for_each


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


class Net(torch.nn.Module):
    """A module with large and small weights, a buffer, tied weights, and code with constants."""

    def __init__(self):
        super().__init__()
        self.large, self.small = torch.nn.Linear(300, 300), torch.nn.Linear(300, 3)
        self.tied = self.small
        self.register_buffer("steps", torch.arange(4))

    def forward(self, x):
        """Compute with all tensors."""
        return self.tied(torch.relu(self.large(x)) + torch.ones(1)) + self.steps[1]


def scripted():
    """Compile a module."""
    return torch.jit.script(Net().eval())


def traced():
    """Trace a module: its code refers to a table of constants."""
    return torch.jit.trace(Net().eval(), torch.ones(1, 300))


def with_constant_tensors():
    """Trace a function of tensors, beside weights of a module."""
    mask = torch.rand(300)

    class Masked(Net):
        def forward(self, x):
            return super().forward(x * mask)

    return torch.jit.trace(Masked().eval(), torch.ones(1, 300))


def frozen():
    """Make constants of all weights."""
    return torch.jit.freeze(scripted())


def empty():
    """Compile a module without weights."""
    return torch.jit.script(torch.nn.ReLU())


# Of these, the storages of weights and of constants have the same keys.
TWICE = {"with_constant_tensors"}
MODULES = {made.__name__: made for made in (scripted, traced, with_constant_tensors, frozen, empty)}


@pytest.fixture
def path(tmp_path):
    """A file."""
    return tmp_path / "net.pt"


@pytest.fixture
def read_by_torch(monkeypatch):
    """Collect the archives that torch reads from the file."""
    sources, original = [], _archives.import_module

    def counted(unit, source, *rest):
        sources.append(source)
        return original(unit, source, *rest)

    monkeypatch.setattr(_archives, "import_module", counted)
    return sources


@for_each("name", MODULES)
@for_each("location", [None, "cpu", torch.device("cpu")], ids=repr)
def test_modules(name, location, tmp_path):
    """The module has the code, the tensors and the results of the one that torch loads."""
    path = tmp_path / "net.pt"
    MODULES[name]().save(str(path))
    expected, found = torch.jit.load(path, location), jit.load(path, location)
    x = torch.rand(5, 300)

    assert found.code == expected.code
    assert torch.equal(found(x), expected(x))
    states = found.state_dict(), expected.state_dict()
    assert [*states[0]] == [*states[1]]
    for ours, theirs in zip(*(state.values() for state in states), strict=True):
        assert (ours.dtype, ours.stride(), ours.storage_offset()) == (
            *(theirs.dtype, theirs.stride()),
            theirs.storage_offset(),
        )
        assert torch.equal(ours, theirs)


@for_each("name", MODULES)
def test_one_read(name, tmp_path, monkeypatch):
    """Nothing is read twice, and torch opens no file."""
    path, sources, count = tmp_path / "net.pt", [], 0
    MODULES[name]().save(str(path))
    for function, size in (("read_at", len), ("read_into_at", int)):

        def read(*arguments, size=size, original=getattr(zip_archive, function)):
            nonlocal count
            result = original(*arguments)
            count += size(result)
            return result

        monkeypatch.setattr(zip_archive, function, read)
    original = _archives.import_module

    def counted(unit, source, *rest):
        sources.append(source)
        return original(unit, source, *rest)

    monkeypatch.setattr(_archives, "import_module", counted)
    jit.load(path)

    assert bool(sources) == (name in TWICE)
    assert path.stat().st_size * 0.8 < count < path.stat().st_size + 20_000


@pytest.mark.parametrize("part", ["weights", "code", "pickle", "extra file"])
def test_corrupt_content(part, path, monkeypatch):
    """Torch gets nothing of a file that is corrupt anywhere."""
    net = scripted()
    torch.jit.save(net, path, _extra_files={"note": "a remark on the weights"})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as members:
        code = next(one for one in members.infolist() if one.filename.endswith("parts.py"))
    place = {
        "weights": data.index(net.large.weight.detach().numpy().tobytes()),
        "code": data.index(b"PK\x07\x08", code.header_offset) - 20,
        "pickle": data.index(b"large"),
        "extra file": data.index(b"a remark"),
    }[part]
    data[place] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(_archives, "import_module_from_package", None)

    with pytest.raises(FileError, match="is corrupt"):
        jit.load(path)


@pytest.mark.parametrize("length", [0, 100, 10_000, 200_000])
def test_a_file_that_is_truncated_meanwhile(length, path, monkeypatch):
    """A file that shrinks while it is read is an error, and does not end the process."""
    scripted().save(str(path))
    original = zip_archive.read_into_at

    def read(*arguments):
        os.truncate(path, length)
        return original(*arguments)

    monkeypatch.setattr(zip_archive, "read_into_at", read)
    with pytest.raises(FileError, match="is corrupt"):
        jit.load(path)


def test_a_file_that_changes_after_it_was_read(path, monkeypatch):
    """Torch runs the code that was verified, not what the file has become."""
    scripted().save(str(path))
    x = torch.rand(2, 300)
    expected = torch.jit.load(path)(x)
    original = _archives.import_module_from_package

    def load(*arguments):
        os.truncate(path, 0)
        return original(*arguments)

    monkeypatch.setattr(_archives, "import_module_from_package", load)
    assert torch.equal(jit.load(path)(x), expected)


def test_archives_of_old_versions(path, read_by_torch):
    """Torch converts operators of old archives, so it reads these itself."""
    scripted().save(str(path))
    old = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            content = b"2\n" if name.endswith("version") else source.read(name)
            target.writestr(name, content)
    expected = torch.jit.load(path)
    path.write_bytes(old.getvalue())

    assert torch.equal(jit.load(path).large.weight, expected.large.weight)
    assert len(read_by_torch) == 1


def test_extra_files(path, read_by_torch):
    """Extra files are those that torch reads, of any size."""
    files = {"note": "text", "empty": "", "large": b"\0\xff" * 100_000}
    torch.jit.save(scripted(), path, _extra_files=files)
    found, expected = ({"note": "", "large": "", "empty": "", "missing": ""} for _ in range(2))
    jit.load(path, _extra_files=found)
    assert not read_by_torch
    torch.jit.load(path, _extra_files=expected)

    assert found == expected
