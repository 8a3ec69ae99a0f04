"""Wrong command lines and wrong files: one line of error, and no traceback."""

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cases import for_each
from tests.unit.cli.command_line import invoke
from tests.unit.files.test_inspect import Evil, rewritten, scripted


def _torn(path: Path, start: int, end: int | None) -> None:
    path.write_bytes(path.read_bytes()[start:end])


# Files by name; each begins as a copy of a small state dict.
FILES: dict[str, Callable[[Path], object]] = {
    "net": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "html": lambda path: path.write_text("<!DOCTYPE html>\n"),
    "lfs": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "headless": lambda path: _torn(path, 100, None),
    "tailless": lambda path: _torn(path, 0, -1),
    "half": lambda path: _torn(path, 0, 500),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
    "evil": lambda path: torch.save({"m": Evil(path.with_name("marker"))}, path),
    "opcode": lambda path: rewritten(path, "data.pkl", b"\x80\x02\xff."),
    "cut": lambda path: rewritten(path, "data.pkl", b"\x80\x02"),
    "nothing": lambda path: rewritten(path, "data.pkl", b""),
    "storage": lambda path: rewritten(path, "data/0", b"x"),
    "number": lambda path: torch.save(3, path),
    "list": lambda path: torch.save([torch.ones(1)], path),
    "no tensors": lambda path: torch.save({}, path),
    "nested": lambda path: torch.save({"model": {"w": torch.ones(1)}, "epoch": 1}, path),
    "shape": lambda path: torch.save({"w": torch.ones(9)}, path),
    "names": lambda path: torch.save({"other": torch.ones(2)}, path),
    "numbers as names": lambda path: torch.save({1: torch.ones(2)}, path),
    "sparse": lambda path: torch.save({"w": torch.eye(2).to_sparse()}, path),
    "legacy": lambda path: torch.save(
        {"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False
    ),
    "script": scripted,
    "x.safetensors": lambda path: path.write_bytes(b"\xff" * 20),
    "y.safetensors": lambda path: save_file({"w": torch.ones(2)}, path),
    "cut.safetensors": lambda path: (save_file({"w": torch.ones(2)}, path), _torn(path, 0, -4)),
    "bad.index.json": lambda path: path.write_text("{"),
    "gone.index.json": lambda path: path.write_text(json.dumps({"weight_map": {"w": "gone.bin"}})),
    "up.index.json": lambda path: path.write_text(json.dumps({"weight_map": {"w": "../net"}})),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "m\x1b[31m\n": lambda path: path.write_bytes(b""),
    "broken.py": lambda path: path.write_text("def f(:\n"),
    "leaves.py": lambda path: path.write_text("import sys\nsys.exit(0)\n"),
}
GOOD = {"net", "y.safetensors", "m\x1b[31m\n", "broken.py", "leaves.py"}
# Those from before torch 1.6 are read, too, and so are not wrong.
READ = [name for name in FILES if name not in GOOD | {"legacy"}]
# Every file as the second of two checkpoints.
AVERAGE = [f"average net|{name}|-o|out.pt" for name in READ]
# Every file as the second of two that are compared, and as both; the others are only different.
DIFF = [
    f"diff {first}|{name}|--values"
    for name in READ
    if name not in {"shape", "names"}
    for first in ("net", name)
]
INSPECT = [
    *("inspect empty", "inspect bytes", "inspect tailless", "inspect half", "inspect opcode"),
    *("inspect cut", "inspect nothing", "inspect x.safetensors", "inspect cut.safetensors"),
    *("inspect bad.index.json", "inspect gone.index.json", "inspect up.index.json", "inspect fifo"),
    *("inspect folder", "inspect m\x1b[31m\n", "inspect missing", "inspect", "inspect net|missing"),
    *("inspect html", "inspect net|empty", "inspect net|--limit|-1", "inspect net|--limit|x"),
    *("inspect net|--wrong", "inspect storage", "verify legacy", "verify html", "verify pickle"),
]
OPTIONS = [
    *("average", "average net", "average missing|-o|out.pt", "average net|-o|folder"),
    *("average net|-o|no/such/out.pt", "average net|-o|net|--overwrite", "average net|-o|empty"),
    *("average net|-o|out.pt|--weights|1,x", "average net|-o|out.pt|--weights|1,2"),
    *("average net|-o|out.pt|--weights|nan", "average net|net|-o|out.pt|--weights|1,-1"),
    *("average net|-o|out.pt|--weights|0", "average net|-o|out.pt|--step|3"),
    *("average net|-o|out.pt|--dtype|int8", "average net|-o|out.pt|--prefix|net."),
    *("average net|-o|out.pt|--key|model", "average nested|-o|out.pt|--key|model.w"),
    *("average net|-o|out.pt|--ema-sigma|0", "average net|-o|out.pt|--ema-sigma|0.1"),
    *("average net|-o|-", "convert net|-o|-"),
    *("average folder|-o|out.pt|--ema-sigma|0.1", "verify", "verify net|--write-sha256sums|-"),
    "average net|-o|out.pt|--ema-sigma|0.1|--key|x",
    *("convert net", "convert net|-o|net|--overwrite", "convert nested|-o|out.pt|--key|x"),
    *("average net|shape|-o|out.pt", "average -o"),
    *("diff", "diff net", "diff net|net|net", "diff net|missing", "diff net|net|--key|x"),
    *("diff net|net|--rtol|1", "diff net|net|--rtol|-1|--values", "diff net|net|--limit|-1"),
    *("diff net|nested|--key|model", "diff net|net|--key|a|--key|b|--key|c"),
]
OTHERS = [
    *("", "nonsense", "--nonsense", "compat --area|hats", "compat net:f|--area|members"),
    "compat --input|1",
    *("compat nothing", "compat missing.py:f", "compat broken.py:f", "compat leaves.py:f"),
]
# 2 for a wrong command line; `diff` has it for wrong files, too, since its 1 says that two differ.
WRONG_USE = [
    *("average net|-o|out.pt|--weights|1,2", "average net|-o|out.pt|--weights|nan"),
    *("average net|net|-o|out.pt|--weights|1,-1", "average net|-o|out.pt|--weights|0"),
    "average net|-o|out.pt|--ema-sigma|0.1|--key|x",
    *("average net|-o|-", "inspect missing", "verify", "verify missing", "convert net|-o|-"),
    *(line for line in [*DIFF, *OPTIONS] if line.startswith("diff")),
]
# 1 for a file that is not known and intact.
WRONG_FILES = [
    *("inspect html", "inspect empty", "inspect bytes", "inspect folder", "inspect net|html"),
    *("verify html", "verify net|half", "verify legacy", "average net|names|-o|out.pt"),
    *("average net|html|-o|out.pt", "convert html|-o|out.pt", "convert half|-o|out.pt"),
]
TEXTS = {
    "average nested|-o|out.pt": ("nested: 'model' is not a tensor but dict; choose a key: model"),
    "average net|-o|out.pt|--key|x": "has no state dict at the key 'x'; it needs no key",
    "average net|-o|out.pt|--weights|1,2": "--weights has 2 numbers for 1 checkpoints",
    "average net|-o|out.pt|--ema-sigma|0.1|--key|x": "takes neither --key nor --weights",
    "average folder|-o|out.pt|--ema-sigma|0.1": "no snapshots of averages in folder\n",
    "average net|html|-o|out.pt": "html is a text file",
    "average net|script|-o|out.pt": "script is a TorchScript archive",
    "average net|-o|-": "standard output is not supported; give the name of a file, or ./-",
    "inspect html": "html: text file, not a model",
    "inspect bytes": "bytes: unknown file, not a model",
    "inspect fifo": "is not a regular file",
    "inspect empty": "is an empty file, not a checkpoint",
    "inspect folder": "is a directory without",
    "diff net|sparse|--values": "without plain memory",
    "diff net|nested|--values": "choose a key: model",
}
# Words of the library, in whose place the command line names its options.
PYTHON = re.compile(
    r"\b(key|weights|dtype|sigma_rel|step|paths)=|weights_only=False|PosixPath"
    r"|average_checkpoints|has been changed"
)
LINES = dict.fromkeys(
    [*AVERAGE, *DIFF, *INSPECT, *OPTIONS, *OTHERS, *WRONG_USE, *WRONG_FILES, *TEXTS]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all files."""
    folder = tmp_path_factory.mktemp("files")
    for name, change in FILES.items():
        torch.save({"w": torch.ones(2)}, folder / name)
        change(folder / name)
    return folder


@pytest.mark.usefixtures("forked_models")
@for_each("line", LINES)
def test_a_wrong_input_is_one_line(folder: Path, monkeypatch, line: str) -> None:
    """The status is 1 or 2, the error is one printable line, and nothing is written or executed."""
    monkeypatch.chdir(folder)
    # Python itself may store the compiled script.
    compiled = folder / "__pycache__"
    before = {*folder.iterdir()} | {compiled}
    command, _, rest = line.partition(" ")
    arguments = [*filter(None, [command, *rest.split("|")])]
    found = invoke(*arguments)

    assert isinstance(found.exception, SystemExit), found.exception
    statuses = {2} if line in WRONG_USE else {1} if line in WRONG_FILES else {1, 2}
    assert found.exit_code in statuses, found.output
    errors = [text for text in found.stderr.splitlines() if text.startswith("Error: ")]
    assert len(errors) == (arguments != [])
    assert TEXTS.get(line, "") in found.stderr
    assert all(text.isprintable() for text in found.output.splitlines())
    assert PYTHON.search(found.stderr) is None, found.stderr
    assert "Traceback" not in found.output
    assert {*folder.iterdir()} | {compiled} == before
