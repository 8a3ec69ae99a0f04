"""Checksums with the package zlib-ng and without it."""

import runpy
import sys

import pytest
import torch

import modkit
from modkit.files import zip_archive


@pytest.fixture(params=["zlib", "zlib-ng"])
def crc32(request, monkeypatch):
    """Return the function that modkit uses if zlib-ng is installed, and if it is not."""
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    else:
        pytest.importorskip("zlib_ng", reason="needs zlib-ng")
    function = runpy.run_path(zip_archive.__file__)["crc32"]
    assert (
        function.__self__.__name__ == {"zlib": "zlib", "zlib-ng": "zlib_ng.zlib_ng"}[request.param]
    )
    return function


@pytest.mark.parametrize("mmap", [False, True])
def test_files(crc32, monkeypatch, tmp_path, mmap):
    """Intact files are read, and a flipped bit is an error, in small and in large members."""
    monkeypatch.setattr(zip_archive, "crc32", crc32)
    path, content = tmp_path / "a.pt", {"small": torch.rand(10), "large": torch.rand(200_000)}
    modkit.save_checkpoint(content, path)
    assert modkit.load_checkpoint(path, mmap=mmap).keys() == content.keys()

    saved = path.read_bytes()
    for tensor in content.values():
        corrupt = bytearray(saved)
        corrupt[saved.index(tensor.numpy().tobytes())] ^= 1
        (tmp_path / "b.pt").write_bytes(corrupt)
        with pytest.raises(modkit.errors.FileError, match="does not match its checksum"):
            modkit.load_checkpoint(tmp_path / "b.pt", mmap=mmap)
