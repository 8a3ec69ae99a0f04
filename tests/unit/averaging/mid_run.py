"""Averages of other libraries in a few lines, with their counters and states, and a check of each switch.

The integration tests run the same check with the libraries themselves.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import modkit
from modkit import schedules


STEPS = 64
DECAY = 0.95
# Of a run in float64.
TOLERANCE = 1e-12

# ``update_after_step`` and ``update_every``. The averages of ema-pytorch are those of modkit if the second
# divides the first.
DELAYS = [(0, 1), (20, 1), (0, 10), (20, 10)]


def network() -> nn.Module:
    """Return a model with one parameter of two elements, in float64."""
    return nn.Linear(2, 1, bias=False).double()


def move(model: nn.Module, step: int) -> None:
    """Give the model the weights of a step, 1 or more."""
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[step, 1 / step]]))


class Average:
    """An average of the model's parameter: ``update`` takes one step, ``value`` reads it."""

    # Whether modkit needs an update right after construction, because the library copies there.
    starts_at_once = False

    def __init__(self, model: nn.Module, after: int = 0, every: int = 1) -> None:
        self.model, self.after, self.every = model, after, every
        self.average = model.weight.detach().clone()
        self.calls = 0

    def lerp(self, decay: float) -> None:
        self.average.lerp_(self.model.weight.detach(), 1 - decay)

    def update(self) -> None:
        raise NotImplementedError

    def value(self) -> Tensor:
        return self.average

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def arguments(self) -> dict[str, Any]:
        """Return the keywords that ``load_state_dict`` needs beside the state."""
        return {}

    def ours(self) -> "modkit.EMA[Any]":
        """Return the same average of modkit."""
        raise NotImplementedError


class EmaPytorch(Average):
    """``EMA(model, beta, update_after_step, update_every)``; ``step`` counts calls of ``update``."""

    def update(self) -> None:
        skipped = self.calls % self.every != 0
        self.calls += 1
        since = self.calls - self.after - 1
        if self.calls == 1 or (since <= 0 and not skipped):
            self.lerp(0.0)
        elif not skipped:
            self.lerp(min(DECAY, 1 - (1 + since) ** (-2 / 3)))

    def state_dict(self) -> dict[str, Any]:
        counters = {"initted": torch.tensor(self.calls > 0), "step": torch.tensor(self.calls)}
        online = {"online_model.weight": self.model.weight.detach()}
        return {**counters, **online, "ema_model.weight": self.average}

    def ours(self) -> "modkit.EMA[Any]":
        schedule = schedules.PerUpdate(schedules.InverseGamma(power=2 / 3, decay=DECAY))
        delays = {"update_after_step": self.after, "update_every": self.every}
        return modkit.EMA(self.model, schedule=schedule, **delays, buffers="average")


class Diffusers(Average):
    """``EMAModel(parameters, decay, update_after_step)``, with its warm-up by default."""

    def update(self) -> None:
        self.calls += 1
        since = self.calls - self.after - 1
        self.lerp(0.0 if since <= 0 else min(DECAY, (1 + since) / (10 + since)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "decay": DECAY,
            "min_decay": 0.0,
            "optimization_step": self.calls,
            "update_after_step": self.after,
            "use_ema_warmup": False,
            "inv_gamma": 1.0,
            "power": 2 / 3,
            "shadow_params": [self.average],
        }

    def ours(self) -> "modkit.EMA[Any]":
        schedule = schedules.CountWarmup(DECAY)
        return modkit.EMA(self.model, schedule=schedule, update_after_step=self.after)


class TorchEma(Average):
    """``ExponentialMovingAverage(parameters, decay)``, which copies when it is created."""

    starts_at_once = True

    def update(self) -> None:
        self.calls += 1
        self.lerp(min(DECAY, (1 + self.calls) / (10 + self.calls)))

    def state_dict(self) -> dict[str, Any]:
        counters = {"decay": DECAY, "num_updates": self.calls}
        return {**counters, "shadow_params": [self.average], "collected_params": None}

    def ours(self) -> "modkit.EMA[Any]":
        return modkit.EMA(self.model, schedule=schedules.CountWarmup(DECAY))


class Timm(Average):
    """``ModelEmaV3(model, decay, update_after_step, use_warmup=True)``; it saves no counter."""

    def update(self) -> None:
        self.calls += 1
        since = self.calls - self.after - 1
        self.lerp(0.0 if since <= 0 else min(DECAY, 1 - (1 + since) ** (-2 / 3)))

    def state_dict(self) -> dict[str, Any]:
        return {"module.weight": self.average}

    def arguments(self) -> dict[str, Any]:
        return {"step": self.calls}

    def ours(self) -> "modkit.EMA[Any]":
        schedule = schedules.InverseGamma(power=2 / 3, decay=DECAY)
        delay = {"update_after_step": self.after, "buffers": "average"}
        return modkit.EMA(self.model, schedule=schedule, **delay)


class Lightning(Average):
    """The checkpoint of ``EMAWeightAveraging``, which counts models, and steps from zero."""

    averaged = 0

    def update(self) -> None:
        if self.calls >= self.after and self.calls % self.every == 0:
            self.lerp(DECAY if self.averaged else 0.0)
            self.averaged += 1
        self.calls += 1

    def state_dict(self) -> dict[str, Any]:
        counters = {"epoch": 0, "global_step": self.calls}
        current = {"current_model_state": {"weight": self.model.weight.detach()}}
        averaging = {"averaging_state": {"n_averaged": torch.tensor(self.averaged)}}
        return {**counters, **current, **averaging, "state_dict": {"weight": self.average}}

    def ours(self) -> "modkit.EMA[Any]":
        schedule = schedules.PerUpdate(schedules.Constant(DECAY))
        delays = {"update_after_step": self.after, "update_every": self.every}
        return modkit.EMA(self.model, schedule=schedule, **delays, buffers="average")


def check_each_switch(make: Callable[[nn.Module], Average]) -> None:
    """Test that an average goes on in modkit after any step as if it had always been there."""
    model = network()
    move(model, 1)
    theirs = make(model)
    never_switched = theirs.ours()
    if theirs.starts_at_once:
        never_switched.update()
    saved = []
    for step in range(1, STEPS + 1):
        move(model, step)
        theirs.update()
        never_switched.update()
        counters = never_switched.step, never_switched.n_averaged
        saved.append((copy.deepcopy(theirs.state_dict()), theirs.arguments(), counters))

    for switch, (state, arguments, counters) in enumerate(saved[:-1], 1):
        move(model, switch)
        ours = theirs.ours()
        ours.load_state_dict(state, **arguments)
        assert (ours.step, ours.n_averaged) == counters, f"switched after step {switch}"
        for step in range(switch + 1, STEPS + 1):
            move(model, step)
            ours.update()

        found = dict(ours.named_averages())["weight"]
        for reference in (theirs.value(), dict(never_switched.named_averages())["weight"]):
            error = (found - reference).abs().max().item() / STEPS
            assert error <= TOLERANCE, f"switched after step {switch}"
