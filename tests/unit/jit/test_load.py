import functools
import hashlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch

import modkit.nn as nn
from modkit import jit
from modkit.errors import FileError
from modkit.jit import _archives, _upstream
from tests.cases import for_each
from tests.integration.torchscript import SharedLayer, scripted_tests
from tests.unit.jit.archives import archive, changed


pytestmark = scripted_tests

INPUTS = torch.arange(8.0).div(8).reshape(2, 4)


@functools.cache
def saved():
    """Return an archive with an extra file, and what it computes."""
    torch.manual_seed(0)
    module, buffer = jit.script(SharedLayer().eval()), io.BytesIO()
    jit.save(module, buffer, _extra_files={"labels.txt": "cat"})
    return buffer.getvalue(), module(INPUTS).detach()


def as_path(folder, data):
    """Write an archive to a file."""
    path = folder / "net.pt"
    path.write_bytes(data)
    return path


@for_each("prefix", ["", "sha256:"])
@for_each("kind", ["path", "file"])
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
    monkeypatch.setattr(_archives, "read", lambda *args: seen.append(args))

    with pytest.raises(ValueError, match="it is another file") as caught:
        jit.load(source, sha256="0" * 64)
    assert hashlib.sha256(data).hexdigest() in str(caught.value)
    assert "0" * 64 in str(caught.value)
    with pytest.raises(ValueError, match="'abc' is not a SHA-256 digest"):
        jit.load(io.BytesIO(data), sha256="abc")
    assert seen == []


def test_nothing_runs_of_a_damaged_archive(tmp_path):
    """Code that runs during loading does not run if the archive is corrupt."""

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

    with pytest.raises(FileError, match=r"extra/note\.txt' does not match its checksum"):
        jit.load(path)
    assert not mark.exists()
    jit.load(io.BytesIO(whole))
    assert mark.exists()


def test_a_torch_without_torchscript_says_so(monkeypatch):
    """Where torch has nothing that reads TorchScript the error says that."""
    monkeypatch.setattr(_archives, "import_module", None)

    with pytest.raises(RuntimeError, match="this release of torch reads no TorchScript"):
        jit.load(io.BytesIO(archive()))


def test_an_error_that_is_no_text_is_one_all_the_same(monkeypatch):
    """An error of torch with bytes of a corrupt file in its message is shown without them."""

    def refuse(*args):
        return b"bad name \xc0".decode()

    monkeypatch.setattr(_archives, "import_module_from_buffer", refuse)

    with pytest.raises(RuntimeError, match="torch cannot load the archive: bad name \ufffd"):
        jit.load(io.BytesIO(archive()))


def test_a_corrupt_file_fills_in_nothing(tmp_path):
    """Extra files are filled in once all is verified."""
    data, _ = saved()
    weights = jit.load(io.BytesIO(data)).head.weight.detach().numpy().tobytes()
    path = as_path(tmp_path, data.replace(weights, bytes(len(weights))))
    files = {"labels.txt": "before"}

    for source in (path, io.BytesIO(path.read_bytes())):
        with pytest.raises(FileError, match="does not match its checksum"):
            jit.load(source, _extra_files=files)
    assert files == {"labels.txt": "before"}


@pytest.mark.parametrize("kind", ["path", "file"])
def test_an_archive_without_its_weights_is_a_corrupt_file(kind, tmp_path):
    """An archive without the weights that its pickle names is corrupt, in the one wording."""
    data = changed(saved()[0], {"data/0": None})
    source = as_path(tmp_path, data) if kind == "path" else io.BytesIO(data)

    with pytest.raises(FileError, match="corrupt: 'data/0' has no bytes, 16 in the pickle"):
        jit.load(source)


@pytest.mark.parametrize(("version", "named"), [((3, 13), False), ((3, 14), True)], ids=str)
def test_the_upstream_names_a_python_that_is_not_supported(version, named, monkeypatch):
    """From Python 3.14 on the notice says that TorchScript may break, in torch's words."""
    monkeypatch.setattr(_upstream, "sys", SimpleNamespace(version_info=version))

    message = _upstream.message("script")
    assert ("is not supported in Python 3.14+ and may break" in message) == named
    assert message.startswith("`torch.jit.script` is ") and message.endswith(_upstream.MESSAGE)
    assert sys.version_info >= (3, 10)
