"""Checksums with the package zlib-ng and without it."""

import random
import runpy
import sys
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

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


def test_values(crc32):
    """Both compute what zlib computes, of every length around the sizes of vectors and chunks."""
    dice = random.Random(0)
    for length in (*range(300), 4095, 4096, 4097, 1 << 18, (1 << 18) + 1, 3 << 20):
        content = dice.randbytes(length)
        assert crc32(content) == zlib.crc32(content)


def test_pieces(crc32):
    """The checksum of a piece continues that of the piece before it, also from unaligned memory."""

    @settings(deadline=None)
    @given(st.binary(max_size=5000), st.lists(st.integers(0, 5000), max_size=5))
    def check(content, cuts):
        view = memoryview(bytearray(content))
        crc, done = 0, 0
        for cut in sorted({min(cut, len(content)) for cut in [*cuts, len(content)]}):
            crc, done = crc32(view[done:cut], crc), cut
        assert crc == zlib.crc32(content)

    check()


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


def test_one_function():
    """Whatever computes a checksum uses the same function."""
    users = [
        file.name
        for file in Path(modkit.__file__).parent.rglob("*.py")
        if "zlib.crc32" in file.read_text(encoding="utf-8")
    ]

    assert users == [Path(zip_archive.__file__).name]
