"""``modkit migrate``: a checkpoint of another version of a model."""

import json
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.cli.command_line import invoke


SCRIPT = """
    import torch
    from modkit import migrations as mig

    @mig.declare({2: [mig.rename("fc.*", "head.*"), mig.convert("turn", torch.t, torch.t)]})
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(2, 1)
            self.turn = torch.nn.Parameter(torch.zeros(2, 2))
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a script that defines a model, and an old checkpoint."""
    (tmp_path / "migrated_net.py").write_text(textwrap.dedent(SCRIPT))
    old = {"fc.weight": torch.ones(1, 2), "fc.bias": torch.ones(1), "turn": torch.rand(2, 2)}
    torch.save({"model": old}, tmp_path / "old.pt")
    return tmp_path


def run(folder, *arguments):
    """Run the command line."""
    model = f"{folder / 'migrated_net.py'}:Net"
    return invoke("migrate", "--model", model, *arguments)


def test_there_and_back(folder):
    """The target is what ``migrate`` returns, and so is that of the way back."""
    old = torch.load(folder / "old.pt")["model"]
    new, back = folder / "new.safetensors", folder / "back.safetensors"

    done = run(folder, folder / "old.pt", "-o", new, "--key", "model", "--json")
    planned = run(folder, new, "--dry-run", "--to", "Net=1")
    undone = run(folder, new, "-o", back, "--to", "Net=1")

    assert done.exit_code == undone.exit_code == 0, done.output + undone.output
    assert json.loads(done.output)["changes"][0].startswith("(root): Net 1 -> 2: rename fc.weight")
    assert torch.equal(load_file(new)["turn"], old["turn"].t())
    for output in (planned.output, undone.output):
        assert "Net 2 -> 1: rename head.weight [1, 2] -> fc.weight [1, 2]" in output
    assert all(torch.equal(load_file(back)[name], value) for name, value in old.items())
    assert "nothing to migrate" in run(folder, new, "--dry-run").output


def test_dry_run(folder):
    """Nothing is written, and the saved version can be given."""
    arguments = (folder / "old.pt", "--key", "model", "--dry-run", "--version", "Net=2", "--json")
    before = sorted(folder.iterdir())

    done = run(folder, *arguments)

    assert json.loads(done.output) == {"output": None, "changes": []}
    assert sorted(path for path in folder.iterdir() if path.suffix) == before


def test_two_classes_of_one_name(folder):
    """A version of one of them would be taken for that of the other."""
    script = """
    class Pair(torch.nn.Module):
        class Net(torch.nn.Module):
            pass

        def __init__(self):
            super().__init__()
            self.a, self.b = Net(), self.Net()
    """
    (folder / "pair.py").write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(script))
    model = f"{folder / 'pair.py'}:Pair"
    for option in ("--to", "--version"):
        done = run(folder, folder / "old.pt", "--dry-run", "--model", model, option, "Net=1")

        assert done.exit_code == 1
        assert "several classes Net: " in done.output
        assert "Pair.Net; migrate_file()" in done.output


def test_errors(folder):
    """Wrong options are errors of usage; a refusal is one line."""
    (folder / "there.safetensors").write_bytes(b"")
    source = folder / "old.pt"
    for arguments, code, text in (
        ((source,), 2, "missing option '-o'"),
        ((source, "--dry-run", "--to", "Net"), 2, "is not a class and a version"),
        ((source, "--dry-run", "--to", "Other=1"), 1, "no module of a class Other"),
        ((source, "--dry-run", "--model", "nowhere:Net"), 2, "there is no module nowhere"),
        (
            (source, "--dry-run", "--model", "builtins:dict"),
            2,
            "returns a dict, which is not a module",
        ),
        ((source, "--dry-run", "--model", "torch.nn:Linear"), 1, "without arguments: TypeError: L"),
        ((source, "-o", folder / "there.safetensors"), 1, "--overwrite replaces it"),
        ((source, "-o", source, "--overwrite"), 1, "is an input"),
        ((source, "-o", folder / "no" / "new.safetensors"), 1, "there is no directory"),
        ((source, "-o", folder / "there.safetensors", "--dry-run", "--key", "model"), 0, "Net"),
        ((source, "-o", folder / "new.pt", "--key", "model"), 1, "must end in .safetensors"),
    ):
        done = run(folder, *arguments)

        assert (done.exit_code, text in done.output) == (code, True), done.output
