import io
import struct
import zipfile
import zlib

import pytest
import torch

from modkit.errors import FileError
from modkit.files import zip_archive, zip_records as records
from modkit.files.zip_archive import Archive
from tests.cases import for_each
from tests.unit.files.hostile import checkpoint, folder_of, script
from tests.unit.files.raw_zip import END_64_FIELDS, FORMATS, Member, build, saved, unpacked


MARK = 0xFFFFFFFF


def test_table_entries_are_those_of_zipfile():
    """Python's own reader finds the same fields in a file of torch."""
    data = checkpoint()
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        infos, place = file.infolist(), file.start_dir
    for info in infos:
        entry = records.TableEntry._make(records.TABLE_ENTRY.unpack_from(data, place))
        assert entry.signature == records.TABLE_ENTRY_SIGNATURE
        assert entry.version_made_by == info.create_version + (info.create_system << 8)
        assert entry.version_needed == info.extract_version
        assert entry.general_purpose_flags == info.flag_bits
        assert entry.compression_method == info.compress_type
        assert entry.crc_32 == info.CRC
        assert entry.compressed_size == info.compress_size
        assert entry.uncompressed_size == info.file_size
        assert entry.file_name_length == len(info.filename.encode())
        assert entry.disk_number_start == info.volume
        assert entry.internal_file_attributes == info.internal_attr
        assert entry.external_file_attributes == info.external_attr
        assert entry.offset_of_local_header == info.header_offset
        header = records.LocalHeader._make(
            records.LOCAL_HEADER.unpack_from(data, info.header_offset)
        )
        assert header.signature == records.LOCAL_HEADER_SIGNATURE
        assert header.file_name_length == len(info.filename.encode())
        lengths = entry.file_name_length + entry.extra_field_length + entry.file_comment_length
        place += records.TABLE_ENTRY.size + lengths


@for_each(
    ("record", "layout", "signature"),
    [
        (records.EndRecord, records.END, records.END_SIGNATURE),
        (records.Zip64EndRecord, records.ZIP64_END, records.ZIP64_END_SIGNATURE),
        (records.Zip64Locator, records.ZIP64_LOCATOR, records.ZIP64_LOCATOR_SIGNATURE),
        (records.TableEntry, records.TABLE_ENTRY, records.TABLE_ENTRY_SIGNATURE),
        (records.LocalHeader, records.LOCAL_HEADER, records.LOCAL_HEADER_SIGNATURE),
    ],
)
def test_each_field_has_a_name(record, layout, signature):
    """The layouts are those of the writer of these tests, field by field."""
    form, names = FORMATS[signature]

    assert layout.size == struct.calcsize(form)
    assert len(record._fields) == len(names)
    assert len(record._make(layout.unpack(bytes(layout.size)))) == len(names)


@for_each("marked", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("other", [b"", b"\x55\x54\x02\0ab"])
def test_numbers_of_more_than_32_bits(marked, other):
    """The extra field has a number for each field that is marked, in the order of the format."""
    short = [11, 12, 13]  # size, compressed size, offset
    long = [1 << 33, 1 << 34, 1 << 35]
    stated = [MARK if index in marked else number for index, number in enumerate(short)]
    expected = [long[index] if index in marked else n for index, n in enumerate(short)]
    values = struct.pack(f"<{len(marked)}Q", *(long[index] for index in marked))
    extra = other + struct.pack("<2H", 1, len(values)) + values
    entry = records.TableEntry._make([b"", *[0] * 16])._replace(
        uncompressed_size=stated[0], compressed_size=stated[1], offset_of_local_header=stated[2]
    )
    member = records.member_of(entry, "name", extra)

    assert [member.size, member.packed, member.header] == expected


def test_a_number_that_is_missing_stays_marked():
    """Without its extra field, a marked size is 2 ** 32 - 1, as it stands there."""
    entry = records.TableEntry._make([b"", *[0] * 16])._replace(uncompressed_size=MARK)

    assert records.member_of(entry, "name", b"").size == MARK
    assert records.member_of(entry, "name", b"\x01\0\0\0").size == MARK


@for_each("data", [checkpoint, script], ids=["checkpoint", "script"])
def test_the_number_of_members(data, monkeypatch):
    """As many members as the limit are read, one more is refused."""
    content = data()
    count = len(unpacked(content))
    monkeypatch.setattr(zip_archive, "_MOST_MEMBERS", count)
    assert len(Archive(content, "x").members) == count

    monkeypatch.setattr(zip_archive, "_MOST_MEMBERS", count - 1)
    with pytest.raises(FileError, match=f"it has {count} members, more than {count - 1}"):
        Archive(content, "x")


def test_the_size_of_a_text(monkeypatch):
    """A pickle as large as the limit is read, one byte more is refused."""
    archive = Archive(checkpoint(), "x")
    size = archive.members["data.pkl"].size
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
    """A member may begin right behind the content of the one before; a byte earlier is an overlap."""
    with_extra = len(b"FB\0\0")  # of the first local header, which the table does not state
    assert Archive(close(0), "x").read("version") == b"3"
    Archive(close(-with_extra), "x")

    with pytest.raises(FileError, match="is not where it should be"):
        Archive(close(-with_extra - 1), "x")


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


def test_entries_that_fill_the_table():
    """A count for which the table has no room is refused before the table is read."""
    data = checkpoint()
    length = sum(46 + len(member.name) for member in unpacked(data))
    most = length // 46
    for count, error in (
        (most, "cannot be read"),
        (most + 1, "has another size or place than stated"),
    ):
        stated = {"count": count, "here": count}
        with pytest.raises(FileError, match=error):
            Archive(build(unpacked(data), end=stated, end_64=stated), "x")


@for_each("field", ["here", "count", "length", "offset"])
def test_fields_of_both_end_records(field):
    """A field of the short end record is that of the long one, or is left to it."""
    data = checkpoint()
    marker = 0xFFFF if field in {"here", "count"} else MARK
    # An archive of one part has the same number in both.
    both = {"here": marker, "count": marker} if marker == 0xFFFF else {field: marker}
    assert Archive(build(unpacked(data), end=both), "x").members.keys() >= {"data.pkl"}

    assert field in END_64_FIELDS
    with pytest.raises(FileError, match="x is corrupt: its end record"):
        Archive(build(unpacked(data), end={field: 1}), "x")


@for_each("size", [65535, 65536, 65537])
@for_each("flip", [False, True])
def test_small_and_large_members(size, flip, tmp_path):
    """Members on both sides of the limit for threads are read, and verified."""
    content = saved({"w": torch.arange(size, dtype=torch.uint8)})
    raw = torch.arange(size, dtype=torch.uint8).numpy().tobytes()
    if flip:
        place = content.index(raw)
        content = content[: place + size - 1] + b"\xaa" + content[place + size :]
    archive = Archive(content, "x")
    found = bytearray(size)
    assert archive.is_large("data/0") == (size > 65536)
    if flip:
        with pytest.raises(FileError, match="does not match its checksum"):
            archive.verify()
    else:
        archive.verify()
        archive.read_all({"data/0": memoryview(found)})
        assert found == raw
