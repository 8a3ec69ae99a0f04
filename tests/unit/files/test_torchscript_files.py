import hashlib
import io
import re
import sys
import textwrap
import zipfile

import pytest
import safetensors.torch
import torch

from modkit.errors import FileError
from modkit.files.torchscript_files import verified_archive
from tests.cases import for_each
from tests.integration.torchscript import scripted_tests
from tests.processes import python
from tests.unit.jit.archives import archive, changed, members, net, packed


pytestmark = scripted_tests


def verified(f, sha256=None):
    """Verify an archive, given as bytes or as what jit.load takes; return its extra files."""
    with verified_archive(io.BytesIO(f) if isinstance(f, bytes) else f, sha256) as found:
        return found.extra_files


def flipped(data, offset, mask=1):
    """Return the bytes with one of them changed."""
    changed_bytes = bytearray(data)
    changed_bytes[offset] ^= mask
    return bytes(changed_bytes)


def saved(**options):
    """Return what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(torch.nn.Linear(2, 3).state_dict(), buffer, **options)
    return buffer.getvalue()


def exported():
    """Return what torch.export.save writes."""
    buffer = io.BytesIO()
    program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
    torch.export.save(program, buffer)
    return buffer.getvalue()


# Name of a file → its maker, its kind, and the remedy in the error.
KINDS = {
    "state_dict": (saved, "torch.save file", "modkit.load_checkpoint"),
    "legacy": (
        lambda: saved(_use_new_zipfile_serialization=False),
        "torch.save file (before torch 1.6)",
        "modkit.load_checkpoint; it has no checksums",
    ),
    "export": (exported, "torch.export archive", "torch.export.load"),
    "safetensors": (
        lambda: safetensors.torch.save({"w": torch.ones(2)}),
        "safetensors file",
        "safetensors.torch.load_file",
    ),
    "text": (lambda: "zwölf\nzeilen".encode() * 2000, "text file", "it begins with 'zwölf'"),
    "empty": (lambda: b"", "empty file", "nothing was written"),
    "noise": (lambda: bytes(range(255, 0, -1)) * 9, "unknown file", "not a TorchScript archive"),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@for_each("case", KINDS)
def test_another_kind_of_file_is_named_with_what_reads_it(case, tmp_path):
    """Each kind of file that is not an archive gets an error that names it and its loader."""
    make, kind, advice = KINDS[case]
    path = tmp_path / "model.pt"
    path.write_bytes(make())

    for source in (path, str(path), io.BytesIO(make())):
        with pytest.raises(FileError) as caught:
            verified(source)
        assert re.search(
            f"{re.escape(kind)}(, not a TorchScript archive| as torch)", str(caught.value)
        )
        assert advice in str(caught.value)
        assert caught.value.kind == kind
        assert str(caught.value).startswith(str(path)) == (
            source is not None and source in {path, str(path)}
        )


def test_an_intact_archive(tmp_path):
    """An archive of torch is accepted, and its extra files are returned with their sizes."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())

    assert verified(archive()) == verified(path) == verified(str(path)) == {"labels.txt": 7}
    with verified_archive(path) as found:
        assert isinstance(found.source, str)
        assert torch.jit.load(found.source) is not None


def test_a_flatbuffer(tmp_path):
    """It has no checksums, and no list of extra files; torch gets its content."""
    path = tmp_path / "net.ptl"
    path.write_bytes(bytes(4) + b"PTMF" + bytes(40))

    for source in (path, io.BytesIO(path.read_bytes())):
        with verified_archive(source) as found:
            assert found == (path.read_bytes(), None)


def test_archives_of_old_names_for_the_version():
    """An archive whose version is in ``.data`` is one too, as in torch."""
    content = members(archive())
    content = {name.replace("/version", "/.data/version"): content[name] for name in content}

    assert verified(packed(content)) == {"labels.txt": 7}


@pytest.mark.parametrize("size", [64, 1 << 20], ids=["small", "in threads"])
def test_corrupt_weights_are_found_before_the_block(size):
    """Nothing is loaded from a file with corrupt weights."""
    module = torch.nn.Linear(size, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(2.0)
    data = torch.jit.script(module).save_to_buffer()
    corrupt = flipped(data, data.index(module.weight.detach().numpy().tobytes()[:64]))
    ran = []

    with (
        pytest.raises(FileError, match="does not match its checksum"),
        verified_archive(io.BytesIO(corrupt)),
    ):
        ran.append(True)
    assert not ran


@pytest.mark.parametrize(
    "text", ["PytorchStreamReader failed locating file", "[enforce fail at inline_container.cc:9]"]
)
def test_errors_of_the_reader_of_torch(text):
    """Errors of torch's zip reader become FileError; other errors pass through."""
    message = re.escape(f"is corrupt: torch cannot read it: {text}")
    with pytest.raises(FileError, match=message), verified_archive(io.BytesIO(archive())):
        raise RuntimeError(f"{text}\nand a trace of C++")
    with (
        pytest.raises(RuntimeError, match=r"^out of memory$"),
        verified_archive(io.BytesIO(archive())),
    ):
        raise RuntimeError("out of memory")


def test_a_checksum_of_zero_was_not_computed():
    """An archive that torch wrote without checksums is not corrupt."""
    without = bytearray(archive())
    with zipfile.ZipFile(io.BytesIO(archive())) as file:
        for info in file.infolist():
            stated = info.CRC.to_bytes(4, "little")
            place = without.index(b"PK\x01\x02", file.start_dir)
            while without[place + 46 : place + 46 + len(info.filename)] != info.filename.encode():
                place = without.index(b"PK\x01\x02", place + 1)
            assert without[place + 16 : place + 20] == stated
            without[place + 16 : place + 20] = bytes(4)

    assert verified(bytes(without)) == {"labels.txt": 7}


def test_the_digest_of_the_file(tmp_path):
    """The expected digest may be written as tools print it; another one is an error."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())
    right = hashlib.sha256(archive()).hexdigest()
    wrong = hashlib.sha256(b"").hexdigest()

    for source in (archive(), path):
        assert verified(source, right) == {"labels.txt": 7}
        assert verified(source, f" SHA256:{right.upper()}\n") == {"labels.txt": 7}
        with pytest.raises(ValueError, match="it is another file") as caught:
            verified(source, wrong)
        assert right in str(caught.value)
        assert wrong in str(caught.value)


@pytest.mark.parametrize("name", ["data.pkl", "constants.pkl", "version"])
def test_missing_members(name):
    """An archive without what every archive has is corrupt."""
    with pytest.raises(FileError, match=f"is corrupt: it has no {name}"):
        verified(changed(archive(), {name: None}))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit memory in other ways")
def test_a_digest_takes_no_second_copy_in_memory(tmp_path):
    """Loading with a digest works where there is room for the weights once, and not twice."""
    path, size = tmp_path / "net.pt", 64 << 20
    torch.jit.script(torch.nn.Linear(1 << 12, 1 << 12, bias=False)).save(path)
    code = f"""
        import re, resource, sys, warnings
        from pathlib import Path
        warnings.simplefilter("ignore")
        import torch
        from modkit import jit
        jit.script(torch.nn.Linear(1, 1))
        used = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
        limit = used + int(1.5 * {size})
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        module = jit.load({str(path)!r}, sha256={hashlib.sha256(path.read_bytes()).hexdigest()!r})
        print(module.weight.numel())
        try:
            content = [bytes({size}) for _ in range(2)]
        except MemoryError:
            print("limited")
    """
    done = python(textwrap.dedent(code))

    assert done.stdout.split() == [str(1 << 24), "limited"], done.stderr


@pytest.mark.posix
def test_a_file_that_is_exchanged_after_it_was_verified(tmp_path):
    """Torch reads the file that was verified, even if another file has replaced it."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())
    other = tmp_path / "other.pt"
    other.write_bytes(b"other")
    with verified_archive(path, hashlib.sha256(archive()).hexdigest()) as found:
        other.replace(path)
        module = torch.jit.load(found.source)

    inputs = torch.randn(2, 3)
    assert torch.equal(module(inputs), net()(inputs))
    assert path.read_bytes() == b"other"


@pytest.mark.parametrize("where", ["missing.pt", "."], ids=["missing", "folder"])
def test_a_path_without_a_file(where, tmp_path, monkeypatch):
    """The errors are those of torch."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="The provided filename") as theirs:
        torch.jit.load(where)
    with pytest.raises(ValueError, match="The provided filename") as ours:
        verified(where)

    assert str(ours.value) == str(theirs.value)


def test_other_sources(tmp_path):
    """A file that stands at its end is read from the start; text and pipes are refused."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())
    with path.open("rb") as file:
        file.seek(0, 2)
        assert verified(file) == {"labels.txt": 7}
    with pytest.raises(TypeError, match="open it in the mode 'rb'"):
        verified(io.StringIO("text"))
    with pytest.raises(FileError, match="is not a regular file"):
        verified("/dev/null")
