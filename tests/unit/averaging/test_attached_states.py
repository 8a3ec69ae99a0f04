"""States of averages that are saved between the steps of attached optimizers."""

import copy
import pickle
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
from tests.unit.averaging.recipes import network


State = dict[str, Any]
Names = tuple[str, ...]


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
@for_each("saved", range(1, 8))
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


@for_each("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
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


def test_optimizers_in_backward() -> None:
    """A branch without gradients does not step; a state saved then resumes bitwise identically."""

    def started() -> Any:
        net = network()
        optimizers = {}
        for parameter in net.parameters():
            optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
        return net, modkit.EMA(net, 0.9).attach(*optimizers.values())

    def backward(net: Any, number: int) -> None:
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        # The last layer has no gradient in every second step.
        result = net if number % 2 else net[:2]
        result(batch).square().mean().backward()
        net.zero_grad()

    net, ema = started()
    for number in range(3):
        backward(net, number)
    states = copy.deepcopy([net.state_dict(), ema.state_dict()])
    other, resumed = started()
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    for number in range(3, 9):
        backward(net, number)
        backward(other, number)

    assert states[1]["stepped"] == [0, 1, 2, 3]
    assert freeze(resumed.state_dict()) == freeze(ema.state_dict())


def test_states_of_whole_training_steps_are_as_before() -> None:
    """Between training steps a state has no such entry, and without one no optimizer has stepped."""
    run = Run()
    run.go_on(4)
    state = copy.deepcopy(run.ema.state_dict())
    run.go_on(5)
    run.ema.load_state_dict(state)
    run.optimizers[1].step()
    between = run.ema.step
    run.optimizers[0].step()

    assert "stepped" not in state
    assert (between, run.ema.step) == (2, 3)


def test_an_empty_state_forgets_the_steps() -> None:
    """Averaging starts anew with a whole training step."""
    run = Run()
    run.go_on(3)
    with pytest.warns(UserWarning, match="starts anew"):
        run.ema.load_state_dict({})
    run.optimizers[1].step()
    between = run.ema.step
    run.optimizers[0].step()

    assert (between, run.ema.step) == (0, 1)


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


BROKEN = [1, "0", None, {0: 1}, [-1], [True], [0.0], [None], ["0"], [0, 0], [[0]], torch.ones(1)]


@for_each("value", BROKEN, ids=str)
def test_a_broken_entry_is_refused(value: Any) -> None:
    """It is a ValueError that names the entry, and nothing changes."""
    run = Run()
    run.go_on(3)
    before = freeze(run.ema.state_dict())
    with pytest.raises(ValueError, match=r"EMA: .*stepped must be .*Nothing has been changed"):
        run.ema.load_state_dict({**run.ema.state_dict(), "stepped": value})

    assert freeze(run.ema.state_dict()) == before


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
