"""Small models, steps and counters that the tests of ``EMA`` share."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import modkit


PRECISIONS = ["same", "fp32", "fp64", "stochastic"]


def model_of(value: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model whose one parameter, ``weight``, holds the value."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.as_tensor(value).to(dtype))
    return model


def set_to(model: nn.Module, value: Any) -> None:
    """Write a value into every parameter, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.as_tensor(value).to(parameter.dtype))


def averaged(ema: "modkit.EMA[Any]", name: str = "weight", index: int = 0) -> Tensor:
    return dict(ema.named_averages(index))[name]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a network with buffers of both kinds, the same each time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    return net.to(dtype)


def layers(dtype: torch.dtype = torch.float32, count: int = 5) -> nn.Sequential:
    """Return small layers of one shape, with all elements 0."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(count))).to(dtype)
    set_to(model, 0.0)
    return model


def walk(model: nn.Module, seed: int) -> None:
    """Give each parameter random values around 3."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) + 3.0)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_state(model: nn.Module, state: dict[str, Tensor]) -> bool:
    """Return True if a model is bitwise in that state."""
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def by_pickle(one: Any) -> Any:
    """Return a copy that went through pickle."""
    return pickle.loads(pickle.dumps(one))


COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, by_pickle]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take the steps from ``first`` up to ``last``, each on a batch of its own."""
    dtype = next(net.parameters()).dtype
    for step in range(first, last):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters of all modules."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def gradients(net: nn.Module, number: int = 0) -> None:
    """Compute new gradients."""
    net.zero_grad()
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    net(batch).square().mean().backward()


def as_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let averages treat the CPU as an accelerator, where reading an element is a host sync."""
    monkeypatch.setattr("modkit.averaging.precision.foreach_devices", lambda: ["cpu"])
    for module in ("averaging.precision", "optim._averaged_model"):
        monkeypatch.setattr(f"modkit.{module}.HOST_DEVICES", frozenset())


class CountCalls(TorchDispatchMode):
    """Counts the operations whose name contains one of the words."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words = words
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation if it is one of those, and run it."""
        if any(word in str(func) for word in self.words):
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def diffusers_state(parameters: list[Tensor]) -> dict[str, Any]:
    """Return what diffusers' ``EMAModel`` saves after 120 steps."""
    return {
        "decay": 0.9999,
        "min_decay": 0.0,
        "optimization_step": 120,
        "update_after_step": 100,
        "use_ema_warmup": True,
        "inv_gamma": 1.0,
        "power": 0.75,
        "shadow_params": parameters,
    }
