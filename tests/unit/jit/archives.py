"""Archives to read and to damage."""

import functools
import io
import struct
import warnings
import zipfile
from typing import Any

import torch
from torch import Tensor


class Net(torch.nn.Module):
    """A network with parameters, buffers, tied weights, collections and a constant."""

    table: dict[str, Tensor]
    parts: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.body[0].weight
        self.table = {"a": torch.ones(2)}
        self.parts = [torch.ones(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]

    def forward(self, inputs: Tensor) -> Tensor:
        """Add up what each part makes of the inputs."""
        constant = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.body(inputs) + self.head(inputs) + constant + self.table["a"].sum()


def compiled(module: torch.nn.Module) -> Any:
    """Compile a module without the warning that TorchScript has no future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module.eval())


def traced(module: torch.nn.Module, *inputs: Tensor) -> Any:
    """Trace a module without the warning that TorchScript has no future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module.eval(), inputs)


def loaded(data: bytes) -> Any:
    """Load an archive with torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.load(io.BytesIO(data))


@functools.cache
def net() -> Any:
    """Return the compiled network."""
    torch.manual_seed(0)
    return compiled(Net())


@functools.cache
def archive() -> bytes:
    """Return the archive of the network, with an extra file."""
    data: bytes = net().save_to_buffer(_extra_files={"labels.txt": "cat,dog"})
    return data


def members(data: bytes) -> dict[str, bytes]:
    """Return what is in an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def place_of(data: bytes, name: str) -> int:
    """Return where the content of a member begins in the file."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        header = file.getinfo(name).header_offset
    name_length, extra_length = struct.unpack("<2H", data[header + 26 : header + 30])
    return header + 30 + int(name_length) + int(extra_length)


def packed(content: dict[str, bytes]) -> bytes:
    """Write an archive, with the checksums of what is put into it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for name, data in content.items():
            target.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()


def changed(data: bytes, new: dict[str, bytes | None]) -> bytes:
    """Write an archive with other members; those that are None are left out."""
    content = members(data)
    folder = next(iter(content)).partition("/")[0]
    for name, replaced in new.items():
        content.pop(f"{folder}/{name}", None)
        if replaced is not None:
            content[f"{folder}/{name}"] = replaced
    return packed(content)
