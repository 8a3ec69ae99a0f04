"""`modkit.files.inspect` on each kind of file. No code in a file is executed."""

import argparse
import hashlib
import io
import json
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modkit.errors import FileError
from modkit.files import FileInfo, TensorInfo, inspect
from modkit.files.kinds import kind_of
from tests.cases import for_each


class Evil:
    """An object whose unpickling creates a marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)


def legacy(content: object, path: Path, **options: Any) -> Path:
    """Write a file as torch did before version 1.6."""
    torch.save(content, path, _use_new_zipfile_serialization=False, **options)
    return path


def scripted(path: Path) -> Path:
    """Write a TorchScript archive with an extra file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 3)), path, _extra_files={"labels.txt": b"abc"})
    return path


def exported(path: Path) -> Path:
    """Write a torch.export archive."""
    torch.export.save(torch.export.export(nn.Linear(2, 3), (torch.ones(1, 2),)), path)
    return path


def sharded(folder: Path) -> Path:
    """Write two shards and their index; return the index."""
    save_file({"a": torch.ones(2, 3)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, folder / "model-2.safetensors")
    index = folder / "model.safetensors.index.json"
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def rewritten(path: Path, name: str, content: bytes) -> None:
    """Replace a member of a zip file, with the right checksum."""
    with zipfile.ZipFile(path) as archive:
        members = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in members.items():
            archive.writestr(each, content if each.endswith(f"/{name}") else data)


CONTENT = {
    "model": OrderedDict(weight=torch.ones(2, 3), bias=torch.ones(3, dtype=torch.bfloat16)),
    "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]},
    "epoch": 7,
    "name": "run",
    "history": [1.5, 2.5],
}
TENSORS = (
    TensorInfo("model.weight", (2, 3), "float32", 24),
    TensorInfo("model.bias", (3,), "bfloat16", 6),
    TensorInfo("optimizer.state.0.step", (), "float32", 4),
)
ENTRIES = {
    "optimizer.param_groups.0.lr": "0.1",
    "epoch": "7",
    "name": "'run'",
    "history": "[1.5, 2.5]",
}


def check_content(info: FileInfo) -> None:
    """Assert that the content is the one above."""
    assert info.tensors == TENSORS
    assert info.entries == ENTRIES
    assert info.groups["model"] == ("weight", "bias")
    assert info.groups[""] == ("model", "optimizer", "epoch", "name", "history")
    assert info.note == ""


def test_a_torch_save_file(tmp_path: Path) -> None:
    """Tensors, other entries, size and digest are listed."""
    path = tmp_path / "last.pt"
    torch.save(CONTENT, path)
    info = inspect(path)

    check_content(info)
    assert (info.path, info.kind) == (str(path), "torch.save file")
    assert (info.nbytes, info.sha256) == (
        path.stat().st_size,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def test_other_entries_are_short(tmp_path: Path) -> None:
    """Values that are not tensors are shown shortened and printable, whatever their size."""
    content = {
        "text": "x" * 10_000,
        "control": "\x1b[31m\n",
        "number": 1 << 2_000,
        "seed": (1 << 256) - 1,
        "number of 257 bits": 1 << 256,
        "list": list(range(10_000)),
        "lists": [[1, 2], (3,)],
        "options": argparse.Namespace(lr=0.1),
        "dtype": torch.float16,
        "size": torch.Size([2]),
        (1, 2): None,
    }
    torch.save(content, tmp_path / "x.pt")
    entries = inspect(tmp_path / "x.pt").entries

    assert all(len(text) < 100 and text.isprintable() for text in entries.values())
    assert entries["options.lr"] == "0.1"
    assert entries["dtype"] == "torch.float16"
    assert entries["(1, 2)"] == "None"
    assert entries["list"] == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert entries["lists"] == "[list, tuple]"
    assert entries["number"] == entries["number of 257 bits"] == "int"
    assert entries["seed"] == str(2**256 - 1)


def test_tensors_without_plain_memory(tmp_path: Path) -> None:
    """They are listed by the function that makes them."""
    torch.save({"sparse": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    found = inspect(tmp_path / "x.pt")

    assert (found.tensors, found.note) == ((), "")
    assert found.entries["sparse"] == "torch._utils._rebuild_sparse_tensor"


@pytest.mark.parametrize("nested", ["lists", "itself"])
def test_a_hostile_structure_ends(tmp_path: Path, nested: str) -> None:
    """A file that names one object a billion times, or itself, is listed up to a bound."""
    content: Any = {"x": torch.ones(1)}
    if nested == "itself":
        content["self"] = [content] * 8
    else:
        for _ in range(12):
            content = {str(index): content for index in range(10)}
    torch.save(content, tmp_path / "x.pt")
    info = inspect(tmp_path / "x.pt")

    assert 0 < len(info.tensors) < 2_000_000
    # A group that is cut has the names before the cut.
    assert info.groups[""][0] == next(iter(content))
    assert info.note == (
        "the listing is cut: the file has too many entries" if nested == "lists" else ""
    )


def test_a_torchscript_archive(tmp_path: Path) -> None:
    """All members are listed with their sizes."""
    info = inspect(scripted(tmp_path / "net.pt"))

    assert (info.kind, info.tensors) == ("TorchScript archive", ())
    assert info.entries["extra/labels.txt"] == "3 bytes"
    assert [text for name, text in info.entries.items() if name.startswith("data/")] == [
        "24 bytes",
        "12 bytes",
    ]


def test_a_torch_export_archive(tmp_path: Path) -> None:
    """All members are listed."""
    info = inspect(exported(tmp_path / "net.pt2"))

    assert info.kind == "torch.export archive"
    assert {"archive_format", "byteorder"} <= info.entries.keys()


def test_a_safetensors_file(tmp_path: Path) -> None:
    """Tensors and metadata are listed."""
    path = tmp_path / "net.bin"
    save_file(
        {"a": torch.ones(2, 3), "b": torch.ones(2).to(torch.float8_e4m3fn)}, path, {"by": "me"}
    )
    info = inspect(path)

    assert info.kind == "safetensors file"
    assert info.tensors == (
        TensorInfo("a", (2, 3), "float32", 24),
        TensorInfo("b", (2,), "float8_e4m3fn", 2),
    )
    assert info.entries == {"by": "'me'"}


@pytest.mark.parametrize("given", ["index", "directory"])
def test_a_sharded_checkpoint(tmp_path: Path, given: str) -> None:
    """All shards count, through the index or the directory."""
    index = sharded(tmp_path)
    info = inspect(index if given == "index" else tmp_path)

    assert (info.kind, info.sha256) == ("sharded checkpoint", "")
    assert info.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert info.tensors == (
        TensorInfo("a", (2, 3), "float32", 24),
        TensorInfo("b", (4,), "bfloat16", 8),
    )


@for_each("name", ["../x.safetensors", "/dev/zero", "", 3, None])
def test_an_index_names_files_beside_it(tmp_path: Path, name: object) -> None:
    """An index cannot make the reader open files in other folders."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))

    with pytest.raises(FileError, match="is corrupt") as caught:
        inspect(index)
    assert caught.value.kind == "sharded checkpoint"


@for_each("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_with_code_is_not_executed(tmp_path: Path, protocol: int) -> None:
    """A pickle that runs eval is a pickle in each protocol that begins with its number."""
    path, marker = tmp_path / "e.pkl", tmp_path / "marker"
    path.write_bytes(pickle.dumps(Evil(marker), protocol))
    info = inspect(path)

    assert info.kind == "pickle"
    assert "would execute code" in info.note
    assert "fickling and picklescan" in info.note
    assert not marker.exists()


LFS = (
    "it begins with 'version https://git-lfs.github.com/spec/v1': a Git LFS pointer; "
    "`git lfs pull` downloads the file"
)


def kinds() -> Iterator[tuple[bytes, str, str]]:
    """Yield contents of files with their kinds, and the notes about them."""
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        old = io.BytesIO()
        torch.save(CONTENT, old, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
        yield old.getvalue(), "torch.save file (before torch 1.6)", "unverified: no checksums"
        for value in (None, 1, "text", [], {"a": [1, 2]}, list(range(5000))):
            yield pickle.dumps(value, protocol), "pickle", ""

    yield b"version https://git-lfs.github.com/spec/v1\noid 1\n", "text file", LFS
    lines = ["<!DOCTYPE html>", "No. 1 (I think)"]
    lines += ["cat", "class Foo:", "import os", "(hello)", "Übergröße"]
    for line in lines:
        yield f"{line}\ndog\n".encode(), "text file", f"it begins with {line!r}"
    yield b"." * 100, "text file", f"it begins with {'.' * 60!r}"
    for path in Path(__file__).parent.glob("test_*.py"):
        yield path.read_bytes(), "text file", ""

    for content in (b"\x7f\n", bytes(range(256)) * 20, b"N](\x86e."):
        yield content, "unknown file", ""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a/readme.txt", "text")
    yield archive.getvalue(), "zip file", ""


@for_each(("content", "kind", "note"), kinds)
def test_kinds(tmp_path: Path, content: bytes, kind: str, note: str) -> None:
    """Files are told apart by their content; text is shown by its first line."""
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    info = inspect(path)

    assert (info.kind, kind_of(content)) == (kind, kind)
    assert note in info.note
    assert kind != "text file" or not note or info.note == note


def test_an_empty_file(tmp_path: Path) -> None:
    """An empty file is an error."""
    (tmp_path / "x.pt").touch()

    with pytest.raises(FileError, match=r"x\.pt is an empty file, not a checkpoint") as caught:
        inspect(tmp_path / "x.pt")
    assert caught.value.kind == "empty file"


@pytest.mark.parametrize("kind", ["zip", "safetensors"])
def test_a_truncated_file(tmp_path: Path, kind: str) -> None:
    """Files that have been cut off anywhere behind their first bytes are an error."""
    path = tmp_path / "x.pt"
    content = {"weight": torch.randn(100), "bias": torch.randn(10)}
    if kind == "safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    data = path.read_bytes()
    for length in (len(data) - 1, len(data) - 400, len(data) // 2, 100):
        path.write_bytes(data[:length])
        with pytest.raises(FileError, match=r"x\.pt"):
            inspect(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80\x02\xff.", "it has 0xff, which is not read"),
        (b"\x80\x02", "EOFError"),
        (b"", "EOFError"),
    ],
    ids=["opcode", "cut", "empty"],
)
def test_a_corrupt_pickle_in_a_torch_save_file(tmp_path: Path, content: bytes, reason: str) -> None:
    """The error says that the pickle is bad, and not another part of the file."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1)}, path)
    rewritten(path, "data.pkl", content)

    message = rf"x\.pt cannot be read as .*: its pickle is invalid: {reason}$"
    with pytest.raises(FileError, match=message):
        inspect(path)


def test_a_member_that_a_pickle_names_is_missing(tmp_path: Path) -> None:
    """The error names it, and its size."""
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            if not name.endswith("data/0"):
                new.writestr(name, old.read(name))

    with pytest.raises(FileError, match="corrupt: 'data/0' has no bytes, 12 in the pickle"):
        inspect(tmp_path / "y.pt")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    """A FIFO is not opened, as itself and as a shard."""
    os.mkfifo(tmp_path / "x.pt")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.pt"}}))

    for path in (tmp_path / "x.pt", index, tmp_path):
        with pytest.raises(FileError, match="is not a regular file"):
            inspect(path)


def test_missing_files(tmp_path: Path) -> None:
    """A missing file, and a directory without a checkpoint, are FileNotFoundError."""
    with pytest.raises(FileNotFoundError):
        inspect(tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError, match="is a directory without"):
        inspect(tmp_path)


def test_a_torch_save_file_with_code_is_not_executed(tmp_path: Path) -> None:
    """The note warns that loading with pickle would execute code, and names the function."""
    path, marker = tmp_path / "e.pt", tmp_path / "marker"
    content = {"model": Evil(marker)}
    torch.save(content, path)
    info = inspect(path)

    assert info.kind.startswith("torch.save file")
    assert "would execute code" in info.note
    assert "eval" in info.note
    assert (info.tensors, marker.exists()) == ((), False)
