"""Randomly corrupted files, each determined by a seed and a number."""

from __future__ import annotations

import dataclasses
import functools
import pickletools
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import NamedTuple

import torch

from tests.fuzz.other_inputs import INPUTS
from tests.unit.files.checkpoint_zoo import CONTENTS, WAYS, file_of, file_written, scripted
from tests.unit.files.hostile_files import (
    BOMBS,
    DEEP,
    HARMLESS_ZIPS,
    ODD_PICKLES,
    REFUSED_PICKLES,
    REFUSED_ZIPS,
)
from tests.unit.files.raw_zip import (
    CENTRAL,
    DESCRIPTOR,
    FORMATS,
    LOCAL,
    Member,
    build,
    data_start,
    records,
    replaced,
    unpacked,
)


Dice = random.Random
# Files that are large, or without checksums, or not zip files.
OTHERS = 0.2  # of all inputs, those that are not single files
LEFT_OUT = {"many", "alignment 4096", "no checksums", "legacy", "value list"}
NUMBERS = [
    *(0, 1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 100, 255, 256, 1000, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**52, 2**62, 2**63 - 1, 2**63, 2**64, 10**30),
]
TEXTS = ["", "0", "1", "99", "cpu", "cuda:0", "meta", "storage", "module", "data.pkl", "../0", "é"]
# Instructions without arguments, and some with.
OPCODES = [
    bytes([code]) for code in b"().012NQRabdelotsu]}\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94"
]


class Case(NamedTuple):
    """A file.

    Attributes:
        name: The name of the intact file.
        how: What was done to it.
        data: The content.
        checked: True if the checksums are those of the content, and torch says what is in the file;
            False if it must be refused, or be read as the intact file is.
    """

    name: str
    how: str
    data: bytes
    checked: bool


@functools.cache
def seeds() -> dict[str, bytes]:
    """Return the intact files by name; the names of TorchScript archives begin with ``script``."""
    found = {name: file_of(name) for name in CONTENTS if name not in LEFT_OUT}
    found |= {way: file_written(way) for way in WAYS if way not in LEFT_OUT}
    return {**found, "script": scripted()}


def case(seed: int, number: int) -> Case:
    """Return one file, or the name and the seed of another input."""
    dice = Dice(f"{seed} {number}")
    if dice.random() < OTHERS:
        return Case(dice.choice(list(INPUTS)), "other", dice.randbytes(8), checked=True)
    names = [*seeds(), *["script"] * 8]
    name = dice.choice(names)
    how = dice.choice([*UNCHECKED, *CHECKED, "corrupted", "pickles", "pickles"])
    data = {**UNCHECKED, **CHECKED}[how](dice, seeds()[name])
    return Case(name, how, data, how in CHECKED)


# Corruption of bytes.


def flip(dice: Dice, data: bytes) -> bytes:
    """Change single bits."""
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def overwrite(dice: Dice, data: bytes) -> bytes:
    """Replace a range by zeros, by ones or by random bytes."""
    start, end = span(dice, data)
    new = dice.choice([bytes(end - start), b"\xff" * (end - start), dice.randbytes(end - start)])
    return data[:start] + new + data[end:]


def number(dice: Dice, data: bytes) -> bytes:
    """Overwrite some bytes with a number."""
    size = dice.choice([1, 2, 4, 8])
    raw = (dice.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
    start = dice.randrange(max(1, len(data) - size))
    return (data[:start] + raw + data[start + size :])[: len(data)]


def swap(dice: Dice, data: bytes) -> bytes:
    """Swap two ranges of equal length."""
    start, end = span(dice, data)
    other = dice.randrange(len(data) - (end - start) + 1)
    changed = bytearray(data)
    changed[start:end], changed[other : other + end - start] = (
        data[other : other + end - start],
        data[start:end],
    )
    return bytes(changed)


def truncate(dice: Dice, data: bytes) -> bytes:
    """Truncate."""
    return data[: dice.randrange(len(data))]


def insert(dice: Dice, data: bytes) -> bytes:
    """Insert bytes that are random or copied from elsewhere."""
    start, end = span(dice, data)
    new = dice.choice([data[start:end], bytes(end - start), dice.randbytes(end - start)])
    place = dice.randrange(len(data) + 1)
    return data[:place] + new + data[place:]


def remove(dice: Dice, data: bytes) -> bytes:
    """Remove a range."""
    start, end = span(dice, data)
    return data[:start] + data[end:]


def span(dice: Dice, data: bytes) -> tuple[int, int]:
    """Return a range, mostly a short one."""
    length = min(len(data), dice.choice([1, 2, 4, 8, 16, 64, 64, 512, 4096]))
    start = dice.randrange(len(data) - length + 1)
    return start, start + length


SAME_LENGTH = [flip, overwrite, number, swap]
DAMAGE = [*SAME_LENGTH, truncate, insert, remove]


def corrupted(dice: Dice, data: bytes) -> bytes:
    """Corrupt a file without regard to its format."""
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        data = hurt(dice, data)
    return data


def hurt(dice: Dice, data: bytes) -> bytes:
    """Corrupt bytes in one way; replace empty bytes by random ones."""
    return dice.choice(DAMAGE)(dice, data) if data else dice.randbytes(3)


def field(dice: Dice, data: bytes) -> bytes:
    """Change fields of headers, or of the records at the end."""
    changed = bytearray(data)
    places = list(records(data))
    for _ in range(dice.choice([1, 1, 2, 4])):
        signature, place = dice.choice(places)
        form, names = FORMATS[signature]
        values = list(struct.unpack_from(form, changed, place))
        chosen = dice.randrange(1, len(names))
        size = {"H": 2, "L": 4, "Q": 8}[expanded(form)[chosen]]
        new = dice.choice([*NUMBERS, len(data), values[chosen] + 1, values[chosen] - 1, 1, 8, 9])
        values[chosen] = new % (1 << 8 * size)
        struct.pack_into(form, changed, place, *values)
    return bytes(changed)


def local(dice: Dice, data: bytes) -> bytes:
    """Make local headers differ from the central directory."""
    changed = bytearray(data)
    places = [place for signature, place in records(data) if signature == LOCAL]
    form, names = FORMATS[LOCAL]
    for _ in range(dice.choice([1, 1, 2])):
        place, other = dice.choice(places), dice.choice(places)
        values = list(struct.unpack_from(form, changed, place))
        chosen = dice.randrange(1, len(names))
        theirs = struct.unpack_from(form, data, other)[chosen]
        new = dice.choice([theirs, values[chosen] ^ 1, values[chosen] ^ 8, *NUMBERS[:12]])
        size = {"H": 2, "L": 4}[expanded(form)[chosen]]
        values[chosen] = new % (1 << 8 * size)
        struct.pack_into(form, changed, place, *values)
    return bytes(changed)


@functools.cache
def expanded(form: str) -> list[str]:
    """Return the kind of each field of a format."""
    kinds: list[str] = []
    count = ""
    for letter in form[1:]:
        if letter.isdigit():
            count += letter
        else:
            kinds += [letter] * (1 if letter == "s" else int(count or 1))
            count = ""
    return kinds


def repaired(dice: Dice, data: bytes) -> bytes:
    """Corrupt the contents of members, and update their checksums."""
    with zipfile.ZipFile(BytesIO(data)) as file:
        infos = [info for info in file.infolist() if info.file_size]
    entries = {}
    place_of = [place for signature, place in records(data) if signature == CENTRAL]
    for place in place_of:
        offset = struct.unpack_from("<L", data, place + 42)[0]
        entries[offset] = place
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 3])):
        info = dice.choice(infos)
        start = data_start(data, info.header_offset)
        end = start + info.compress_size
        changed[start:end] = dice.choice(SAME_LENGTH)(dice, bytes(changed[start:end]))
        content = bytes(changed[start:end])
        if info.compress_type:
            continue
        crc = struct.pack("<L", zlib.crc32(content))
        central = entries[info.header_offset]
        changed[central + 16 : central + 20] = crc
        if data[end : end + 4] == DESCRIPTOR:
            changed[end + 4 : end + 8] = crc
        else:
            changed[info.header_offset + 14 : info.header_offset + 18] = crc
    return bytes(changed)


# Changes of contents, in files with right checksums.


def members_changed(dice: Dice, data: bytes) -> bytes:
    """Corrupt, drop, duplicate, rename or swap members."""
    members = unpacked(data)
    for _ in range(dice.choice([1, 1, 2])):
        at = dice.randrange(len(members))
        chosen, other = members[at], dice.choice(members)
        what = dice.choice(["damage", "damage", "leave out", "rename", "exchange", "add"])
        if what == "damage":
            content = chosen.data
            for _ in range(dice.choice([1, 2])):
                content = hurt(dice, content)
            members[at] = dataclasses.replace(chosen, data=content)
        elif what == "leave out" and len(members) > 1:
            del members[at]
        elif what == "rename":
            members[at] = dataclasses.replace(chosen, name=hurt(dice, chosen.name))
        elif what == "exchange":
            first, second = chosen.data, other.data
            chosen.data, other.data = second, first
        else:
            members.append(Member(other.name + dice.choice([b"", b"x", b"/"]), chosen.data))
    return build(members, alignment=dice.choice([64, 64, 1, 4096]))


def pickles_changed(dice: Dice, data: bytes) -> bytes:
    """Change the instructions of a pickle."""
    members = unpacked(data)
    pickles = [m for m in members if m.name.endswith((b".pkl", b".debug_pkl"))]
    chosen = dice.choice(pickles)
    parts = instructions(chosen.data)
    for _ in range(dice.choice([1, 1, 2, 3])):
        change(dice, parts)
    chosen.data = b"".join(parts)
    return build(members)


def instructions(data: bytes) -> list[bytes]:
    """Return the instructions of a pickle."""
    places = [place for _, _, place in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]


def change(dice: Dice, parts: list[bytes]) -> None:
    """Change a list of instructions."""
    at = dice.randrange(len(parts))
    what = dice.randrange(10)
    if what == 0 and len(parts) > 1:
        del parts[at]
    elif what == 1:
        parts.insert(at, dice.choice(OPCODES))
    elif what == 2:
        parts[at] = dice.choice(OPCODES)
    elif what == 3:
        other = dice.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
    elif what == 4:
        parts.insert(at, dice.choice(parts))
    elif what == 5:
        start, end = sorted(dice.randrange(len(parts)) for _ in range(2))
        parts[at:at] = parts[start : min(end, start + 20)]
    elif what == 6:
        replace_one(dice, parts, b"KMJ\x8a", integer(dice))
    elif what == 7:
        text = dice.choice(TEXTS).encode()
        replace_one(dice, parts, b"X", b"X" + struct.pack("<I", len(text)) + text)
    elif what == 8:
        replace_one(dice, parts, b"c", f"c{dice.choice(allowed())}\n".replace(" ", "\n").encode())
    else:
        parts[at] = hurt(dice, parts[at])


def replace_one(dice: Dice, parts: list[bytes], kinds: bytes, new: bytes) -> None:
    """Replace an instruction of one of some kinds."""
    places = [at for at, part in enumerate(parts) if part[:1] and part[:1] in kinds]
    if places:
        parts[dice.choice(places)] = new


def integer(dice: Dice) -> bytes:
    """Return the instruction for a number."""
    value = dice.choice(NUMBERS) * dice.choice([1, 1, 1, -1])
    if -(2**31) <= value < 2**31 and dice.random() < 0.8:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


@functools.cache
def allowed() -> list[str]:
    """Return module and name of the globals that torch allows in a pickle, and a few more."""
    names = sorted(torch._weights_only_unpickler._get_allowed_globals())
    found = [" ".join(name.rpartition(".")[::2]) for name in names]
    return [*found, "os system", "builtins getattr", "argparse Namespace", "torch FloatStorage"]


def spliced(dice: Dice, data: bytes) -> bytes:
    """Add members of another file."""
    members = unpacked(data)
    others = unpacked(seeds()[dice.choice(list(seeds()))])
    folder = members[0].name.partition(b"/")[0]
    for other in dice.sample(others, min(len(others), dice.choice([1, 2, 4]))):
        name = folder + b"/" + other.name.partition(b"/")[2]
        members = [member for member in members if member.name != name]
        members.append(dataclasses.replace(other, name=name))
    return build(members)


def aligned(dice: Dice, data: bytes) -> bytes:
    """Align members otherwise than the file states."""
    text = dice.choice([b"0", b"1", b"3", b"64", b"65536", b"4096\n", b"-64", b"9" * 20, b"x"])
    new = {".storage_alignment": text} if dice.random() < 0.7 else {}
    return replaced(data, new, alignment=dice.choice([1, 2, 8, 16, 64, 100, 4096]))


def aliased(dice: Dice, data: bytes) -> bytes:
    """Make storages alias: the same key for several, with other dtypes and sizes."""
    members = unpacked(data)
    pickles = [m for m in members if m.name.endswith((b"/data.pkl", b"/constants.pkl"))]
    chosen = dice.choice(pickles)
    parts = instructions(chosen.data)
    keys = [at for at, part in enumerate(parts) if part[:1] == b"X" and part[5:].isdigit()]
    kinds = [at for at, part in enumerate(parts) if part.endswith(b"Storage\n")]
    numels = [at for at, part in enumerate(parts) if part[:1] in {b"K", b"M", b"J"}]
    for _ in range(dice.choice([1, 2, 3])):
        if keys:
            parts[dice.choice(keys)] = parts[dice.choice(keys)]
        if kinds and dice.random() < 0.5:
            kind = dice.choice(["Float", "Half", "Double", "Long", "Byte", "ComplexFloat"])
            parts[dice.choice(kinds)] = f"ctorch\n{kind}Storage\n".encode()
        if numels and dice.random() < 0.5:
            parts[dice.choice(numels)] = parts[dice.choice(numels)]
    chosen.data = b"".join(parts)
    return build(members)


def container_of_the_table(dice: Dice, data: bytes) -> bytes:
    """Change the container as a row of the table of hostile files does."""
    rows = REFUSED_ZIPS | HARMLESS_ZIPS
    name = dice.choice([name for name in rows if name != "many members"])
    return rows[name](data)


def pickle_of_the_table(dice: Dice, data: bytes) -> bytes:
    """Put in a pickle of the table of hostile files; not a bomb, which torch, the oracle, would run."""
    rows = REFUSED_PICKLES | ODD_PICKLES
    return rows[dice.choice([name for name in rows if name not in BOMBS | DEEP])](data)


UNCHECKED: dict[str, Callable[[Dice, bytes], bytes]] = {
    "corrupted": corrupted,
    "field": field,
    "local": local,
    "table, container": container_of_the_table,
}
CHECKED: dict[str, Callable[[Dice, bytes], bytes]] = {
    "repaired": repaired,
    "members": members_changed,
    "pickles": pickles_changed,
    "spliced": spliced,
    "aligned": aligned,
    "aliased": aliased,
    "table, pickle": pickle_of_the_table,
}
