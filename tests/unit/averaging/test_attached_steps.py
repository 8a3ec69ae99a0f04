"""The calls of `step()` that an attached optimizer reports as training steps."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

import modkit
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import gradients, network, sgd


# torch runs the hooks of a class from the first instance on, and a subclass may call such a ``step``.
_ = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]), torch.optim.LBFGS([torch.zeros(1)])


class Calls(torch.optim.AdamW):
    """An optimizer that calls the step of its base class, and raises if told so."""

    raises: str | None = None

    def step(self, closure: Any = None) -> Any:
        """Take the step of the base class."""
        if self.raises == "before":
            raise RuntimeError("no step")
        loss = super().step(closure)
        if self.raises == "after":
            raise RuntimeError("half a step")
        return loss


class CallsTwice(Calls):
    """A subclass of the subclass."""

    def step(self, closure: Any = None) -> Any:
        """Take the step of the base class."""
        return super().step(closure)


class Retries(torch.optim.AdamW):
    """An optimizer that goes on after a step of its base class that raised."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """Take the step of the base class, at the second attempt."""
        if self.fails:
            with contextlib.suppress(ArithmeticError):
                super().step(self._fail)
        return super().step(closure)

    def _fail(self) -> Any:
        raise ArithmeticError


class Lookahead(torch.optim.Optimizer):
    """An optimizer that steps another one, several times."""

    def __init__(self, inner: torch.optim.Optimizer, times: int = 1) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.times = times

    def step(self, closure: Any = None) -> None:
        """Take the steps of the inner optimizer."""
        for _ in range(self.times):
            self.inner.step()


# --- steps inside steps ----------------------------------------------------------------------------


@for_each("kind", [torch.optim.AdamW, Calls, CallsTwice, Retries])
def test_a_step_that_calls_the_step_of_its_base_class_is_one(kind: Any) -> None:
    """Each call of `step()` by the loop is one update, with the weights after it."""
    net = network()
    optimizer = kind(net.parameters())
    ema = modkit.EMA(net, 0.5).attach(optimizer)
    by_hand = modkit.EMA(net, 0.5)
    for number in range(3):
        gradients(net, number)
        optimizer.step()
        by_hand.update()

    assert (ema.step, ema.n_averaged) == (3, 3)
    assert freeze(dict(ema.named_averages())) == freeze(dict(by_hand.named_averages()))


def test_the_update_sees_the_whole_step() -> None:
    """Weights that a subclass changes after the step of its base class are averaged."""

    class Clamps(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.fill_(3.0)

    net = network()
    optimizer = Clamps(net.parameters())
    ema = modkit.EMA(net).attach(optimizer)
    gradients(net)
    optimizer.step()

    assert all(value.eq(3.0).all() for _, value in ema.named_averages() if value.numel() > 12)


@for_each("kind", [Calls, CallsTwice])
@for_each("moment", ["before", "after"])
def test_a_step_that_raises_does_not_count(kind: Any, moment: str) -> None:
    """The steps after it count as before, also while its traceback is kept."""
    net = network()
    optimizer = kind(net.parameters())
    ema = modkit.EMA(net).attach(optimizer)
    errors = []
    for number in range(6):
        gradients(net, number)
        optimizer.raises = moment if number % 2 else None
        try:
            optimizer.step()
        except RuntimeError as error:
            errors.append(error)

    assert len(errors) == 3
    assert (ema.step, ema.n_averaged) == (3, 3)


@for_each("times", [1, 2, 3])
@for_each("attached", ["inner", "outer"])
def test_an_optimizer_that_steps_another(times: int, attached: str) -> None:
    """The steps of the attached one count."""
    net = network()
    inner = torch.optim.AdamW(net.parameters())
    outer = Lookahead(inner, times)
    ema = modkit.EMA(net).attach({"inner": inner, "outer": outer}[attached])
    for number in range(3):
        gradients(net, number)
        outer.step()

    assert ema.step == (3 * times if attached == "inner" else 3)


# Torch before 2.9 reads the loss of LBFGS in a way that it warns about itself.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@for_each("kind", ["LBFGS", "AdamW", "Calls"])
def test_a_step_with_a_closure_is_one(kind: str) -> None:
    """The closure may be called many times."""
    net = network()
    make: Any = Calls if kind == "Calls" else getattr(torch.optim, kind)
    optimizer = make(net.parameters(), lr=0.01)
    ema = modkit.EMA(net).attach(optimizer)
    batch = torch.randn(8, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)

    assert ema.step == 3


def test_optimizers_in_backward() -> None:
    """One optimizer for each parameter, stepped by its gradient hook, is one update per backward."""
    net = network()
    optimizers = {}
    for parameter in net.parameters():
        optimizers[parameter] = Calls([parameter])
        parameter.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    ema = modkit.EMA(net).attach(*optimizers.values())
    for number in range(4):
        gradients(net, number)

    assert ema.step == 4


# --- steps that allocate the state of an optimizer -------------------------------------------------

MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-3)),
    "subclass": Calls,
}


@for_each("kind", MAKES)
@for_each("read", ["both", "optimizer", "written"])
def test_reading_the_state_for_a_distributed_checkpoint(kind: str, read: str) -> None:
    """`torch.distributed.checkpoint` steps an optimizer without state; that is not an update."""
    net = network()
    optimizer = MAKES[kind](net.parameters())
    ema = modkit.EMA(net, 0.9).attach(optimizer)
    by_hand = modkit.EMA(net, 0.9)
    for number in range(6):
        if number % 2 == 0:
            net.zero_grad()
            if read == "both":
                get_state_dict(net, optimizer)
            elif read == "optimizer":
                get_optimizer_state_dict(net, optimizer)
            else:
                state = get_optimizer_state_dict(net, optimizer)
                set_optimizer_state_dict(net, optimizer, optim_state_dict=state)
        gradients(net, number)
        optimizer.step()
        by_hand.update()

    assert (ema.step, ema.n_averaged) == (6, 6)
    assert freeze(dict(ema.named_averages())) == freeze(dict(by_hand.named_averages()))


def test_a_checkpoint_between_the_steps_of_two_optimizers() -> None:
    """Reading their states neither ends the training step nor begins one."""
    net = network()
    first, second = sgd(net[0]), sgd(net[1], net[3])
    ema = modkit.EMA(net).attach(first, second)
    gradients(net)
    first.step()
    net.zero_grad()
    get_state_dict(net, [first, second])
    between = ema.step
    second.step()

    assert (between, ema.step) == (0, 1)
