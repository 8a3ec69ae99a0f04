"""Training scripts of the public, on torch and with the imports changed to modkit.

Each file in scripts/ is a short rendition of one public script, which its docstring names. The scripts
themselves run in `python -m tests.suites.training_scripts`.
"""

import re
import types
from pathlib import Path

import pytest
import torch

from modkit.compat.swap import swap_source
from tests.processes import python
from tests.suites import training_scripts


SCRIPTS = sorted(Path(__file__).with_name("scripts").glob("*.py"))
# The count of batches is copied instead of averaged and truncated: a listed difference.
LISTED = {"swa": ["2.module.1.num_batches_tracked"]}


def trained(source: str) -> tuple[list[float], list[torch.nn.Module], types.ModuleType]:
    """Run a script from a fixed seed, and return its losses, its models and its names."""
    script = types.ModuleType("script")
    exec(compile(source, "script", "exec"), script.__dict__)
    torch.manual_seed(0)
    losses, models = script.train()
    return losses, models, script


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_losses_and_weights_are_bitwise_equal(path: Path) -> None:
    """A script logs the same losses and ends with the same weights and buffers, bitwise."""
    source = path.read_text(encoding="utf-8")
    losses, models, _ = trained(source)
    modkit_losses, modkit_models, script = trained(swap_source(source))

    assert script.nn.__name__ == "modkit.nn"
    assert modkit_losses == losses
    assert len(set(losses)) > len(losses) // 2
    states = [model.state_dict() for model in models]
    modkit_states = [model.state_dict() for model in modkit_models]
    assert [list(state) for state in modkit_states] == [list(state) for state in states]
    differing = [
        f"{index}.{name}"
        for index, state in enumerate(states)
        for name, value in state.items()
        if not torch.equal(modkit_states[index][name], value)
    ]
    assert differing == LISTED.get(path.stem, [])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_only_imports_change(path: Path) -> None:
    """The changed lines are imports, and lines that spell out torch.nn."""
    source = path.read_text(encoding="utf-8")
    # The first line, the docstring, is followed by the import for names that are spelled out.
    before, after = source.splitlines()[1:], swap_source(source).splitlines()[1:]
    changed = [old for old, new in zip(before, after, strict=True) if old != new]

    assert changed
    assert [
        line for line in changed if not re.match(r"from torch|import torch| +torch\.nn\.", line)
    ] == []


SCRIPT = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    loss = model(torch.rand(8, 2)).square().mean() * (1 if SAME else len(nn.__name__))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss:", loss.item())
"""


@pytest.mark.parametrize("same", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_comparison_of_public_scripts_finds_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """A script that computes something else on modkit differs in losses and weights."""

    def forked(command: list[str], *, cwd: Path, env: dict[str, str], **_: object) -> object:
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            return python(Path(command[1]), *command[2:], env=env)

    if not same:
        # The slow one starts interpreters.
        monkeypatch.setattr(training_scripts.subprocess, "run", forked)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "script.py").write_text(SCRIPT.replace("SAME", str(same)), encoding="utf-8")
    (checkout / ".commit").write_text("abc", encoding="utf-8")
    script = training_scripts.Script("name", "kind", "owner/name", "script.py", steps=3)
    row = training_scripts.compare(script, checkout, tmp_path / "copies")

    assert row["lines"] == ["from torch import nn"]
    assert (row["commit"], row["modules of modkit"], row["steps"]) == ("abc", 1, 3)
    assert row["losses"] == 3 + 2
    assert row["differing"] == ([] if same else ["losses", "printed losses", "modules"])
