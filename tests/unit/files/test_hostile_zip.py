import pytest

from modkit.errors import FileError
from modkit.files import verify
from modkit.files.zip_archive import Archive
from tests.cases import for_each
from tests.unit.files.checkpoint_zoo import quiet
from tests.unit.files.hostile import (
    READERS,
    assert_readable,
    bomb,
    checkpoint,
    folder_of,
    limits,
    refusal,
    script,
    seed_of,
)
from tests.unit.files.hostile_files import (
    HARMLESS_ZIPS,
    REFUSED_ZIPS,
    added,
    changed,
    long_sizes,
)
from tests.unit.files.raw_zip import CENTRAL, END, records, unpacked
from tests.unit.files.same_objects import assert_same


each_reader = for_each("reader", READERS)


@each_reader
@pytest.mark.parametrize("case", REFUSED_ZIPS)
def test_refused(case, reader, tmp_path):
    """Files that torch would not write, or that readers interpret differently, are refused."""
    path = tmp_path / "file.pt"
    path.write_bytes(REFUSED_ZIPS[case](seed_of(reader)))

    refusal(reader, path)


CUT_OFF = "the end of a zip file is missing; copy or download it again"
REASONS = {
    "no end": CUT_OFF,
    "length of a comment": CUT_OFF,
    "locator elsewhere": CUT_OFF,
    "other long count": "its table of members has another size or place than stated",
    "no signature in the table": "its table of members cannot be read (Bad magic number for ",
    "same name twice": "two members have the same name",
}


@for_each("case", REASONS)
def test_reasons(case):
    """The error has one reason, which names what is wrong."""
    with pytest.raises(FileError) as caught:
        Archive(REFUSED_ZIPS[case](checkpoint()), "x")

    assert str(caught.value).startswith(f"x is corrupt: {REASONS[case]}")


@for_each(
    ("case", "reason"),
    [
        ("encrypted", "'archive/data.pkl' is encrypted"),
        ("unknown method", "'archive/data.pkl' is compressed"),
        ("other folder", "'elsewhere/data.pkl' is not in the one folder of an archive"),
    ],
)
def test_members_that_torch_does_not_write(case, reason):
    """The error names the member, and what readers would do differently with it."""
    with pytest.raises(FileError, match=f"its member {reason}") as caught:
        Archive(REFUSED_ZIPS[case](checkpoint()), "x")

    assert caught.value.kind == "zip file"


@each_reader
@pytest.mark.parametrize("case", HARMLESS_ZIPS)
def test_harmless(case, reader, tmp_path):
    """Wrong fields that no reader needs are refused, or the objects are those that were written."""
    path, intact = tmp_path / "file.pt", tmp_path / "intact.pt"
    path.write_bytes(HARMLESS_ZIPS[case](seed_of(reader)))
    intact.write_bytes(seed_of(reader))
    try:
        with limits():
            found = READERS[reader](path)
    except FileError as error:
        assert_readable(error)
    else:
        with quiet():
            expected = READERS[reader](intact)
            if reader == "jit.load":
                found, expected = found.state_dict(), expected.state_dict()
        assert_same(found, expected)


@each_reader
def test_zeroed_bytes_in_the_table(reader, tmp_path):
    """Wherever 64 bytes of the table of members are zero, the file is refused."""
    data = seed_of(reader)
    start = next(place for signature, place in records(data) if signature == CENTRAL)
    end = next(place for signature, place in records(data) if signature == END)
    for number, place in enumerate(range(start, end, 32)):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(data[:place] + bytes(64) + data[place + 64 :])
        refusal(reader, path)


@each_reader
def test_members_without_content_in_the_table(reader, tmp_path):
    """An entry with zeros for sizes and checksum alone makes a file corrupt, whichever member it is."""
    data = seed_of(reader)
    places = [place for signature, place in records(data) if signature == CENTRAL]
    for number, place in enumerate(places):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(data[: place + 16] + bytes(12) + data[place + 28 :])
        with pytest.raises(FileError, match="has content, and none by the table"):
            verify(path)
        # A reader may leave out a member that says nothing about the tensors.
        if b".data/serialization_id" not in data[place : place + 100]:
            refusal(reader, path)


@each_reader
def test_truncated(reader, tmp_path):
    """A file that ends early is refused, wherever it ends."""
    data = seed_of(reader)
    for length in {*range(0, len(data), 97), *range(len(data) - 120, len(data), 7)}:
        path = tmp_path / f"{length}.pt"
        path.write_bytes(data[:length])
        refusal(reader, path)


@each_reader
def test_names_in_errors_are_printable(reader, tmp_path):
    """Names of members cannot move the cursor of a terminal, nor forge a line."""
    path = tmp_path / "file.pt"
    name = b"FOLDER/\x1b[2J\nfake: all is well\xe2\x80\xae"
    path.write_bytes(added(seed_of(reader), name, central={"crc": 1}))

    text = str(refusal(reader, path))
    assert "\\x1b[2J\\nfake" in text or "\x1b" not in text


BOMBS = {
    "storage": ("load_checkpoint", lambda: bomb(checkpoint(), "data/0", 96)),
    "pickle": ("load_checkpoint", lambda: bomb(checkpoint(), "data.pkl", 96)),
    "not referred to": ("load_checkpoint", lambda: bomb(checkpoint(), "data/99", 96)),
    "averaged": ("average_checkpoints", lambda: bomb(checkpoint(), "data/99", 96)),
    "code in a checkpoint": ("load_checkpoint", lambda: bomb(checkpoint(), "code/x.py", 96)),
    "script storage": ("jit.load", lambda: bomb(script(), "data/0", 96)),
    "code": ("jit.load", lambda: bomb(script(), "code/__torch__/evil.py", 96)),
    "extra file": ("jit.load", lambda: bomb(script(), "extra/note.txt", 96)),
    "much code": ("jit.load", lambda: bomb(script(), "code/__torch__/evil.py", 6, copies=20)),
}


@for_each("case", BOMBS)
def test_decompression_bombs(case, tmp_path):
    """1.5 GB of zeros in a file of 1.5 MB are refused before they are unpacked."""
    reader, data = BOMBS[case]
    path = tmp_path / "file.pt"
    path.write_bytes(data())
    assert path.stat().st_size < 4 << 20

    with limits(seconds=1.0):
        refusal(reader, path)


@pytest.mark.parametrize("reader", ["load_checkpoint", "mmap"])
def test_a_storage_of_2_to_the_62_bytes(reader, tmp_path):
    """Sizes that no file can have are refused without an attempt to allocate them."""
    path = tmp_path / "file.pt"
    data = checkpoint()
    names = [member.name for member in unpacked(data)]
    at = names.index(folder_of(data) + b"data/0")
    huge = {"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF}
    path.write_bytes(changed(data, at, central=huge, extra=long_sizes(1 << 62, 1 << 62)))

    refusal(reader, path)
