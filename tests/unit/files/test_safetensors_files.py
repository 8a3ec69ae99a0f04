import pytest
import torch
from safetensors.torch import load_file, save_file

from modkit.errors import FileError
from modkit.files.kinds import MOST_JSON, SAFETENSORS, UNKNOWN, kind_of
from modkit.files.safetensors_files import (
    Described,
    SafetensorsFile,
    save_safetensors,
    write_safetensors,
)
from modkit.files.tensor_files import Checkpoint


@pytest.mark.parametrize("name", ["a", "abcde"])
def test_tensors_begin_at_a_multiple_of_eight_bytes(tmp_path, name):
    """The header is padded, so that a reader can map the tensors into memory as they are."""
    path = tmp_path / "file.safetensors"
    tensor = torch.arange(3.0)
    write_safetensors(path, {name: Described(tensor.dtype, tensor.shape)}, [(name, tensor)])
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")

    assert header % 8 == 0
    assert content[8 + header :] == tensor.numpy().tobytes()


def test_lazy_views_are_written_with_their_values(tmp_path):
    """A negative view shares the bits of its tensor, and a file has none of its mark."""
    path = tmp_path / "file.safetensors"
    real, imaginary = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0])
    number = torch.complex(real, imaginary)
    save_safetensors({"conj": number.conj(), "neg": number.conj().imag}, path)
    written = load_file(path)

    assert torch.equal(written["conj"], torch.complex(real, -imaginary))
    assert torch.equal(written["neg"], -imaginary)


@pytest.mark.parametrize("name", ["__metadata__", "a\udcff", "\n\ud800"])
def test_names_that_no_reader_takes(tmp_path, name):
    """They are refused, and the previous file stays."""
    path = tmp_path / "file.safetensors"
    save_safetensors({"__metadata__.w": torch.ones(1), "\U0001f600": torch.ones(1)}, path)

    with pytest.raises(ValueError, match="cannot be the name of a tensor"):
        save_safetensors({name: torch.ones(1)}, path)
    assert load_file(path).keys() == {"__metadata__.w", "\U0001f600"}


def test_a_header_that_no_library_writes(tmp_path):
    """A header of more than 32 MB, which would take thirty times as much memory, is not read."""
    path = tmp_path / "file.safetensors"
    for size, kind in ((1000, SAFETENSORS), (MOST_JSON + 1, UNKNOWN)):
        path.write_bytes(size.to_bytes(8, "little") + b"{}".ljust(size))
        assert kind_of(path.read_bytes()) == kind
    with pytest.raises(FileError, match="is an unknown file"):
        Checkpoint(path)


def test_corrupt_versions(tmp_path):
    """The error names the file, the entry and the kind."""
    path = tmp_path / "file.safetensors"
    save_file({"w": torch.ones(1)}, path, {"modkit.versions": "{"})
    with pytest.raises(FileError) as caught:
        SafetensorsFile(path)

    assert str(caught.value) == f"{path} is corrupt: modkit.versions are not versions of modules"
    assert caught.value.kind == "safetensors file"
