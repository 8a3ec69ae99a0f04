"""A model in training, what the same training gives without modkit, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import modkit.nn


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.pairs.features import Feature
    from tests.pairs.situations import Situation

Values = dict[str, Tensor]
STEPS, MIDDLE, DECAY = 6, 3, 0.5
# How far a value may be from that of the oracle, relative to values of 1 and more.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-6, torch.bfloat16: 2**-7}


# `modkit compat` builds the models on torch too.
ON_TORCH = "PAIRS_ON_TORCH"
Module = torch.nn.Module if ON_TORCH in os.environ else modkit.nn.Module


class Net(Module):
    """Two layers and batch normalization: parameters, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).relu())


def values_of(model: torch.nn.Module) -> Values:
    """Return copies of all parameters and buffers, under each of their names."""
    members = dict(model.named_parameters(remove_duplicate=False))
    members.update(model.named_buffers(remove_duplicate=False))
    return {name: plain(tensor) for name, tensor in members.items()}


def write(tensor: Tensor, value: Tensor) -> None:
    """Write a full value into a tensor, which may be sharded."""
    if hasattr(tensor, "device_mesh"):
        mesh, placements = tensor.device_mesh, tensor.placements
        value = torch.distributed.tensor.distribute_tensor(value.to(tensor.dtype), mesh, placements)
    tensor.copy_(value)


def plain(tensor: Tensor) -> Tensor:
    """Return a copy as an ordinary tensor, all of it if it is sharded."""
    with torch.inference_mode(mode=False):
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        return tensor.as_subclass(Tensor).clone()


class World:
    """A model in a situation, and its training; a feature works here."""

    def __init__(self, situation: Situation, folder: Path) -> None:
        self.situation, self.folder = situation, folder
        # The place of a file that all ranks write together; each has a folder of its own.
        self.shared = folder.parent if situation.ranks > 1 else folder
        torch.default_generator.manual_seed(0)
        self.model = situation.build()
        self.optimizer = situation.optimize(self.model)
        # A trainer calls the function that takes a step.
        self.drive: Callable[[Callable[[], None]], None] = lambda step: step()
        self.step = 0
        self.values: list[Values] = []
        # Tensors that must not change any more, with copies of them.
        self.kept: list[tuple[str, Tensor, Tensor]] = []

    @property
    def net(self) -> torch.nn.Module:
        """The model without its wrapper."""
        return self.situation.unwrapped(self.model)

    def train(self) -> None:
        """Take one step, and keep its values."""
        self.drive(lambda: self.situation.train(self, self.situation.batch(self.step)))
        self.step += 1
        self.values.append(values_of(self.net))

    def keep(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Check at the end that these tensors still have their values."""
        self.kept += [(f"{what}: {name}", each, plain(each)) for name, each in tensors.items()]

    def fresh(self, *, saved: bool = False) -> torch.nn.Module:
        """Return a second model with other values in what is averaged, or in all that is saved."""
        model = self.situation.unwrapped(self.situation.build_as_trained(self))
        names = self.situation.saved(self)
        if not saved:
            names = names - dict(model.named_parameters()).keys() | self.situation.parameters()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name not in names:
                    write(tensor, values_of(self.net)[name])
                elif tensor.is_floating_point():
                    tensor.fill_(0.25)
        return model


@functools.cache
def reference(situation: Situation) -> list[Values]:
    """Return the values after each step of the training alone: modkit averages and loads nothing."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(situation, Path(folder))
        for _ in range(STEPS + 1):
            world.train()
            if world.step == MIDDLE:
                situation.middle(world, None, None)
                world.values[-1] = values_of(world.net)
        return world.values


def averaged(situation: Situation, *, equal: bool = False, gamma: float | None = None) -> Values:
    """Return the average of the reference by plain loops in float64, and buffers of the last step."""
    history = [situation.renamed(values) for values in reference(situation)[:STEPS]]
    chosen, result = situation.parameters(), {}
    for name, last in history[-1].items():
        first = max(
            (step for part, step in situation.late.items() if name.startswith(part)), default=0
        )
        steps = [values[name].double() for values in history[first:] if name in values]
        if name not in chosen or not last.is_floating_point():
            result[name] = last
            continue
        late = len(history) - len(steps)
        value = steps[0].clone()
        for n, each in enumerate(steps[1:], 1 + late):
            decay = n / (n + 1) if equal else DECAY
            if gamma is not None:
                decay = (1 - 1 / (n + 1)) ** (gamma + 1)
            value = decay * value + (1 - decay) * each
        result[name] = value
    return result


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    """Check names, shapes and values; expected values of float64 are rounded, others are bitwise."""
    assert set(found) == set(expected), f"{what}: names {set(found) ^ set(expected)}"
    for name, value in expected.items():
        other = found[name].detach()
        assert other.shape == value.shape, f"{what}: {name} has shape {other.shape}"
        if other.is_meta:
            continue
        other = plain(other)
        if value.dtype == torch.float64 != other.dtype or value.dtype != other.dtype:
            assert other.is_floating_point(), f"{what}: {name} is {other.dtype}"
            error = (
                (other.double() - value.double()).abs() / value.double().abs().clamp(min=1)
            ).max()
            assert error <= TOLERANCES[other.dtype], f"{what}: {name} is wrong by {error:.1e}"
        elif value.dtype == torch.float64:
            torch.testing.assert_close(other, value, rtol=1e-9, atol=1e-9)
        else:
            assert torch.equal(other, value), f"{what}: {name} is not bitwise what it was"


def marks(world: World) -> dict[str, Any]:
    """Describe all that must be as before besides the values: hooks, members, modes, dtypes."""
    modules = {
        name: (type(each), each.training, sorted(vars(each)), _tables(vars(each)))
        for name, each in world.net.named_modules()
    }
    members = {
        name: (
            0 if world.situation.replaces else id(each),
            type(each),
            each.dtype,
            each.device,
            each.requires_grad,
            each.is_leaf,
        )
        for name, each in [*world.net.named_parameters(), *world.net.named_buffers()]
    }
    return {
        "modules": modules,
        "members": members,
        "optimizer": _tables(vars(world.optimizer)),
        "handlers": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
        "threads": threading.active_count(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def _different(before: Any, after: Any) -> str:
    """Return what differs between two descriptions, at the lowest level."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = {*before, *after}
        return "; ".join(
            f"{n}: {_different(before.get(n), after.get(n))}"
            for n in names
            if before.get(n) != after.get(n)
        )
    return f"{before} before, {after} after"


def _tables(attributes: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: len(each)
        for name, each in attributes.items()
        if "hook" in name and each and hasattr(each, "__len__")
    }


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files that are left in a folder."""
    return [each.name for each in folder.rglob("*") if "tmp" in each.name or ".modkit" in each.name]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Turn warnings into errors, except those that short runs give."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in (
            ".*of this average is the model of the first",
            ".*[Tt]orch[Ss]cript",
            ".*jit",
            "TypedStorage is deprecated",
        ):
            warnings.filterwarnings("ignore", text)
        yield


def meet(feature: Feature, situation: Situation, folder: Path) -> None:
    """Let a feature do its job in a situation, and check everything that is to hold.

    Raises:
        AssertionError: Something is wrong.
        Exception: The pair is refused, and the training is as it was.
    """
    history = reference(situation)
    world = World(situation, folder)
    try:
        _job(feature, world)
    except (AssertionError, torch._dynamo.exc.TorchDynamoException):
        raise
    except Exception:
        if world.step:
            _same_training(world, history, "after the refusal")
        raise


def _job(feature: Feature, world: World) -> None:
    situation = world.situation
    history = reference(situation)
    before = marks(world)
    subject = situation.act(world, lambda: feature.begin(world))

    for _ in range(STEPS):
        world.train()
        situation.act(world, lambda: feature.after(world, subject))
        if world.step == MIDDLE:
            subject = situation.middle(world, feature, subject)
        _same_training(world, history, f"after step {world.step}")
        if situation.settles == world.step:
            before["modules"], before["members"] = marks(world)["modules"], marks(world)["members"]

    situation.act(world, lambda: feature.before(world, subject))
    situation.look(world, feature, subject)
    _same_training(world, history, "after looking")
    world.train()
    situation.act(world, lambda: feature.after(world, subject))
    _same_training(world, history, "in a step after looking")
    feature.end(world, subject)
    after = marks(world)
    assert after == before, _different(before, after)
    assert not leftovers(world.folder), leftovers(world.folder)
    for what, tensor, value in world.kept:
        assert torch.equal(plain(tensor), value), f"{what} has changed"


def _same_training(world: World, history: list[Values], when: str) -> None:
    """Check that model and training are bitwise those of a training without the feature."""
    compare(values_of(world.net), history[world.step - 1], f"training weights {when}")
