import hashlib
import io
import json
import subprocess
import sys

import click.testing
import pytest
import safetensors.torch
import torch

from modkit.cli._commands import NAMES, commands
from modkit.jit._archive import inspect
from tests.integration.torchscript import scripted_tests
from tests.unit.jit.archives import Restored, archive, compiled


pytestmark = scripted_tests


@pytest.fixture
def path(tmp_path):
    """Write an archive to a file."""
    path = tmp_path / "net.pt"
    path.write_bytes(archive())
    return path


def run(*arguments):
    """Run the command, and return what it printed and with which status it ended."""
    return click.testing.CliRunner().invoke(commands, ["inspect", *map(str, arguments)])


def cells(output):
    """Return the rows of the tables, by their first cells."""
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_an_archive(path):
    """The facts, classes and tensors of an archive are shown."""
    found = run(path)

    rows = cells(found.output)
    info = inspect(path)
    assert found.exit_code == 0
    assert all(each.name in rows for each in info.classes)
    assert rows["body.0.weight"] == ["parameter", "(4, 3)", "float32", "48 B"]
    for text in (info.sha256, info.content_sha256, "labels.txt (7 B)", "TorchScript archive"):
        assert text in found.output
    assert "runs at load" not in found.output


def test_code_that_runs_at_load(tmp_path):
    """What runs while the file is loaded is said."""
    path = tmp_path / "net.pt"
    path.write_bytes(compiled(Restored()).save_to_buffer())

    line = next(line for line in run(path).output.splitlines() if "runs at load" in line)
    assert "Restored.__setstate__" in line


@pytest.mark.parametrize("kind", ["state_dict", "safetensors", "export"])
def test_files_of_other_kinds(tmp_path, kind):
    """The tensors of files that are no archives are shown too."""
    module, path = torch.nn.Linear(2, 3), tmp_path / "file"
    if kind == "state_dict":
        torch.save(module.state_dict(), path)
    elif kind == "safetensors":
        safetensors.torch.save_file(module.state_dict(), path)
    else:
        buffer = io.BytesIO()
        torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), buffer)
        path.write_bytes(buffer.getvalue())

    rows = cells(run(path).output)
    assert {name: row[1:] for name, row in rows.items()} == {
        "weight": ["(3, 2)", "float32", "24 B"],
        "bias": ["(3,)", "float32", "12 B"],
    }


def test_json(path):
    """All that is known is printed as JSON, for programs."""
    data = json.loads(run("--json", path).output)

    info = inspect(path)
    assert data["sha256"] == info.sha256
    assert data["extra_files"] == {"labels.txt": 7}
    assert [each["name"] for each in data["tensors"]] == [each.name for each in info.tensors]
    assert [tuple(each["shape"]) for each in data["tensors"]] == [
        each.shape for each in info.tensors
    ]
    assert [each["name"] for each in data["classes"]] == [each.name for each in info.classes]


def test_long_lists_are_cut(path):
    """With a limit, the first tensors are shown, and how many are left out."""
    found = run("--limit", 2, path).output

    names = [each.name for each in inspect(path).tensors]
    assert [name for name in names if name in cells(found)] == names[:2]
    assert f"and {len(names) - 2} more tensors" in found


def test_a_name_with_brackets(tmp_path):
    """Names are printed as they are, also where they look like markup."""
    path = tmp_path / "state.pt"
    torch.save({"[red]a[/red]": torch.ones(1)}, path)

    assert "[red]a[/red]" in cells(run(path).output)


def test_check(tmp_path, path):
    """``--check`` ends with 1 for a damaged archive and for a file of another kind."""
    damaged, other = tmp_path / "damaged.pt", tmp_path / "state.pt"
    weights = compiled_weights()
    data = archive()
    damaged.write_bytes(data.replace(weights, bytes(len(weights))))
    torch.save({"weight": torch.ones(1)}, other)

    assert run("--check", path).exit_code == 0
    assert run(damaged).exit_code == 0
    for file, text in ((damaged, "does not match its checksum"), (other, "torch.save file")):
        found = run("--check", file)
        assert found.exit_code == 1
        assert text in found.output


def compiled_weights():
    """Return the bytes of the weights in the archive."""
    module = torch.jit.load(io.BytesIO(archive()))
    return module.state_dict()["body.0.weight"].numpy().tobytes()


def test_the_digest(path):
    """``--sha256`` ends with 1 unless the file has that digest."""
    right = hashlib.sha256(archive()).hexdigest()

    assert run("--sha256", right.upper(), path).exit_code == 0
    found = run("--sha256", "0" * 64, path)
    assert found.exit_code == 1
    assert right in found.output


def test_files_that_cannot_be_read(tmp_path):
    """A missing file is a usage error, a damaged one an error in a sentence."""
    damaged = tmp_path / "bad.pkl"
    damaged.write_bytes(b"\x80\x02" + b"]" * 20)

    assert run(tmp_path / "missing").exit_code == 2
    found = run(damaged)
    assert found.exit_code == 1
    assert found.output.startswith("Error: ")
    assert "is damaged" in found.output


def test_the_command_line(path):
    """The command is one of those of ``python -m modkit``."""
    done = subprocess.run(
        [sys.executable, "-m", "modkit", "inspect", "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "inspect" in NAMES
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kind"] == "TorchScript archive"
