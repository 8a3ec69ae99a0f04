import zlib

import pytest
import torch

from modkit.errors import FileError
from modkit.files import zip_archive
from modkit.files.zip_archive import Archive
from tests.cases import for_each
from tests.unit.files.hostile import checkpoint, folder_of
from tests.unit.files.raw_zip import Member, build, saved, unpacked


def test_the_size_of_a_text(monkeypatch):
    """A pickle as large as the limit is read, one byte more is refused."""
    archive = Archive(checkpoint(), "x")
    size = archive.members["data.pkl"].file_size
    monkeypatch.setattr(zip_archive, "MOST_TEXT", size)
    assert len(archive.read("data.pkl")) == size

    monkeypatch.setattr(zip_archive, "MOST_TEXT", size - 1)
    with pytest.raises(FileError, match="more than torch would write"):
        archive.read("data.pkl")


def with_code(*sizes):
    """Return a checkpoint with compressed code of these sizes."""
    data = checkpoint()
    code = [Member(folder_of(data) + b"%d.py" % n, b"#" * n, 8) for n in sizes]
    return build([*unpacked(data), *code])


@for_each("sizes", [(4000,), (1000, 3000)])
def test_the_size_of_compressed_code(sizes, monkeypatch):
    """Code of as many bytes as the limit is read, one byte more is refused."""
    data = with_code(*sizes)
    monkeypatch.setattr(zip_archive, "MOST_TEXT", 4000)
    archive = Archive(data, "x")
    assert [len(archive.read(f"{size}.py")) for size in sizes] == [*sizes]

    monkeypatch.setattr(zip_archive, "MOST_TEXT", 3999)
    with pytest.raises(FileError, match=r"compressed"):
        Archive(data, "x")


@for_each("error", [-1, 1])
def test_compressed_code_of_another_size(error):
    """Code that decompresses to one byte more or less than stated is refused."""
    data = checkpoint()
    size = {"size": 500 + error}
    member = Member(folder_of(data) + b"x.py", b"#" * 500, 8, central=size)
    archive = Archive(build([*unpacked(data), member]), "x")

    with pytest.raises(FileError, match=r"another size than stated|does not match its checksum"):
        archive.read("x.py")


@for_each(
    ("packed", "problem"),
    [
        (b"\xff" * 20, "cannot be decompressed"),
        (zlib.compress(b"#" * 500)[2:-4] + b"more", "has another size than stated"),
    ],
)
def test_compressed_code_that_is_corrupt(packed, problem):
    """Content that is not a stream, and bytes behind one, are refused."""
    data = checkpoint()
    member = Member(folder_of(data) + b"x.py", b"#" * 500, 8, packed)
    archive = Archive(build([*unpacked(data), member]), "x")

    with pytest.raises(FileError, match=problem):
        archive.read("x.py")


def close(gap, **last):
    """Return a file of two members without padding, the second some bytes before or after its place."""
    members = [
        Member(b"a/data.pkl", b"N.", descriptor=None),
        Member(b"a/version", b"3", descriptor=None, **last),
    ]
    data = build(members, alignment=1)
    second = data.index(b"PK\x03\x04", 4)
    members[1].central = {**members[1].central, "offset": second + gap}
    return build(members, alignment=1)


def test_members_side_by_side():
    """A member may begin right behind the content of the one before; earlier is an overlap."""
    # Of the first local header, which the table does not state.
    names = len(b"a/data.pkl" + b"FB\0\0")
    assert Archive(close(0), "x").read("version") == b"3"

    with pytest.raises(FileError, match="is not where it should be"):
        Archive(close(-names - 1), "x")


@for_each("descriptor", [None, {}])
def test_empty_members(descriptor):
    """A member without content is read where a descriptor, a header or the table follows."""
    names = [b"a/data.pkl", b"a/data/0", b"a/version"]
    archive = Archive(build([Member(name, b"", descriptor=descriptor) for name in names]), "x")

    archive.verify()
    assert [archive.read(name) for name in archive.members] == [b"", b"", b""]


@for_each(("extra", "fails"), [(4, ""), (5, "is too long")])
def test_the_last_member_ends_at_the_table(extra, fails):
    """The last member may end where the table begins; a byte later it would be a part of it."""
    archive = Archive(close(0, local={"extra": extra}), "x")
    if fails:
        with pytest.raises(FileError, match=fails):
            archive.start_of(archive.members["version"])
    else:
        start = archive.start_of(archive.members["version"])
        assert start + 1 == archive._table


@for_each(("size", "fails"), [(5, False), (6, True)])
def test_a_member_that_reaches_into_the_table(size, fails):
    """The sizes in the table may reach up to it, and no further."""
    # The four bytes of the extra field are not part of what the table states.
    data = close(0, central={"size": size, "packed": size})
    if fails:
        with pytest.raises(FileError, match="reaches into the table"):
            Archive(data, "x")
    else:
        Archive(data, "x")


@for_each("size", [65535, 65536, 65537, (1 << 20) + 1])
@for_each("flip", [False, True])
def test_small_and_large_members(size, flip):
    """Members on both sides of the limit for threads, and of two pieces, are read and verified."""
    content = saved({"w": torch.arange(size, dtype=torch.uint8)})
    raw = torch.arange(size, dtype=torch.uint8).numpy().tobytes()
    if flip:
        place = content.index(raw)
        content = content[: place + size - 1] + b"\xaa" + content[place + size :]
    archive = Archive(content, "x")
    found = bytearray(size)
    if flip:
        with pytest.raises(FileError, match="does not match its checksum"):
            archive.verify()
    else:
        archive.verify()
        archive.read_all({"data/0": memoryview(found)})
        assert found == raw
