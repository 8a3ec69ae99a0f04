"""Zip files written field by field, so that each field can be wrong."""

from __future__ import annotations

import dataclasses
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


LOCAL, CENTRAL, DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
END_64, LOCATOR, END = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"
LOCAL_FIELDS = [
    "signature",
    "version",
    "flags",
    "method",
    "time",
    "date",
    "crc",
    "packed",
    "size",
    "name",
    "extra",
]
CENTRAL_FIELDS = [
    *("signature", "made", *LOCAL_FIELDS[1:]),
    *("comment", "disk", "internal", "external", "offset"),
]
END_FIELDS = ["signature", "disk", "first", "here", "count", "length", "offset", "comment"]
END_64_FIELDS = [
    "signature",
    "rest",
    "made",
    "version",
    "disk",
    "first",
    "here",
    "count",
    "length",
    "offset",
]
FORMATS = {
    LOCAL: ("<4s5H3L2H", LOCAL_FIELDS),
    CENTRAL: ("<4s6H3L5H2L", CENTRAL_FIELDS),
    DESCRIPTOR: ("<4s3L", ["signature", "crc", "packed", "size"]),
    END_64: ("<4sQ2H2L4Q", END_64_FIELDS),
    LOCATOR: ("<4sLQL", ["signature", "disk", "offset", "disks"]),
    END: ("<4s4H2LH", END_FIELDS),
}


@dataclasses.dataclass
class Member:
    """A member of a zip file, with fields that replace the right ones.

    Attributes:
        name: The name, in bytes.
        data: The content.
        method: 0 for stored, 8 for deflated.
        packed: Bytes in the file, if not the content.
        local: Fields of the local header.
        central: Fields of the entry in the central directory.
        descriptor: Fields of the data descriptor, or None to leave it out.
        extra: Bytes in the central entry after the name.
    """

    name: bytes
    data: bytes
    method: int = 0
    packed: bytes | None = None
    local: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    central: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    descriptor: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    extra: bytes = b""


def build(
    members: list[Member],
    *,
    alignment: int = 64,
    end: Mapping[str, Any] | None = None,
    end_64: Mapping[str, Any] | None = None,
    locator: Mapping[str, Any] | None = None,
    comment: bytes = b"",
    before: bytes = b"",
) -> bytes:
    """Write a file as torch does: padded local headers, data descriptors, both kinds of end records."""
    body, table = bytearray(before), bytearray()
    for member in members:
        local, entry = _headers(member, len(body), alignment)
        body += local
        table += entry
    start = len(body)
    counts = {"here": len(members), "count": len(members), "length": len(table), "offset": start}
    body += table
    where = len(body)
    body += record(END_64, {"rest": 44, "made": 798, "version": 45, **counts, **(end_64 or {})})
    body += record(LOCATOR, {"offset": where, "disks": 1, **(locator or {})})
    body += record(END, {**counts, "comment": len(comment), **(end or {})})
    return bytes(body + comment)


def _headers(member: Member, place: int, alignment: int) -> tuple[bytes, bytes]:
    packed = member.data if member.packed is None else member.packed
    if member.method == 8 and member.packed is None:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = packer.compress(member.data) + packer.flush()
    described = member.descriptor is not None
    common = {
        "flags": 0x808 if described else 0x800,
        "method": member.method,
        "name": len(member.name),
    }
    sizes = {"crc": zlib.crc32(member.data), "packed": len(packed), "size": len(member.data)}
    padding = -(place + 30 + len(member.name) + 4) % alignment
    extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    in_local = {**common, "extra": len(extra), **({} if described else sizes), **member.local}
    header = record(LOCAL, in_local) + member.name + extra
    tail = record(DESCRIPTOR, {**sizes, **(member.descriptor or {})}) if described else b""
    in_central = {**common, **sizes, "extra": len(member.extra), "offset": place, **member.central}
    entry = record(CENTRAL, in_central) + member.name + member.extra
    return header + packed + tail, entry


def record(signature: bytes, fields: Mapping[str, Any]) -> bytes:
    """Pack the fields of a record; those that are not given are 0."""
    form, names = FORMATS[signature]
    values = {**dict.fromkeys(names, 0), "signature": signature, **fields}
    return struct.pack(form, *values.values())


def unpacked(data: bytes) -> list[Member]:
    """Return the members of an intact file."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return [
            Member(info.filename.encode(), file.read(info), info.compress_type)
            for info in file.infolist()
        ]


def replaced(data: bytes, new: Mapping[str, bytes | None], **options: Any) -> bytes:
    """Write an intact file again with other contents, and with right checksums.

    Args:
        data: The file.
        new: Contents by the name within the folder; None leaves a member out, new names are added.
        **options: Options of :func:`build`.
    """
    members = unpacked(data)
    folder = members[0].name.partition(b"/")[0]
    contents = {folder + b"/" + name.encode(): content for name, content in new.items()}
    kept = [
        dataclasses.replace(member, data=contents.pop(member.name) or b"")
        if member.name in contents and contents[member.name] is not None
        else member
        for member in members
        if contents.get(member.name, b"") is not None
    ]
    added = [Member(name, content) for name, content in contents.items() if content is not None]
    return build([*kept, *added], **options)


def with_pickle(data: bytes, pickled: bytes) -> bytes:
    """Return a file of ``torch.save`` with another pickle in it."""
    return replaced(data, {"data.pkl": pickled})


def saved(content: Any, **options: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the signature and the place of each header and record of an intact file."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        infos, place = file.infolist(), file.start_dir
    for info in infos:
        yield LOCAL, info.header_offset
        end = data_start(data, info.header_offset) + info.compress_size
        if info.flag_bits & 8:
            yield DESCRIPTOR, end
    for _ in infos:
        yield CENTRAL, place
        place += 46 + sum(struct.unpack("<3H", data[place + 28 : place + 34]))
    if data[place : place + 4] == END_64:
        yield END_64, place
        yield LOCATOR, place + 56
        place += 76
    yield END, place


def data_start(data: bytes, header: int) -> int:
    """Return where the content of a member begins whose local header stands at a place."""
    name, extra = struct.unpack("<2H", data[header + 26 : header + 30])
    return header + 30 + int(name) + int(extra)
