"""Each member of a file is read and hashed once, also if several functions need its content."""

import pytest
import torch

import modkit
from modkit import jit
from modkit.files import verify, zip_archive
from modkit.files.zip_archive import Archive
from tests.cases import for_each
from tests.unit.files.raw_zip import unpacked


def keep(storage, location):
    """Leave a storage where it is."""
    return storage


PLAIN = {"large": torch.rand(100_000), "also large": torch.rand(30_000), "small": torch.rand(3)}
# torch reads this content itself.
OTHER = {**PLAIN, "sparse": torch.eye(3).to_sparse()}
LOADS = {
    "load": modkit.load_checkpoint,
    "to cpu": lambda path: modkit.load_checkpoint(path, "cpu"),
    "function": lambda path: modkit.load_checkpoint(path, keep),
    "mapped": lambda path: modkit.load_checkpoint(path, mmap=True),
    "verify": verify,
}


@pytest.fixture
def hashed(monkeypatch):
    """Collect the number of bytes that each call hashes."""
    sizes, crc32 = [], zip_archive.crc32

    def counted(content, *rest):
        sizes.append(len(content))
        return crc32(content, *rest)

    monkeypatch.setattr(zip_archive, "crc32", counted)
    return sizes


@pytest.fixture
def read(monkeypatch):
    """Collect the number of bytes that each call reads."""
    sizes = []
    for name, size in (("read_at", len), ("read_into_at", int)):

        def counted(*arguments, size=size, function=getattr(zip_archive, name)):
            result = function(*arguments)
            sizes.append(size(result))
            return result

        monkeypatch.setattr(zip_archive, name, counted)
    return sizes


@for_each("load", LOADS.values(), ids=LOADS)
@for_each("content", [PLAIN, OTHER], ids=["plain", "left to torch"])
def test_checkpoints(load, content, tmp_path, hashed, read):
    """A pickle, a version and a tensor are hashed once, and the file is read once."""
    path = tmp_path / "file.pt"
    torch.save(content, path)
    expected = sum(len(member.data) for member in unpacked(path.read_bytes()))
    del hashed[:], read[:]
    load(path)

    assert sum(hashed) == expected
    # Headers and the table of members are read as well.
    assert sum(read) < path.stat().st_size + 5_000


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_archives(tmp_path, hashed, read):
    """So are the code, the pickles and the extra files of an archive; torch reads it once more."""
    path = tmp_path / "net.pt"
    net = torch.jit.script(torch.nn.Linear(300, 300))
    torch.jit.save(net, path, _extra_files={"note": "text" * 1000})
    archive = Archive(path.read_bytes(), "net.pt")
    del hashed[:], read[:]
    jit.load(path, _extra_files={"note": ""})

    # Compressed members are hashed uncompressed.
    assert sum(hashed) == sum(member.file_size for member in archive.members.values())
    assert sum(read) < path.stat().st_size + 5_000
