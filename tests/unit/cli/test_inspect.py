"""The command ``inspect``: what is in a file, as tables and as JSON."""

import argparse
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit.errors import FileError
from modkit.files import inspect
from modkit.files.tensor_files import Checkpoint
from tests.unit.cli.command_line import invoke


run = functools.partial(invoke, "inspect")


def cells(output: str) -> dict[str, list[str]]:
    """Return the rows of the tables, by their first cells."""
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a state dict."""
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "net.pt")
    return tmp_path / "net.pt"


def test_a_state_dict(path: Path) -> None:
    """The facts and tensors of a checkpoint are shown."""
    found = run(path)

    rows = cells(found.output)
    assert (found.exit_code, found.stderr) == (0, "")
    assert rows["weight"] == ["(3, 2)", "float32", "24 bytes"]
    assert rows["-"] == ["2, 36 bytes"]
    assert "torch.save file" in found.output
    # A long path takes several lines.
    assert str(path) in "".join(found.output.split())


def test_keys_of_averages(tmp_path: Path) -> None:
    """The keys that ``average --key`` accepts are shown."""
    net = nn.Linear(2, 2)
    ema = modkit.EMA(net)
    ema.update()
    content = {
        "swa": torch.optim.swa_utils.AveragedModel(net).state_dict(),
        "ema": ema.state_dict(),
        "net": net.state_dict(),
        "mixed": {"weight": torch.ones(1), "epoch": 3},
        "lrs": [0.1, 0.2],
    }
    torch.save(content, tmp_path / "all.pt")
    rows = cells(run(tmp_path / "all.pt").output)

    assert rows["swa"] == ["3, 32 bytes"]
    assert rows["ema.averages.0.tensors"] == rows["net"] == ["2, 24 bytes"]
    assert rows["(mixed)"][0] == "1, 4 bytes"
    assert rows["lrs"] == ["[0.1, 0.2]"]


def test_each_key_is_one_that_commands_take(tmp_path: Path) -> None:
    """Names that are not strings or have dots, and namespaces, are found by the key that is shown."""
    path = tmp_path / "all.pt"
    state = {"w": torch.ones(1)}
    names: list[Any] = [0, None, True, (1, 2), 0.5, b"x", "net.g", "net"]
    inner = {"net": {"h": state, "g.h": state}}
    torch.save({"a": argparse.Namespace(b={**dict.fromkeys(names, state), **inner})}, path)
    keys = [key for key, names in inspect(path).groups.items() if names == ("w",)]
    expected = ["a.b.0", "a.b.None", "a.b.True", "a.b.(1, 2)", "a.b.0.5", "a.b.b'x'", "a.b.net.g"]

    assert keys == [*expected, "a.b.net.h", "a.b.net.g.h"]
    for key in keys:
        found = invoke("diff", path, path, "--key", key)
        assert (found.exit_code, found.stderr) == (0, ""), key
    refused = invoke("diff", path, path, "--key", "a.b")
    assert "choose a key: a.b.0, a.b.None," in refused.stderr
    refused = invoke("diff", path, path, "--key", "a.b.net.x.y")
    assert "has no state dict at the key 'a.b.net.x.y'; choose a key: a.b.net" in refused.stderr


def test_keys_of_a_file_that_contains_itself(tmp_path: Path) -> None:
    """A key with many ways through a file takes no exponential time."""
    content: dict[str, Any] = {}
    content |= {"a": content, "a.a": content}
    torch.save(content, tmp_path / "loop.pt")
    key = "a." * 100 + "b"

    with pytest.raises(FileError, match="has no state dict at the key"):
        Checkpoint(tmp_path / "loop.pt", key=key)


def test_json(tmp_path: Path) -> None:
    """Everything is printed as JSON, for programs; control characters are escaped."""
    path = tmp_path / "x.pt"
    torch.save({"a\x1b[31mb": torch.ones(1), "epoch": 3}, path)
    found = run("--json", path)
    data = json.loads(found.output)

    assert "\x1b" not in found.output
    assert "sha256" not in data
    assert data["kind"] == "torch.save file"
    assert data["tensors"] == [
        {"name": "a\x1b[31mb", "shape": [1], "dtype": "float32", "nbytes": 4}
    ]
    assert data["entries"] == {"epoch": "3"}


def test_long_lists_are_cut(tmp_path: Path) -> None:
    """With a limit, the first rows of each table are shown, and how to see all."""
    path = tmp_path / "x.pt"
    torch.save({**{f"t{n}": torch.ones(1) for n in range(5)}, "epoch": 3, "lr": 0.1}, path)
    found = run("--limit", 1, path).output

    assert {"t0", "epoch"} <= cells(found).keys()
    assert not {"t1", "lr"} & cells(found).keys()
    assert "--limit 5 shows all rows" in found


def test_names_cannot_forge_output(tmp_path: Path) -> None:
    """Control characters and line breaks in names are escaped; brackets are not markup."""
    path = tmp_path / "m\x1b[31m.pt"
    names = ["a\x1b[31mb", "line\nbreak", "[red]c[/red]", "rtl\u202eabc"]
    content = {
        **{name: torch.ones(1) for name in names},
        "dict\n": {"x\n": torch.ones(1), "v\r": "\x07"},
    }
    torch.save(content, path)
    output = run(path).output

    assert all(c.isprintable() or c == "\n" for c in output)
    assert {r"a\x1b[31mb", r"line\nbreak", "[red]c[/red]", r"rtl\u202eabc"} <= cells(output).keys()
    assert r"m\x1b[31m.pt" in output


def test_nothing_is_hashed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command reads names, shapes and the pickle, and not the whole file."""
    assert inspect(path, hashed=False).sha256 == ""
    monkeypatch.setattr("hashlib.sha256", None)
    found = run(path)

    assert (found.exit_code, "SHA-256" in found.output) == (0, False)


def test_several_files(tmp_path: Path, path: Path) -> None:
    """Each file has its tables; one bad file is one line of error, and the status."""
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"")
    page = tmp_path / "page.pt"
    page.write_text("<!DOCTYPE html>")
    found = run(bad, path, page, path)
    data = json.loads(run("--json", bad, path, page).stdout)

    assert found.exit_code == 1
    assert [line.split(": ")[0] for line in found.stderr.splitlines()] == ["Error", "Error"]
    assert found.stdout.count("weight") == 2
    assert "bad.pt is an empty file" in data[0]["error"]
    assert [each["name"] for each in data[1]["tensors"]] == ["weight", "bias"]
    assert (data[2]["kind"], data[2]["error"]) == ("text file", f"{page}: text file, not a model")
    assert run(path, path).exit_code == 0


def test_the_size_of_a_small_file(tmp_path: Path) -> None:
    """The bytes of a small file are named once."""
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(1))
    output = run(path).output

    assert output.count("bytes") == 1
    assert f" {path.stat().st_size} bytes" in output
