"""One table of hostile files: the unit tests read each of them, and the fuzzer corrupts them further.

Each row makes a file of an intact one. ``REFUSED_ZIPS`` and ``HARMLESS_ZIPS`` change the zip container of any file,
the other tables the pickle of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable

from tests.unit.files.hostile import (
    ORDERED,
    called,
    folder_of,
    long_int,
    named,
    numbers,
    state,
    storage,
    tensor,
    text,
    tuple_of,
)
from tests.unit.files.raw_zip import Member, build, unpacked, with_pickle


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


def sized(data, **fields):
    """Return a file whose first member has zip64 sizes with these fields."""
    return changed(data, central={"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF}, **fields)


def long_sizes(*values):
    """Return the field that has the sizes of large members."""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def pickle_of(data):
    """Return the index of the pickle among the members."""
    return [member.name.endswith(b"/data.pkl") for member in unpacked(data)].index(True)


REFUSED_ZIPS: dict[str, Callable[[bytes], bytes]] = {
    "empty name": lambda d: added(d, b""),
    "name of a slash": lambda d: added(d, b"/"),
    "absolute name": lambda d: added(d, b"/etc/passwd"),
    "name above the folder": lambda d: added(d, b"../evil"),
    "other folder": lambda d: added(d, b"elsewhere/data.pkl"),
    "same name twice": lambda d: added(d, b"FOLDER/data.pkl"),
    "same name in capitals": lambda d: added(d, b"FOLDER/DATA.PKL"),
    "same folder in capitals": lambda d: added(d, folder_of(d).upper() + b"data.pkl"),
    "name that is not UTF-8": lambda d: added(d, b"FOLDER/\xff\xfe"),
    "zero in a name": lambda d: added(d, b"FOLDER/data.pkl\0.txt"),
    "encrypted": lambda d: changed(d, central={"flags": 0x809}),
    "strongly encrypted": lambda d: changed(d, central={"flags": 0x849}),
    "masked headers": lambda d: changed(d, central={"flags": 0x2808}),
    "two disks": lambda d: build(unpacked(d), locator={"disks": 2}),
    "other long count": lambda d: build(unpacked(d), end_64={"count": 3, "here": 3}),
    "count of 2**63": lambda d: build(unpacked(d), end_64={"count": 1 << 63, "here": 1 << 63}),
    "other long length": lambda d: build(unpacked(d), end_64={"length": 100}),
    "other long offset": lambda d: build(unpacked(d), end_64={"offset": 8}),
    "offset behind the end": lambda d: build(unpacked(d), end_64={"offset": 1 << 62}),
    "locator elsewhere": lambda d: build(unpacked(d), locator={"offset": 0}),
    "only long counts": lambda d: build(
        unpacked(d), end={"count": 0xFFFF, "here": 0xFFFF}, end_64={"count": 1, "here": 1}
    ),
    "no long sizes": lambda d: sized(d, extra=b""),
    "half of the long sizes": lambda d: sized(d, extra=long_sizes(5)),
    "long sizes that end early": lambda d: sized(d, extra=b"\x01\0\x10\0abc"),
    "long sizes of 2**63": lambda d: sized(d, extra=long_sizes(1 << 63, 1 << 63)),
    "no signature in the table": lambda d: changed(d, central={"signature": b"PK\x03\x04"}),
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
    "no local header": lambda d: changed(d, local={"signature": b"PK\x01\x02"}),
    "long extra field in local header": lambda d: changed(d, local={"extra": 65535}),
    "unknown method": lambda d: changed(d, method=99),
    "deflated pickle": lambda d: changed(d, pickle_of(d), method=8),
    "stored as deflated": lambda d: changed(d, pickle_of(d), central={"method": 8}),
    "bytes behind": lambda d: d + b"\0",
    "bytes before": lambda d: build(unpacked(d), before=b"#!/bin/sh\n"),
    "bytes before, offsets kept": lambda d: b"#!/bin/sh\n" + d,
    "comment": lambda d: build(unpacked(d), comment=b"comment"),
    "length of a comment": lambda d: build(unpacked(d), end={"comment": 4}),
    "end in a comment": lambda d: build(unpacked(d), comment=d[-98:]),
    "two files": lambda d: d + d,
    "no members": lambda d: build([]),
    "only the end": lambda d: d[-22:],
    "only the beginning": lambda d: d[:4],
    "nothing": lambda d: b"",
    "no end": lambda d: d[:-22],
    "zeros": lambda d: bytes(len(d)),
}
_FIELDS = {
    "central": ("made", "version", "flags", "method", "time", "crc", "disk", "external"),
    "local": ("version", "flags", "method", "time", "crc", "size", "packed", "extra"),
    "descriptor": ("signature", "crc", "size", "packed"),
}
_HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "folder itself": lambda d: added(d, b"FOLDER/", b""),
    "name that leaves the folder": lambda d: added(d, b"FOLDER/../../evil"),
    "control characters in a name": lambda d: added(d, b"FOLDER/a\x1b[31m\nb"),
    "long name": lambda d: added(d, b"FOLDER/" + b"x" * 60000),
    "many members": crowded,
}
for _where, _names in _FIELDS.items():
    for _name in _names:
        _value: object = b"\0\0\0\0" if _name == "signature" else 0x11
        _HARMLESS[f"{_where} {_name}"] = functools.partial(changed, **{_where: {_name: _value}})
for _record in ("end", "end_64"):
    for _name in ("disk", "first", "here", "count", "length", "offset"):
        _HARMLESS[f"{_record} {_name}"] = functools.partial(
            lambda d, fields: build(unpacked(d), **fields), fields={_record: {_name: 1}}
        )
# Fields that readers may not need. They are refused, or change nothing.
HARMLESS_ZIPS = _HARMLESS


EMPTY = b"]"
ONE = tuple_of(numbers(1))

# Invalid pickles, and pickles that end early.
BROKEN = {
    "nothing": b"",
    "only the protocol": b"\x80\x02",
    "only the end": b".",
    "nothing to return": b"\x80\x02.",
    "unknown opcode": b"\x80\x02\xff.",
    "unknown protocol": b"\x80\x63N.",
    "no value": b"\x80\x02}X\x01\0\0\0ws.",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xffabc.",
    "text of 2 GB": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "text of 2**60": b"\x80\x04\x8d\0\0\0\0\0\0\0\x10abc.",
    "bytes of 2**60": b"\x80\x04\x8e\0\0\0\0\0\0\0\x10abc.",
    "bytearray of 2**60": b"\x80\x05\x96\0\0\0\0\0\0\0\x10abc.",
    "frame of 2**40": b"\x80\x04\x95\0\0\0\0\0\x01\0\0N.",
    "int of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "negative length": b"\x80\x02\x8b\xff\xff\xff\xffabc.",
    "text that is not UTF-8": b"\x80\x02" + text(b"\xff\xfe") + b".",
    "line without end": b"\x80\x02cos",
    "name that is not UTF-8": b"\x80\x02c\xff\n\xfe\n.",
    "pop from nothing": b"\x80\x020000.",
    "mark without end": b"\x80\x02((((.",
    "tuple without mark": b"\x80\x02t.",
    "odd number of items": b"\x80\x02}(" + numbers(1) + b"u.",
    "append to a number": b"\x80\x02" + numbers(1) + b"Na.",
    "set items of None": b"\x80\x02NNNs.",
    "unhashable key": b"\x80\x02}]Ns.",
    "memo that is not there": b"\x80\x02h\x63.",
    "memo far away": b"\x80\x02j\xff\xff\xff\xff.",
    "memo in text": b"\x80\x02g99999999999999999999\n.",
    "negative memo": b"\x80\x02Np-1\n.",
    "memo that is not a number": b"\x80\x02Npabc\n.",
    "number in text": b"\x80\x02I" + b"9" * 5000 + b"\n.",
    "float in text": b"\x80\x02Fabc\n.",
    "quotes in text": b"\x80\x02S'abc\n.",
    "escapes in text": b"\x80\x02V\\ud8\n.",
    "extension 1": b"\x80\x02\x82\x01.",
    "extension 2": b"\x80\x02\x83\x01\x01.",
    "extension 4": b"\x80\x02\x84\x01\x01\x01\x7f.",
    "buffer": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05N\x98.",
    "id in text": b"\x80\x02Pstorage\n.",
}
# Invalid storages and tensors in a pickle.
WRONG_TENSORS = {
    "id is None": b"NQ",
    "id is a number": numbers(3) + b"Q",
    "id is a text": text("storage") + b"Q",
    "id is empty": b")Q",
    "id is a list": b"](" + text("storage") + b"eQ",
    "id of a module": tuple_of(text("module"), text("x")) + b"Q",
    "id of one part": tuple_of(text("storage")) + b"Q",
    "id of six parts": tuple_of(text("storage"), *([text("0")] * 5)) + b"Q",
    "kind is a dtype": tensor(storage(kind=b"NN0")),
    "kind is a text": tensor(storage(kind=text("FloatStorage"))),
    "kind is a function": tensor(storage(kind=named("torch._utils", "_rebuild_tensor_v2"))),
    "no such storage": tensor(storage(key=text("77"))),
    "key is None": tensor(storage(key=b"N")),
    "key is a list": tensor(storage(key=EMPTY)),
    "key leaves the folder": tensor(storage(key=text("../data.pkl"))),
    "key is a path": tensor(storage(key=text("/etc/passwd"))),
    "key has a zero": tensor(storage(key=text("0\0"))),
    "2**52 elements": tensor(storage(numel=long_int(1 << 52))),
    "2**63 elements": tensor(storage(numel=long_int(1 << 63))),
    "2**200 elements": tensor(storage(numel=long_int(1 << 200))),
    "a million elements": tensor(
        storage(numel=numbers(1_000_000)), size=tuple_of(numbers(1_000_000))
    ),
    "5 elements of 4": tensor(storage(numel=numbers(5)), size=tuple_of(numbers(5))),
    "-1 elements": tensor(storage(numel=numbers(-1))),
    "number of elements is a text": tensor(storage(numel=text("4"))),
    "number of elements is None": tensor(storage(numel=b"N")),
    "wider dtype": tensor(storage(kind=named("torch", "DoubleStorage"))),
    "view behind the end": tensor(offset=numbers(1)),
    "view far behind the end": tensor(offset=long_int(1 << 62)),
    "negative offset": tensor(offset=numbers(-1)),
    "offset of 2**64": tensor(offset=long_int(1 << 64)),
    "negative size": tensor(size=tuple_of(numbers(-1))),
    "negative stride": tensor(stride=tuple_of(numbers(-1))),
    "stride of 2**62": tensor(stride=tuple_of(long_int(1 << 62))),
    "size of 2**62": tensor(size=tuple_of(long_int(1 << 62))),
    "size times stride overflows": tensor(
        size=tuple_of(long_int(1 << 33), long_int(1 << 33)),
        stride=tuple_of(long_int(1 << 31), numbers(1)),
    ),
    "fewer strides": tensor(size=tuple_of(numbers(2), numbers(2))),
    "more strides": tensor(stride=tuple_of(numbers(1), numbers(1))),
    "size is a text": tensor(size=text("4")),
    "sizes are texts": tensor(size=tuple_of(text("4"))),
    "sizes are None": tensor(size=tuple_of(b"N")),
    "offset is None": tensor(offset=b"N"),
    "storage is None": tensor(b"N"),
    "storage is a number": tensor(numbers(0)),
    "storage is its class": tensor(named("torch", "FloatStorage")),
    "one argument": called(named("torch._utils", "_rebuild_tensor_v2"), storage()),
    "no arguments": called(named("torch._utils", "_rebuild_tensor_v2")),
    "arguments are a list": named("torch._utils", "_rebuild_tensor_v2") + b"]R",
    "call of a number": numbers(3) + b")R",
    "call of a text": text("os.system") + b")R",
    "parameter of a number": called(
        named("torch._utils", "_rebuild_parameter"), numbers(3), b"\x88", ORDERED
    ),
    "state of a dict is a number": ORDERED + numbers(3) + b"b",
    "state of a list": EMPTY + b"}b",
    "state of None": b"N}b",
    "new object of a tensor": named("torch", "Tensor") + tuple_of(numbers(-5)) + b"\x81",
}
# Pickles that torch reads or refuses, with the same outcome in modkit.
ODD = {
    "parameter of integers with a gradient": called(
        named("torch._utils", "_rebuild_parameter"),
        tensor(
            storage(key=text("1"), numel=numbers(2), kind=named("torch", "LongStorage")),
            size=tuple_of(numbers(2)),
        ),
        b"\x88",
        ORDERED,
    ),
    "key is a number": tensor(storage(key=numbers(0))),
    "location is a number": tensor(storage(location=numbers(0))),
    "location is a list": tensor(storage(location=EMPTY)),
    "fewer elements than stored": tensor(storage(numel=numbers(2)), size=tuple_of(numbers(2))),
    "narrower dtype": tensor(storage(numel=numbers(8), kind=named("torch", "HalfStorage"))),
    "expanded to 2**62": tensor(size=tuple_of(long_int(1 << 62)), stride=tuple_of(numbers(0))),
    "no elements at 2**64": tensor(size=tuple_of(numbers(0)), offset=long_int(1 << 64)),
    "no elements far away": tensor(size=tuple_of(numbers(0)), offset=numbers(4)),
    "sizes are lists": tensor(size=b"](" + numbers(4) + b"e", stride=b"](" + numbers(1) + b"e"),
    "sizes are bools": tensor(size=tuple_of(b"\x88")),
    "sizes are floats": tensor(size=tuple_of(b"G" + struct.pack(">d", 4.0))),
    "65 dimensions": tensor(size=tuple_of(*[numbers(1)] * 65), stride=tuple_of(*[numbers(1)] * 65)),
    "gradient is a text": tensor(grad=text("x")),
    "hooks are a number": tensor(None, numbers(0), ONE, ONE, b"\x89", numbers(3)),
    "hooks hold a text": tensor(
        b"", numbers(0), ONE, ONE, b"\x89", ORDERED + numbers(1) + text("x") + b"s"
    ),
    "metadata": tensor(None, numbers(0), ONE, ONE, b"\x89", ORDERED, b"}"),
    "metadata is a number": tensor(None, numbers(0), ONE, ONE, b"\x89", ORDERED, numbers(3)),
    "conj of floats": tensor(
        b"", numbers(0), ONE, ONE, b"\x89", ORDERED, b"}" + text("conj") + b"\x88s"
    ),
    "unknown metadata": tensor(
        b"", numbers(0), ONE, ONE, b"\x89", ORDERED, b"}" + text("data") + b"\x88s"
    ),
    "attribute that is a method": ORDERED + b"}" + text("items") + numbers(5) + b"sb",
    "attribute that is the class": ORDERED + b"}" + text("__class__") + b"}sb",
    "key is bytes": tensor(
        storage(key=called(named("_codecs", "encode"), text("0"), text("latin1")))
    ),
    "location is bytes": tensor(
        storage(location=called(named("_codecs", "encode"), text("cpu"), text("latin1")))
    ),
    "metadata of texts": tensor(
        b"", numbers(0), ONE, ONE, b"\x89", ORDERED, b"}" + text("neg") + text("") + b"s"
    ),
    "an instruction of protocol 4": tensor() + b"\x94",
    "two values": b"N" + tensor(),
    "no items for a text": text("x") + b"(u",
    "function that rebuilds tensors": named("torch._utils", "_rebuild_tensor_v2"),
}


def nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    """Return a pickle of containers within containers."""
    return b"\x80\x02" + opening * depth + closing * depth + b"."


DEEP = {
    "lists": nested(b"]", b"a", 200_000)[:-2] + b".",
    "tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "dicts": b"\x80\x02}" + b"N}" * 200_000 + b"s" * 200_000 + b".",
    "marks": b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".",
    "built dicts": b"\x80\x02"
    + (ORDERED + b"}" + text("a")) * 50_000
    + b"N"
    + b"sb" * 50_000
    + b".",
}


def shared(depth: int, pair: bytes) -> bytes:
    """Return opcodes for pairs of pairs, which are 2**depth objects for who follows them."""
    return b")" + b"".join(b"q%c" % n + b"h%c" % n + pair for n in range(depth))


BOMBS = {
    "hash of a tuple": b"\x80\x02}" + shared(60, b"\x86") + b"Ns.",
    "hash in an ordered dict": b"\x80\x02" + ORDERED + shared(60, b"\x86") + b"Ns.",
    "hash in a set": b"\x80\x02"
    + called(named("__builtin__", "set"), b"](" + shared(60, b"\x86") + b"e")
    + b".",
    "hash of a key": state(tensor(storage(key=shared(60, b"\x86")))),
    "hash of a location": state(tensor(storage(location=shared(60, b"\x86")))),
    "memo of 16 GB": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo of 4 GB": b"\x80\x02Nr\xff\xff\xff\x0f.",
    "large memo in text": b"\x80\x02Np2000000000\n.",
    "bytearray of 64 GB": state(called(named("__builtin__", "bytearray"), long_int(1 << 36))),
    "tensor of 64 GB": state(called(named("torch", "Tensor"), long_int(1 << 34))),
    "typed tensor of 64 GB": state(called(named("torch", "FloatTensor"), long_int(1 << 34))),
    "new tensor of 64 GB": state(named("torch", "Tensor") + tuple_of(long_int(1 << 34)) + b"\x81"),
    "storage of 64 GB": state(called(named("torch.storage", "UntypedStorage"), long_int(1 << 36))),
    "slow encoding": state(
        called(named("_codecs", "encode"), text("\u00e9" * 200_000), text("punycode"))
    ),
    "slow domain name": state(
        called(named("_codecs", "encode"), text("\u00e9" * 200_000), text("idna"))
    ),
}


def pickled(case: bytes) -> Callable[[bytes], bytes]:
    """Return a function that puts a pickle into a file."""
    return lambda data: with_pickle(data, case)


# A set, which torch reads and the unpickler of modkit does not, keeps the file from the fast path.
BESIDE_A_SET = b"\x80\x02}" + text("set") + called(named("__builtin__", "set"), EMPTY) + b"s"
# Every reader of checkpoints refuses these, with a reason.
REFUSED_PICKLES: dict[str, Callable[[bytes], bytes]] = {
    **{name: pickled(case) for name, case in (BROKEN | DEEP | BOMBS).items()},
    **{name: pickled(state(case)) for name, case in WRONG_TENSORS.items()},
    **{
        f"{name}, beside a set": pickled(BESIDE_A_SET + state(case)[3:])
        for name, case in WRONG_TENSORS.items()
    },
}
# They are read as torch reads them, or refused.
ODD_PICKLES: dict[str, Callable[[bytes], bytes]] = {
    **{name: pickled(state(case)) for name, case in ODD.items()},
    **{
        f"storage without a tensor, {place}": pickled(
            b"\x80\x02"
            + storage(text("1"), numbers(2), named("torch", "LongStorage"), text(place))
            + state(tensor())[2:]
        )
        for place in ("cpu", "meta", "nowhere")
    },
}
