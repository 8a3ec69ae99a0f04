"""The tensors in files that are no TorchScript archives, without running any of them."""

import io
import json
import math
from collections.abc import Iterator
from typing import IO, Any, Final

from modkit.errors import FileError
from modkit.files.zip_check import Archive
from modkit.jit._archive_kinds import read_safetensors_header
from modkit.jit._archive_pickle import Name, read_pickle
from modkit.jit._archive_tensors import Kind, Reader, TensorInfo, itemsize_of


_SAFETENSORS_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "C64": "complex64",
}

# The numbers of dtypes in the schema of torch.export.
_EXPORT_DTYPES: Final = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}

# Further names in pickles that do no more than to make tensors and containers.
_HARMLESS: Final = {
    "torch._tensor._rebuild_from_type_v2",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
    "torch.serialization._get_layout",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "builtins.set",
    "builtins.bytearray",
    "__builtin__.set",
    "_codecs.encode",
}


def is_harmless(name: Name) -> bool:
    """Tell whether importing and calling a name, as a pickle does, only makes tensors or containers."""
    is_storage = name.module in {"torch", "torch.storage"} and name.name.endswith("Storage")
    is_rebuild = name.module == "torch._utils" and name.name.startswith("_rebuild_")
    is_dtype = name.module == "torch" and itemsize_of(name.name) > 0
    return is_storage or is_rebuild or is_dtype or str(name) in _HARMLESS


def tensors_of_safetensors(file: IO[bytes], what: str) -> list[TensorInfo]:
    """Read the description that the file begins with.

    Raises:
        FileError: A tensor is not where, or not as large as, the description says.
    """
    header = read_safetensors_header(file) or {}
    end = file.seek(0, 2)
    file.seek(0)
    first = 8 + int.from_bytes(file.read(8), "little")
    found: list[TensorInfo] = []
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        try:
            found.append(_safetensor(name, facts, end - first))
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{what} is damaged: {name}: {error}") from error
    return found


def _safetensor(name: str, facts: Any, available: int) -> TensorInfo:
    shape, (start, end) = tuple(map(int, facts["shape"])), facts["data_offsets"]
    dtype = _SAFETENSORS_DTYPES.get(facts["dtype"], str(facts["dtype"]))
    itemsize = itemsize_of(dtype)
    if not 0 <= start <= end <= available:
        raise ValueError("it reaches beyond the end of the file")
    if itemsize and facts["dtype"] != "F4" and end - start != math.prod(shape) * itemsize:
        raise ValueError("its size does not fit its shape")
    return TensorInfo(name, "entry", shape, dtype, end - start)


def tensors_of_export(archive: Archive) -> list[TensorInfo]:
    """Read the tables of weights and constants of a torch.export archive."""
    found: list[TensorInfo] = []
    for member in archive.members:
        if member.endswith(("_weights_config.json", "_constants_config.json")):
            found += _table(archive, member)
        elif member in {"serialized_state_dict.pt", "serialized_constants.pt"}:
            # The format before torch 2.8: what torch.save has written.
            data = io.BytesIO(archive.read(member))
            inner = Archive(data, f"{archive.what}: {member}")
            found += tensors_of_zip(inner, "data.pkl", "data/")[0]
    return found


def _table(archive: Archive, member: str) -> Iterator[TensorInfo]:
    constants = member.endswith("_constants_config.json")
    try:
        entries = json.loads(archive.text(member))["config"]
        for name, entry in entries.items():
            facts = entry.get("tensor_meta")
            if facts is None:
                continue
            shape = tuple(int(size["as_int"]) for size in facts["sizes"])
            dtype = _EXPORT_DTYPES.get(facts["dtype"], f"dtype {facts['dtype']}")
            kind: Kind = "parameter" if entry["is_param"] else "buffer"
            kind = "constant" if constants else kind
            index = facts["device"]["index"]
            device = facts["device"]["type"] + ("" if index is None else f":{index}")
            nbytes = math.prod(shape) * itemsize_of(dtype)
            grad = facts["requires_grad"] is True
            folder = member.rpartition("/")[0]
            storage = f"{folder}/{entry['path_name']}"
            yield TensorInfo(name, kind, shape, dtype, nbytes, device, grad, storage)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{archive.what} is damaged: {member}: {error!r}") from error


def tensors_of_zip(
    archive: Archive, member: str, folder: str
) -> tuple[list[TensorInfo], tuple[Name, ...]]:
    """Read what torch.save has written: its tensors, and the names that it would import."""
    what = f"{archive.what}: {member}"
    root, names = read_pickle(io.BytesIO(archive.read(member)), what)
    reader = Reader(archive.sizes, folder, what)
    return list(reader.walk(root, lambda owner, key: "attribute")), names


def tensors_of_pickle(
    file: IO[bytes], what: str, legacy: bool
) -> tuple[list[TensorInfo], tuple[Name, ...]]:
    """Read a plain pickle, or what torch.save wrote before version 1.6: four pickles, then numbers."""
    file.seek(0)
    data = io.BytesIO(file.read())
    if legacy:
        for _ in range(3):  # the magic number, the version, the sizes of the system's integers
            read_pickle(data, what)
    root, names = read_pickle(data, what)
    reader = Reader(None, "", what)
    return list(reader.walk(root, lambda owner, key: "attribute")), names
