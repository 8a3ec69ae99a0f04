import gzip
import io
import pickle
import tarfile
import zipfile

import pytest
import safetensors.torch
import torch

from modkit.errors import FileError
from modkit.jit._archive import check_archive, inspect
from tests.integration.torchscript import scripted_tests
from tests.unit.jit.archives import archive, loaded, packed


pytestmark = scripted_tests


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


def package():
    """Return what torch.package writes."""
    buffer = io.BytesIO()
    with torch.package.PackageExporter(buffer) as exporter:
        exporter.save_pickle("model", "model.pkl", {"weight": torch.ones(2)})
    return buffer.getvalue()


def tar():
    """Return a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("empty"))
    return buffer.getvalue()


# What a file is → how it is made, what the error calls it, and what it says to do.
KINDS = {
    "state_dict": (saved, "torch.save file", "torch.load(..., weights_only=True)"),
    "legacy": (
        lambda: saved(_use_new_zipfile_serialization=False),
        "format before torch 1.6",
        "torch.load(..., weights_only=True)",
    ),
    "pickle": (lambda: pickle.dumps([1, 2, 3]), "pickle", "weights_only=True"),
    "export": (exported, "torch.export archive", "torch.export.load("),
    "package": (package, "torch.package archive", "PackageImporter"),
    "safetensors": (
        lambda: safetensors.torch.save({"w": torch.ones(2)}),
        "safetensors file",
        "safetensors.torch.load_file(",
    ),
    "zip": (lambda: packed({"a.txt": b"a"}), "zip file", "none of the members"),
    "empty zip": (lambda: packed({}), "zip file", "none of the members"),
    "old": (
        lambda: packed({"a/model.json": b"{}", "a/version": b"1", "a/code/a.py": b""}),
        "of the format with a model.json, not one that torch still reads",
        "older release of torch",
    ),
    "half": (lambda: archive()[: len(archive()) // 2], "truncated zip file", "again"),
    "text": (lambda: "zwölf\n".encode() * 2000, "text file", "not a TorchScript archive"),
    "page": (lambda: b"\n<!DOCTYPE HTML><html>", "HTML page", "server"),
    "pointer": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "Git LFS pointer",
        "git lfs pull",
    ),
    "empty": (lambda: b"", "empty file", "not written"),
    "noise": (lambda: bytes(range(255, 0, -1)) * 9, "unknown format", "not a TorchScript archive"),
    "gzip": (lambda: gzip.compress(archive()), "gzip file", "unpack it first"),
    "tar": (tar, "tar file", "unpack it first"),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("case", KINDS)
def test_a_wrong_file_is_named_with_what_reads_it(case, tmp_path):
    """Each kind of file that is no archive gets an error that names it and its loader."""
    make, name, advice = KINDS[case]
    path = tmp_path / "model.pt"
    path.write_bytes(make())

    with pytest.raises(FileError) as caught:
        check_archive(path)
    assert str(path) in str(caught.value)
    assert name in str(caught.value)
    assert advice in str(caught.value)
    assert inspect(path).kind == caught.value.kind
    # Torch refuses all of them too, in words that are the same for most.
    with pytest.raises(RuntimeError):
        loaded(make())


def test_the_loaders_that_are_named_read_the_file(tmp_path):
    """What the error says reads the file that it was said of."""
    weights = torch.load(io.BytesIO(saved()), weights_only=True)
    old = torch.load(io.BytesIO(KINDS["legacy"][0]()), weights_only=True)
    path = tmp_path / "w.safetensors"
    path.write_bytes(KINDS["safetensors"][0]())

    assert set(weights) == set(old) == {"weight", "bias"}
    assert torch.equal(torch.ones(2), safetensors.torch.load_file(path)["w"])
    program = torch.export.load(io.BytesIO(exported()))
    assert program.module()(torch.ones(1, 2)).shape == (1, 3)


def test_the_error_is_one_of_torchs_kind():
    """Code that expects torch's RuntimeError still gets one."""
    assert issubclass(FileError, RuntimeError)


def test_archives_of_old_names_for_the_version():
    """An archive whose version stands in ``.data`` is one too, as torch takes it for one."""
    content = {
        name.replace("/version", "/.data/version"): data
        for name, data in ((i.filename, f.read(i)) for f in [_zip()] for i in f.infolist())
    }

    assert check_archive(packed(content)) == {"labels.txt": 7}
    assert inspect(packed(content)).format_version == inspect(archive()).format_version


def _zip():
    """Open the archive as the zip file that it is."""
    return zipfile.ZipFile(io.BytesIO(archive()))
