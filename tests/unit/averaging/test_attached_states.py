"""States of averages that are saved between the steps of attached optimizers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import modkit
from modkit.distributed import load_averages
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import COPIES, network


class Run:
    """A network that two optimizers train, with an average, and its steps one by one."""

    def __init__(self, face: str = "EMA") -> None:
        self.net: Any = network()
        self.optimizers = [
            torch.optim.SGD(self.net[0].parameters(), lr=0.1),
            torch.optim.AdamW([*self.net[1].parameters(), *self.net[3].parameters()], lr=0.01),
        ]
        if face == "EMA":
            self.face: Any = modkit.EMA(self.net, 0.9).attach(*self.optimizers)
            self.ema = self.face
        else:
            self.face = modkit.EMACallback(self.net, self.optimizers, decay=0.9)
            self.ema = self.face.ema
        self.done = 0

    def go_on(self, until: int) -> None:
        """Let the optimizers step alternately."""
        for number in range(self.done, until):
            if number % 2 == 0:
                self.net.zero_grad()
                batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
                self.net(batch).square().mean().backward()
            self.optimizers[number % 2].step()
        self.done = until

    def parts(self) -> list[Any]:
        """Return what has a state, the averages last."""
        return [self.net, *self.optimizers, self.face]

    def state(self) -> list[Any]:
        """Return a copy of all states and gradients."""
        gradients = [one.grad for one in self.net.parameters()]
        return copy.deepcopy([[one.state_dict() for one in self.parts()], gradients, self.done])

    def load(self, state: list[Any]) -> None:
        """Load all states and gradients."""
        states, gradients, self.done = state
        for part, one in zip(self.parts(), states, strict=True):
            part.load_state_dict(one)
        for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
            parameter.grad = gradient

    def end(self) -> Any:
        """Return what the run ends with."""
        return freeze([dict(self.net.state_dict()), self.ema.state_dict()])


@for_each("face", ["EMA", "EMACallback"])
@for_each("saved", (1, 2, 3, 4))
def test_a_run_resumes_between_the_steps_of_two_optimizers(face: str, saved: int) -> None:
    """It updates after the same steps as the uninterrupted run, and is bitwise identical to it."""
    whole = Run(face)
    whole.go_on(saved)
    state = whole.state()
    whole.go_on(10)
    resumed = Run(face)
    resumed.load(state)
    resumed.go_on(10)

    assert resumed.ema.n_averaged == 5
    assert resumed.end() == whole.end()


@for_each("attach_first", [True, False])
def test_the_optimizers_may_be_attached_after_loading(attach_first: bool) -> None:
    """The state holds indices, so it is enough that the order is the same."""
    whole = Run()
    whole.go_on(3)
    state = copy.deepcopy(whole.ema.state_dict())
    resumed = modkit.EMA(whole.net, 0.9)
    if attach_first:
        resumed.attach(*whole.optimizers)
    resumed.load_state_dict(state)
    if not attach_first:
        resumed.attach(*whole.optimizers)
    steps = []
    for number in (1, 0, 1):
        whole.optimizers[number].step()
        steps.append((whole.ema.step, resumed.step))

    assert state["stepped"] == [0]
    assert steps == [(2, 2), (2, 2), (3, 3)]


@for_each("copied", COPIES)
def test_copies_know_the_steps(copied: Callable[[Any], Any]) -> None:
    """Optimizers attached to a copy go on where those of the original were."""
    run = Run()
    run.go_on(3)
    other = copied(run.ema)
    parts = other.model[0], nn.Sequential(other.model[1], other.model[3])
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in parts)
    other.attach(first, second)
    steps = []
    for optimizer in (second, first, second):
        optimizer.step()
        steps.append(other.step)

    assert steps == [2, 2, 3]


@for_each("stepped", [[0], [0, 1], [0, 1, 2], [2, 7]])
def test_a_state_of_a_run_with_other_optimizers(stepped: list[int]) -> None:
    """One optimizer instead of several updates in each step, and only then."""
    run = Run()
    run.go_on(4)
    state = {**copy.deepcopy(run.ema.state_dict()), "stepped": stepped}
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = modkit.EMA(net, 0.9).attach(optimizer)
    ema.load_state_dict(state)
    net(torch.ones(2, 4)).sum().backward()
    steps = []
    for _ in range(3):
        optimizer.step()
        steps.append(ema.step)

    assert steps == [3, 4, 5]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_keeps_the_steps(tmp_path: Path) -> None:
    """`dcp.save` and `load_averages` carry the entry, and its absence."""
    for steps in (3, 4):
        run = Run()
        run.go_on(steps)
        dcp.save({"ema": run.ema}, checkpoint_id=tmp_path / str(steps))
        other = Run()
        load_averages(other.ema, tmp_path / str(steps))

        assert freeze(other.ema.state_dict()) == freeze(run.ema.state_dict())
