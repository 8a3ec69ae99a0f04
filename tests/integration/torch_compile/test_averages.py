"""Averages that are updated in compiled code."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import modkit
from tests.cases import for_each
from tests.helpers import freeze
from tests.integration.torch_compile.dynamo import compiled_tests


pytestmark = [
    *compiled_tests,
    # Dynamo imports inductor for an optimizer.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


class Calls(torch.optim.SGD):
    """An optimizer that calls the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        """Take the step of the base class."""
        return super().step(closure)


def network() -> nn.Module:
    """Return a network with batch normalization, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batches() -> list[Tensor]:
    """Return four batches."""
    return list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1)))


def run(step: Callable[[Tensor], None]) -> tuple[int, int]:
    """Compile a step, take four, and return the numbers of frames and of graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    backend = CompileCounter()
    compiled = torch.compile(step, backend=backend)
    for batch in batches():
        compiled(batch)
    return backend.frame_count, sum(counters["graph_break"].values())


def training_step(net: nn.Module, ema: Any, optimizer: Any, how: str) -> Callable[[Tensor], None]:
    """Return a step that trains, and updates averages by itself or by its optimizer."""
    if how == "attach":
        ema.attach(optimizer)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        if how == "update":
            ema.update()

    return step


@pytest.mark.parametrize("kind", [torch.optim.SGD, pytest.param(Calls, marks=pytest.mark.slow)])
def test_updates_add_one_graph_break_and_no_frames(kind: Any) -> None:
    """Compared to the compiled training step without averages; each step counts once."""
    counts = {}
    for how in ("none", "update", "attach"):
        net = network()
        ema = modkit.EMA(net, 0.5)
        counts[how] = run(training_step(net, ema, kind(net.parameters(), lr=0.1), how))
        assert ema.n_averaged == (0 if how == "none" else 4)

    frames, breaks = counts["none"]
    assert counts["update"][0] <= frames
    assert counts["attach"][0] <= frames
    assert max(counts["update"][1], counts["attach"][1]) <= breaks + 1


@for_each(
    "how, options",
    [
        ("update", {}),
        ("update", {"update_every": 2}),
        ("attach", {"update_every": 2}),
        ("attach", {"precision": "fp64"}),
    ],
)
def test_an_update_in_a_compiled_training_step_has_the_values_of_eager_code(
    how: str, options: dict[str, Any]
) -> None:
    """It gives bitwise the averages of an eager update after a compiled step."""
    found = []
    for inside in (False, True):
        net = network()
        ema = modkit.EMA(net, schedule=lambda n: n / (n + 2), **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = training_step(net, ema, optimizer, how if inside else "none")
        torch._dynamo.reset()
        # Both, because torch 2.8 rounds a compiled step differently.
        step = torch.compile(step, backend="eager")
        for batch in batches():
            step(batch)
            if not inside:
                ema.update()
        found.append((freeze(dict(net.state_dict())), freeze(ema.state_dict()), ema.decay))

    assert found[0] == found[1]


@for_each("kind", [torch.optim.SGD, Calls])
@for_each("first", ["attach", "compile"])
def test_a_compiled_step_of_an_attached_optimizer_counts_once(kind: Any, first: str) -> None:
    """`optimizer.step = torch.compile(optimizer.step)`, before or after `attach`."""
    net = network()
    optimizer = kind(net.parameters(), lr=0.1)
    ema = modkit.EMA(net, 0.5)
    if first == "attach":
        ema.attach(optimizer)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    if first == "compile":
        ema.attach(optimizer)
    for batch in batches():
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()

    assert ema.n_averaged == 4


def test_updates_do_not_import_dynamo() -> None:
    """Neither `import modkit` nor an update in eager code takes that time."""
    # The processes of the tests have imported dynamo before they start.
    code = """
import sys, torch, modkit
model = torch.nn.Linear(2, 2)
ema = modkit.EMA(model)
ema.update()
ema.update()
assert "torch._dynamo" not in sys.modules
print(ema.n_averaged)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert (result.stdout.strip(), result.stderr) == ("2", "")
