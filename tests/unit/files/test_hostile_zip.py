import dataclasses
import struct

import pytest

from modkit.errors import FileError
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
from tests.unit.files.raw_zip import CENTRAL, END, Member, build, records, replaced, unpacked
from tests.unit.files.same_objects import assert_same


def changed(data, index=0, *, local=None, central=None, descriptor=None, **fields):
    """Return a file with changed fields in both headers of one member."""
    members = unpacked(data)
    member = dataclasses.replace(
        members[index],
        local=local or {},
        central=central or {},
        descriptor=descriptor or {},
        **fields,
    )
    return build([*members[:index], member, *members[index + 1 :]])


def added(data, name, content=b"content", **fields):
    """Return a file with one more member, whose name may contain the folder."""
    full = name.replace(b"FOLDER/", folder_of(data))
    return build([*unpacked(data), Member(full, content, **fields)])


def crowded(data):
    """Return a file with 20,000 more members."""
    folder = folder_of(data)
    return build([*unpacked(data), *(Member(folder + b"x%d" % n, b"") for n in range(20000))])


def places(data):
    """Return where the members of a file begin."""
    return [place for signature, place in records(data) if signature == b"PK\x03\x04"]


def sized(data, **fields):
    """Return a file whose first member has zip64 sizes with these fields."""
    return changed(data, central={"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF}, **fields)


def long_sizes(*values):
    """Return the field that has the sizes of large members."""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


REFUSED = {
    "empty name": lambda d: added(d, b""),
    "name of a slash": lambda d: added(d, b"/"),
    "absolute name": lambda d: added(d, b"/etc/passwd"),
    "name above the folder": lambda d: added(d, b"../evil"),
    "other folder": lambda d: added(d, b"elsewhere/data.pkl"),
    "folder": lambda d: added(d, b"FOLDER/sub/", b""),
    "folder itself": lambda d: added(d, b"FOLDER/", b""),
    "same name twice": lambda d: added(d, b"FOLDER/data.pkl"),
    "same name in capitals": lambda d: added(d, b"FOLDER/DATA.PKL"),
    "same folder in capitals": lambda d: added(d, folder_of(d).upper() + b"data.pkl"),
    "name that is not UTF-8": lambda d: added(d, b"FOLDER/\xff\xfe"),
    "zero in a name": lambda d: added(d, b"FOLDER/data.pkl\0.txt"),
    "marked as folder": lambda d: changed(d, central={"external": 0x10}),
    "encrypted": lambda d: changed(d, central={"flags": 0x809}),
    "encrypted in local header": lambda d: changed(d, local={"flags": 0x809}),
    "strongly encrypted": lambda d: changed(d, central={"flags": 0x849}),
    "masked headers": lambda d: changed(d, central={"flags": 0x2808}),
    "other disk": lambda d: changed(d, central={"disk": 1}),
    "disk in the end": lambda d: build(unpacked(d), end={"disk": 1}),
    "first disk in the end": lambda d: build(unpacked(d), end={"first": 1}),
    "two disks": lambda d: build(unpacked(d), locator={"disks": 2}),
    "disk in the long end": lambda d: build(unpacked(d), end_64={"disk": 1}),
    "fewer here": lambda d: build(unpacked(d), end={"here": 1}),
    "other count": lambda d: build(unpacked(d), end={"count": 3, "here": 3}),
    "other long count": lambda d: build(unpacked(d), end_64={"count": 3, "here": 3}),
    "count of 2**63": lambda d: build(unpacked(d), end_64={"count": 1 << 63, "here": 1 << 63}),
    "other length": lambda d: build(unpacked(d), end={"length": 100}),
    "other long length": lambda d: build(unpacked(d), end_64={"length": 100}),
    "other offset": lambda d: build(unpacked(d), end={"offset": 0}),
    "other long offset": lambda d: build(unpacked(d), end_64={"offset": 8}),
    "offset behind the end": lambda d: build(unpacked(d), end_64={"offset": 1 << 62}),
    "locator elsewhere": lambda d: build(unpacked(d), locator={"offset": 0}),
    "long end of other size": lambda d: build(unpacked(d), end_64={"rest": 4}),
    "only long counts": lambda d: build(
        unpacked(d), end={"count": 0xFFFF, "here": 0xFFFF}, end_64={"count": 1, "here": 1}
    ),
    "no long sizes": lambda d: sized(d, extra=b""),
    "half of the long sizes": lambda d: sized(d, extra=long_sizes(5)),
    "long sizes that end early": lambda d: sized(d, extra=b"\x01\0\x10\0abc"),
    "long sizes of 2**63": lambda d: sized(d, extra=long_sizes(1 << 63, 1 << 63)),
    "extra field too long": lambda d: changed(d, central={"extra": 60000}),
    "comment too long": lambda d: changed(d, central={"comment": 60000}),
    "two members in one place": lambda d: changed(d, 1, central={"offset": 0}),
    "overlapping members": lambda d: changed(d, 1, central={"offset": 40}),
    "member in the table": lambda d: changed(d, central={"offset": len(d) - 200}),
    "member behind the end": lambda d: changed(d, central={"offset": 0xFFFFFFFE}),
    "larger size": lambda d: changed(d, central={"size": 4096, "packed": 4096}),
    "size of 2**32 - 2": lambda d: changed(d, central={"size": 2**32 - 2, "packed": 2**32 - 2}),
    "two sizes": lambda d: changed(d, central={"size": 4096}),
    "smaller size": lambda d: changed(d, central={"size": 1, "packed": 1}),
    "other checksum": lambda d: changed(d, central={"crc": 5}),
    "other name in local header": lambda d: changed(d, local={"name": 3}),
    "other method in local header": lambda d: changed(d, local={"method": 8}),
    "no local header": lambda d: changed(d, local={"signature": b"PK\x01\x02"}),
    "long extra field in local header": lambda d: changed(d, local={"extra": 65535}),
    "unknown method": lambda d: changed(d, method=99),
    "deflated pickle": lambda d: changed(d, pickle_of(d), method=8),
    "stored as deflated": lambda d: changed(d, pickle_of(d), central={"method": 8}),
    "bytes behind": lambda d: d + b"\0",
    "bytes before": lambda d: build(unpacked(d), before=b"#!/bin/sh\n"),
    "bytes before, offsets kept": lambda d: b"#!/bin/sh\n" + d,
    "comment": lambda d: build(unpacked(d), comment=b"comment"),
    "end in a comment": lambda d: build(unpacked(d), comment=d[-98:]),
    "two files": lambda d: d + d,
    "no members": lambda d: build([]),
    "only the end": lambda d: d[-22:],
    "only the beginning": lambda d: d[:4],
    "nothing": lambda d: b"",
    "no end": lambda d: d[:-22],
    "zeros": lambda d: bytes(len(d)),
}
# Fields that readers do not need. They are refused, or change nothing.
HARMLESS = {
    "name that leaves the folder": lambda d: added(d, b"FOLDER/../../evil"),
    "control characters in a name": lambda d: added(d, b"FOLDER/a\x1b[31m\nb"),
    "right-to-left name": lambda d: added(d, "FOLDER/\u202egnp.exe".encode()),
    "long name": lambda d: added(d, b"FOLDER/" + b"x" * 60000),
    "many members": crowded,
    "checksum in local header": lambda d: changed(d, local={"crc": 5, "flags": 0x800}),
    "sizes in local header": lambda d: changed(d, local={"size": 5, "packed": 6}),
    "checksum in descriptor": lambda d: changed(d, descriptor={"crc": 5}),
    "sizes in descriptor": lambda d: changed(d, descriptor={"size": 5, "packed": 1 << 31}),
    "no descriptor": lambda d: changed(d, descriptor={"signature": b"\0\0\0\0"}),
    "times": lambda d: changed(d, central={"time": 65535, "date": 65535}),
    "version": lambda d: changed(d, central={"version": 65535, "made": 65535}),
    "comment of a member": lambda d: changed(d, extra=b"", central={}),
    "no UTF-8 flag": lambda d: changed(d, central={"flags": 8}, local={"flags": 8}),
}


def pickle_of(data):
    """Return the index of the pickle among the members."""
    return [member.name.endswith(b"/data.pkl") for member in unpacked(data)].index(True)


each_reader = for_each("reader", READERS)


@each_reader
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, reader, tmp_path):
    """Files that torch would not write, or that readers interpret differently, are refused."""
    path = tmp_path / "file.pt"
    path.write_bytes(REFUSED[case](seed_of(reader)))

    refusal(reader, path)


@each_reader
@pytest.mark.parametrize("case", HARMLESS)
def test_harmless(case, reader, tmp_path):
    """Wrong fields that no reader needs are refused, or the objects are those that were written."""
    path, intact = tmp_path / "file.pt", tmp_path / "intact.pt"
    path.write_bytes(HARMLESS[case](seed_of(reader)))
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


def test_code_with_many_quotes(tmp_path):
    """A code member of 400 KB of quoted pairs takes no more time than its size explains."""
    path = tmp_path / "file.pt"
    line = b'__parameters__ = ["' + b'\\"' * 200_000 + b"]\n"
    path.write_bytes(replaced(script(), {"code/__torch__/evil.py": b"class A:\n  " + line}))
    with limits(seconds=2.0):
        READERS["jit.load"](path)
    for member in unpacked(script()):
        if member.name.endswith(b"container.py"):
            name = member.name.partition(b"/")[2].decode()
            path.write_bytes(replaced(script(), {name: member.data + line}))
            with pytest.raises(RuntimeError), limits(seconds=5.0):
                READERS["jit.load"](path)


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
