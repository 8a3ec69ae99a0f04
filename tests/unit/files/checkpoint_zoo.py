"""Files of all kinds of content and of all ways of writing, each of a few kilobytes."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.serialization import config

from tests.unit.files.raw_zip import build, replaced, saved, unpacked


DTYPES = [
    dtype
    for name in sorted(dir(torch))
    if isinstance(dtype := getattr(torch, name), torch.dtype)
    and str(dtype) == f"torch.{name}"
    and not name.startswith(("q", "bits", "complex32"))
    and not (name.startswith(("int", "uint")) and dtype.itemsize == 1 and name[-1] in "1234567")
]


class Marked(Tensor):
    """A subclass of Tensor."""


def filled(dtype: torch.dtype, count: int = 6) -> Tensor:
    """Return a tensor of a dtype with bytes that differ."""
    size = count * dtype.itemsize
    raw = (torch.arange(size, dtype=torch.int64) * 37 % 251).to(torch.uint8)
    return (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)


def of_each_dtype() -> Any:
    """Return a tensor of each dtype that torch saves."""
    return {str(dtype): filled(dtype) for dtype in DTYPES}


def shapes() -> Any:
    """Return tensors without dimensions, without elements, and of one element."""
    return {
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty 3-dim": torch.empty(2, 0, 3, dtype=torch.int64),
        "other empty": torch.empty(0),
        "one": torch.ones(1, 1, 1),
        "5-dim": torch.arange(32.0).reshape(2, 2, 2, 2, 2),
    }


def views() -> Any:
    """Return tensors whose strides, offsets and storages are not those of a new tensor."""
    base = torch.arange(24.0)
    return {
        "slice": base[5:9],
        "step": base[1::3],
        "transposed": base.reshape(4, 6).t(),
        "expanded": base[2].expand(3, 4),
        "channels last": torch.arange(48.0)
        .reshape(1, 3, 4, 4)
        .contiguous(memory_format=torch.channels_last),
        "empty end": base[24:],
        "base": base,
        "overlapping": base.as_strided((3, 3), (1, 1), 2),
        "empty strided": torch.empty_strided((0, 3), (7, 2)),
    }


def ties() -> Any:
    """Return a state in which names are one object, share a storage, or are equal only."""
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    plain = torch.arange(4.0)
    inner = {"shared": plain}
    return {
        "a": weight,
        "b": weight,
        "detached": weight.detach(),
        "row": weight.detach()[1],
        "first": plain,
        "second": plain,
        "equal": plain.clone(),
        "inner": inner,
        "same inner": inner,
        "pair": (plain, inner),
    }


def modules() -> Any:
    """Return state dicts with metadata, and an optimizer's."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))
    adam = torch.optim.Adam(net.parameters(), amsgrad=True)
    net(torch.ones(4, 2)).sum().backward()
    adam.step()
    plan = torch.optim.lr_scheduler.StepLR(adam, 3)
    return {
        "model": net.state_dict(),
        "parameters": net.state_dict(keep_vars=True),
        "optimizer": adam.state_dict(),
        "scheduler": {k: v for k, v in plan.state_dict().items() if not callable(v)},
        "epoch": 3,
        "rng": torch.get_rng_state()[:16].clone(),
    }


def parameters() -> Any:
    """Return parameters and buffers."""
    return {
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "buffer": nn.Buffer(torch.ones(2)),
        "requires grad": torch.ones(2, requires_grad=True),
        "list": [nn.Parameter(torch.zeros(1)) for _ in range(3)],
    }


# Each of these is a file, so that one that torch refuses does not hide the others.
VALUES: dict[str, Any] = {
    "int": [0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63, -(2**64), 3**200],
    "very long int": 3**2000,
    "float": [0.0, -0.0, 1.5, float("inf"), float("nan"), 5e-324],
    "complex": 1 + 2j,
    "text": ["", "a", "Ä€𐍈", "x" * 300, "tab\t\x1b[31m", "\ud800 surrogate"],
    "empty bytes": b"",
    "bytes": [b"abc", bytes(range(256)), b"x" * 300],
    "bytearray": [bytearray(b"xyz"), bytearray()],
    "none": None,
    "bool": [True, False],
    "tuple": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
    "set": [{1, 2}, set()],
    "frozenset": frozenset({1}),
    "list": [[], [1], list(range(1100)), [[[[]]]]],
    "dict": {1: 2, (1, 2): 3, None: 4, "b": {}, 1.5: {"c": {}}},
    "counter": Counter("abca"),
    "ordered": OrderedDict(b=1, a=2),
    "size": [torch.Size([2, 3]), torch.Size([])],
    "device": [torch.device("cpu"), torch.device("cuda:1")],
    "dtype": [torch.float16, torch.int64],
    "layout": [torch.strided, torch.sparse_coo],
    "range": range(3),
    "number alone": 5,
    "text alone": "text",
    "empty dict": {},
}


def attributes() -> Any:
    """Return objects with attributes of their own."""
    ordered = OrderedDict(a=torch.ones(1))
    ordered._metadata = OrderedDict({"": {"version": 1}})
    ordered.note = ordered
    tensor = torch.ones(2)
    tensor.note = {"key": [1, 2]}
    parameter = nn.Parameter(torch.ones(2))
    parameter.note = "text"
    parameter.partner = tensor
    return {"ordered": ordered, "tensor": tensor, "parameter": parameter}


def circles() -> Any:
    """Return containers that hold themselves."""
    names: list[Any] = [1]
    names.append(names)
    table: dict[str, Any] = {"names": names}
    table["self"] = table
    around = OrderedDict(table=table)
    around["self"] = around
    return [table, around, names]


def bits() -> Any:
    """Return tensors with the bits for conjugate and negative, and NaN with payloads."""
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    payloads = torch.tensor([0x7FC00001, -0x3FFFFE, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    return {
        "conj": numbers.conj(),
        "conj in storage": torch.tensor([5 + 6j]).conj(),
        "neg": torch._neg_view(torch.arange(3.0)),
        "imag of conj": numbers.clone().conj().imag,
        "nan": payloads.view(torch.float32),
    }


def sparse() -> Any:
    """Return sparse tensors of each layout."""
    dense = torch.eye(4)
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor([[0, 0]], torch.ones(2), (2,)),
        "coalesced": torch.sparse_coo_tensor([[0, 0]], torch.ones(2), (2,)).coalesce(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "hybrid": torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 3), (2, 3)),
    }


def quantized() -> Any:
    """Return quantized tensors."""
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    values = torch.arange(6.0).reshape(2, 3)
    return {
        "tensor": torch.quantize_per_tensor(values, 0.5, 3, torch.quint8),
        "int32": torch.quantize_per_tensor(values, 0.5, 3, torch.qint32),
        "channel": torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8),
    }


def meta_tensors() -> Any:
    """Return tensors without memory."""
    return {
        "meta": torch.empty(2, 3, device="meta"),
        "meta strided": torch.empty_strided((2, 3), (1, 2), device="meta", dtype=torch.int8),
    }


def subclasses() -> Any:
    """Return a tensor of a subclass, which needs a permission."""
    one = torch.arange(3.0).as_subclass(Marked)
    one.note = "text"
    return {"subclass": one, "again": one, "plain": torch.ones(1)}


def nested() -> Any:
    """Return a nested tensor."""
    return {"nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])}


def storages() -> Any:
    """Return storages beside tensors that share them."""
    tensor = torch.arange(4, dtype=torch.uint8)
    return {
        "untyped": tensor.untyped_storage(),
        "tensor": tensor,
        "alone": torch.ones(3, dtype=torch.int16).untyped_storage(),
        "empty": torch.empty(0).untyped_storage(),
    }


def typed_storages() -> Any:
    """Return a storage of the kind that knows its dtype."""
    tensor = torch.arange(4, dtype=torch.int64)
    return {"typed": tensor.storage(), "tensor": tensor}


def numpy_values() -> Any:
    """Return a NumPy scalar, which needs a permission."""
    return {"tensor": torch.ones(1), "scalar": np.float64(0.5)}


def names() -> Any:
    """Return tensors under odd names."""
    odd = ["Ä€𐍈", "", ".", "a/b", "\x1b[31m", "\ud800", "line\nbreak", 0, 1.5, None, True, ("a", 1)]
    return {name: torch.full((1,), float(index)) for index, name in enumerate(odd)}


CONTENTS: dict[str, Callable[[], Any]] = {
    "dtypes": of_each_dtype,
    "shapes": shapes,
    "views": views,
    "ties": ties,
    "modules": modules,
    "parameters": parameters,
    "attributes": attributes,
    "circles": circles,
    "bits": bits,
    "sparse": sparse,
    "quantized": quantized,
    "meta": meta_tensors,
    "subclasses": subclasses,
    "nested": nested,
    "storages": storages,
    "typed storages": typed_storages,
    "numpy values": numpy_values,
    "names": names,
    "tensor alone": lambda: torch.arange(3.0),
    "parameter alone": lambda: nn.Parameter(torch.arange(3.0)),
    "many": lambda: {f"layer.{n}.weight": torch.full((2,), float(n)) for n in range(300)},
    **{f"value {name}": partial(VALUES.__getitem__, name) for name in VALUES},
}


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Ignore warnings: those of torch about quantized tensors, nested tensors and typed storages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def file_of(name: str) -> bytes:
    """Return a file of the contents of this name."""
    torch.manual_seed(0)
    with quiet():
        return saved(CONTENTS[name]())


def state() -> Any:
    """Return the state dict that is written in all ways."""
    base = torch.arange(16.0)
    tied = torch.ones(3)
    return OrderedDict(
        w=base.reshape(4, 4),
        part=base[3:7],
        tied=tied,
        again=tied,
        n=torch.tensor(7),
        e=torch.empty(0),
    )


@contextlib.contextmanager
def without_checksums() -> Generator[None]:
    """Have torch write files without checksums."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def unchecked() -> bytes:
    """Return a file without checksums."""
    with without_checksums():
        return saved(state())


def aligned(alignment: int) -> bytes:
    """Return a file whose storages begin at multiples of an alignment."""
    with _alignment(alignment):
        return saved(state())


@contextlib.contextmanager
def _alignment(alignment: int) -> Generator[None]:
    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        yield
    finally:
        config.save.storage_alignment = before


def moved(location: str, content: bytes | None = None) -> bytes:
    """Return a file whose storages come from another device."""
    data = content or saved(state())
    pickled = next(member.data for member in unpacked(data) if member.name.endswith(b"/data.pkl"))
    old, new = (b"X" + len(t).to_bytes(4, "little") + t.encode() for t in ("cpu", location))
    return replaced(data, {"data.pkl": pickled.replace(old, new)})


def big_endian() -> bytes:
    """Return a file as a machine of the opposite byte order writes it."""
    swapped = {
        name: torch.from_numpy(tensor.numpy().byteswap()) for name, tensor in state().items()
    }
    return replaced(saved(swapped), {"byteorder": b"big"})


def edited(content: Any, *changes: tuple[bytes, bytes]) -> bytes:
    """Return a file with some bytes of its pickle replaced, with valid checksums."""
    data = saved(content)
    (pickled,) = (m.data for m in unpacked(data) if m.name.endswith(b"/data.pkl"))
    for old, new in changes:
        assert old in pickled
        pickled = pickled.replace(old, new)
    return replaced(data, {"data.pkl": pickled})


def key_of(name: str) -> bytes:
    """Return the key of a storage as a pickle has it."""
    return b"X" + len(name).to_bytes(4, "little") + name.encode()


def in_folder(name: str) -> bytes:
    """Return a file whose members are in a folder of another name."""
    data = saved(state())
    for member in (members := unpacked(data)):
        member.name = name.encode() + b"/" + member.name.partition(b"/")[2]
    return build(members)


def to_path(folder: Any, name: str) -> bytes:
    """Return a file that torch has written to a path, whose folder has the name of the file."""
    path = folder / name
    torch.save(state(), path)
    data: bytes = path.read_bytes()
    path.unlink()
    return data


WAYS: dict[str, Callable[[], bytes]] = {
    "plain": lambda: saved(state()),
    "protocol 2": lambda: saved(state(), pickle_protocol=2),
    "protocol 3": lambda: saved(state(), pickle_protocol=3),
    "protocol 4": lambda: saved(state(), pickle_protocol=4),
    "protocol 5": lambda: saved(state(), pickle_protocol=5),
    "legacy": lambda: saved(state(), _use_new_zipfile_serialization=False),
    "no byte order": lambda: saved(state(), _disable_byteorder_record=True),
    "big endian": big_endian,
    "unknown byte order": lambda: replaced(saved(state()), {"byteorder": b"middle"}),
    "no checksums": unchecked,
    "alignment 4096": lambda: aligned(4096),
    "alignment 1": lambda: build(unpacked(saved(state())), alignment=1),
    "no descriptors": lambda: _without_descriptors(saved(state())),
    "no format version": lambda: replaced(saved(state()), {".format_version": None}),
    "no alignment record": lambda: replaced(saved(state()), {".storage_alignment": None}),
    "alignment that is not a number": lambda: replaced(
        saved(state()), {".storage_alignment": b"x"}
    ),
    "no version": lambda: replaced(saved(state()), {"version": None}),
    "no id": lambda: replaced(saved(state()), {".data/serialization_id": None}),
    "more members": lambda: replaced(saved(state()), {"extra/a.txt": b"text", "data/99": b"xyz"}),
    "cuda": lambda: moved("cuda:0"),
    "meta location": lambda: moved("meta"),
    "unknown location": lambda: moved("nowhere"),
    "other folder": lambda: in_folder("Model Ä 1"),
    "two dtypes of a storage": lambda: edited(
        {"float": torch.arange(8.0), "int": torch.arange(8, dtype=torch.int32)},
        (key_of("1"), key_of("0")),
    ),
    "two sizes of a storage": lambda: edited(
        {"long": torch.arange(8.0), "short": torch.arange(4.0)}, (key_of("1"), key_of("0"))
    ),
    "reversed": lambda: build(unpacked(saved(state()))[::-1]),
}


def _without_descriptors(data: bytes) -> bytes:
    members = unpacked(data)
    for member in members:
        member.descriptor = None
    return build(members)


@functools.cache
def file_written(way: str) -> bytes:
    """Return a file of one state dict, written in the way of this name."""
    return WAYS[way]()


def scripted() -> bytes:
    """Return a TorchScript archive with parameters, buffers, constants and an extra file."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
    file = io.BytesIO()
    torch.manual_seed(0)
    with quiet():
        torch.jit.save(torch.jit.script(net.eval()), file, _extra_files={"note.txt": b"hello"})
    return file.getvalue()
