import errno
import io
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import modkit
from tests.parity.jit.networks import build, inputs, jit_tests, make_net
from tests.processes import python


pytestmark = jit_tests


def saved(impl):
    """Return the archive of a network, and the content of a vector of its weights."""
    buffer = io.BytesIO()
    impl.jit.save(build(impl, "scripted"), buffer)
    return buffer.getvalue(), make_net(impl).gain.detach().numpy().tobytes()


def test_damaged_weights_are_not_loaded(impl):
    """A bit that has flipped in the weights is an error, and not other weights."""
    data, gain = saved(impl)
    corrupt = bytearray(data)
    corrupt[data.index(gain) + 3] ^= 0x40

    assert data.count(gain) == 1
    with pytest.raises(RuntimeError, match="does not match its checksum"):
        impl.jit.load(io.BytesIO(bytes(corrupt)))


def test_a_member_that_is_marked_as_a_folder_is_not_loaded(impl):
    """Weights of which nothing is read are an error, and not what happened to be in memory."""
    data, _ = saved(impl)
    corrupt = bytearray(data)
    entry = data.index(b"PK\x01\x02")
    while b"/data/0" not in data[entry + 46 : entry + 76]:
        entry = data.index(b"PK\x01\x02", entry + 4)
    corrupt[entry + 38] |= 0x10

    with pytest.raises(RuntimeError, match="is marked as a folder"):
        impl.jit.load(io.BytesIO(bytes(corrupt)))


@pytest.mark.skipif(
    not hasattr(torch.serialization, "_is_meta_location"), reason="torch reads what goes to meta"
)
def test_meta_tensors_know_their_place_in_a_rewritten_file(impl, tmp_path):
    """The offset of a storage without memory is that of its content, also after another program."""
    state, path = {"a": torch.arange(4.0), "b": torch.arange(900.0)}, tmp_path / "state.pt"
    torch.save(state, path)
    rewritten = tmp_path / "rewritten.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(rewritten, "w") as target:
        for member in source.infolist():
            target.writestr(member.filename, source.read(member))
    load = {"torch": torch.load, "modkit": modkit.load_checkpoint}[impl.name]

    for name, tensor in load(rewritten, map_location="meta").items():
        content = state[name].numpy().tobytes()
        start = tensor.untyped_storage()._checkpoint_offset
        assert rewritten.read_bytes()[start : start + len(content)] == content


def test_a_file_that_was_just_written_is_read(impl):
    """A file that stands at its end, as after saving, is read from its start."""
    buffer = io.BytesIO()
    module = build(impl, "scripted").eval()
    impl.jit.save(module, buffer)

    assert torch.equal(impl.jit.load(buffer)(inputs()), module(inputs()))


@pytest.mark.parametrize("kind", ["torch.save file", "empty file", "text file"])
def test_the_error_names_what_a_file_is(impl, kind):
    """A file that is not an archive is named in the error."""
    state = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, state)
    content = {
        "torch.save file": state.getvalue(),
        "empty file": b"",
        "text file": b"a model\n" * 9,
    }[kind]

    with pytest.raises(RuntimeError, match=kind):
        impl.jit.load(io.BytesIO(content))


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on the size of files")
@pytest.mark.parametrize(
    "kind",
    [
        *("module", "frozen module", "module of torch", "class of torch"),
        *("function", "list", "extra file"),
    ],
)
def test_a_full_disk_is_an_error(impl, kind, tmp_path):
    """The process goes on after an OSError that names the file, and the previous file stays alone."""
    path = tmp_path / "net.pt"
    path.write_bytes(b"previous")
    script = Path(__file__).with_name("full_disk.py")
    done = python(script, impl.name, kind, path)

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))}\n"
    assert path.read_bytes() == b"previous"
    assert list(tmp_path.iterdir()) == [path]


FLATBUFFER = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from {library} import jit

module = jit.script(torch.nn.Linear(2, 1, bias=False))
jit.save_jit_module_to_flatbuffer(module, sys.argv[1])
loaded = jit.load(sys.argv[1])
with torch.no_grad():
    next(loaded.parameters()).fill_(3.0)
print(loaded(torch.ones(1, 2)).item())
"""


def test_weights_of_a_flatbuffer_can_be_written(impl, tmp_path):
    """A module that was loaded from the path of a flatbuffer can be trained."""
    script = tmp_path / "script.py"
    script.write_text(FLATBUFFER.format(library=impl.name))
    result = python(script, tmp_path / "net.ff")

    assert (result.returncode, result.stdout) == (0, "6.0\n")
