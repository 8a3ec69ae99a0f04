"""`modkit.files.verify` passes for intact files alone."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modkit.errors import FileError
from modkit.files import verify
from modkit.files.inspect import check_file
from tests.cases import for_each
from tests.unit.files.test_inspect import exported, legacy, scripted, sharded


WEIGHT = torch.arange(1000.0)


def saved(path: Path) -> Path:
    """Write a torch.save file."""
    torch.save({"weight": WEIGHT}, path)
    return path


def safe(path: Path) -> Path:
    """Write a safetensors file."""
    save_file({"weight": WEIGHT}, path)
    return path


WRITERS = {
    "torch.save file": saved,
    "TorchScript archive": scripted,
    "torch.export archive": exported,
    "safetensors file": safe,
}
each_kind = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())


@each_kind
def test_intact_files_pass(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """An intact file passes, alone and with its digest in each notation."""
    path = write(tmp_path / "x.pt2")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    verify(path)
    for notation in (digest, digest.upper(), f"sha256:{digest}", f" {digest}\n"):
        verify(str(path), notation)


@each_kind
def test_another_digest_is_refused(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """The error has both digests."""
    path = write(tmp_path / "x.pt2")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    with pytest.raises(FileError, match=f"has the SHA-256 {digest}, not {'0' * 64}"):
        verify(path, "0" * 64)


@for_each("digest", ["zz", "", "0" * 63, "0" * 65, "md5:" + "0" * 64, "g" * 64])
def test_a_malformed_digest(tmp_path: Path, digest: str) -> None:
    """A digest that cannot be one is not a property of the file."""
    with pytest.raises(ValueError, match="is not a SHA-256 digest") as caught:
        verify(saved(tmp_path / "x.pt"), digest)
    assert not isinstance(caught.value, FileError)


@each_kind
def test_truncated_files_are_refused(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """A truncated file of any length is refused."""
    path = write(tmp_path / "x.pt2")
    data = path.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(FileError):
            verify(path)


@pytest.mark.parametrize("hashed", [False, True])
def test_progress(tmp_path: Path, hashed: bool) -> None:
    """The fraction grows with the bytes to 1, of a file of one byte as well."""
    many, small = tmp_path / "many.pt", tmp_path / "x.txt"
    torch.save({f"{n}": WEIGHT + n for n in range(200)}, many)
    small.write_bytes(b"x")
    for path, parts in (many, 12), (small, 1):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        given = digest if path is small else None
        fractions: list[float] = []
        found = check_file(path, given, any_kind=True, hashed=hashed, progress=fractions.append)
        assert found.sha256 == (digest if hashed or given else "")
        assert fractions == sorted(fractions)
        assert (len(fractions) >= parts, fractions[-1]) == (True, 1.0)


def test_sharded_checkpoints(tmp_path: Path) -> None:
    """Each shard is tested; a digest of all shards is refused."""
    index = sharded(tmp_path)
    verify(index)
    verify(tmp_path)
    with pytest.raises(FileError, match="has shards, each with a SHA-256 of its own") as caught:
        verify(index, "0" * 64)
    assert caught.value.kind == "sharded checkpoint"

    shard = tmp_path / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FileError, match=r"model-2\.safetensors"):
        verify(tmp_path)


def test_files_without_checksums(tmp_path: Path) -> None:
    """Files without checksums pass only with their digest."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        paths = [saved(tmp_path / "x.pt")]
    finally:
        torch.serialization.set_crc32_options(before)
    paths.append(legacy({"weight": WEIGHT}, tmp_path / "old.pt"))
    paths.append(tmp_path / "x.pkl")
    paths[-1].write_bytes(pickle.dumps([1, 2]))

    for path in paths:
        with pytest.raises(FileError, match="unverified: no checksums"):
            verify(path)
        verify(path, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"<html></html>", "text file"),
        (b"\0\1\2\3" * 10, "unknown file"),
        (b"PK\x05\x06" + bytes(18), "zip file"),
    ],
    ids=["text", "unknown", "zip"],
)
def test_other_kinds_are_refused(tmp_path: Path, content: bytes, kind: str) -> None:
    """Files that are not models are refused, digest or not."""
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    for digest in (None, hashlib.sha256(content).hexdigest()):
        with pytest.raises(FileError, match=f" {kind}, not a checkpoint or an archive") as caught:
            verify(path, digest)
        assert caught.value.kind == kind
