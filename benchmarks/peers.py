"""Measure how long the averages of modkit and of other libraries take for one update and one swap.

    python benchmarks/peers.py                  # print the tables
    python benchmarks/peers.py --seconds 10     # measure each table for longer

All run in this process, in turns: a round times each once, in an order drawn at random, and gives one
ratio to modkit for each. The table shows medians. What is counted is the time that the one
thread spends on the processor. Libraries that are not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import modkit
from modkit.optim import swa_utils


if TYPE_CHECKING:
    from collections.abc import Callable

    Action = Callable[[], object]
    Contestants = dict[str, Callable[[nn.Module], Action]]

DECAY = 0.999
UPDATES_TO_CHECK = 3


def tiny() -> nn.Module:
    """Make 1,000 parameters of one number each: all the time goes into the loop around them."""
    return nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(1000))


def large() -> nn.Module:
    """Make 16 million numbers in 64 parameters: all the time goes into reading and writing them."""
    return nn.ParameterList(nn.Parameter(torch.zeros(250_000)) for _ in range(64))


def averaged_model(library: Any, **options: Any) -> Callable[[nn.Module], Action]:
    """Return a maker of updates by ``AveragedModel``, of torch or of modkit."""

    def make(model: nn.Module) -> Action:
        average = library.AveragedModel(model, **options)
        return lambda: average.update_parameters(model)

    return make


def modkit_ema(**options: Any) -> Callable[[nn.Module], Action]:
    """Return a maker of updates by ``modkit.EMA``."""
    return lambda model: modkit.EMA(model, **options).update


def timm(model: nn.Module) -> Action:
    """Make updates by timm, from the one file, since the whole of timm needs torchvision."""
    found = importlib.util.find_spec("timm")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("timm")
    file = Path(found.origin).parent / "utils" / "model_ema.py"
    spec = importlib.util.spec_from_file_location("timm_model_ema", file)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    average = library.ModelEmaV3(model, decay=DECAY)
    return lambda: average.update(model)


def ema_pytorch(model: nn.Module, *, use_foreach: bool) -> Action:
    """Make updates by ema-pytorch, at every step."""
    library = importlib.import_module("ema_pytorch")
    options = {"update_every": 1, "update_after_step": 0, "use_foreach": use_foreach}
    update: Action = library.EMA(model, beta=DECAY, **options).update
    return update


def diffusers(model: nn.Module, *, foreach: bool) -> Action:
    """Make updates by diffusers."""
    library = importlib.import_module("diffusers.training_utils")
    average = library.EMAModel(model.parameters(), decay=DECAY, foreach=foreach)
    return lambda: average.step(model.parameters())


def torch_ema(model: nn.Module) -> Action:
    """Make updates by torch_ema."""
    library = importlib.import_module("torch_ema")
    update: Action = library.ExponentialMovingAverage(model.parameters(), decay=DECAY).update
    return update


def swap_of_modkit(model: nn.Module) -> Action:
    """Make swaps by ``modkit.EMA``."""
    average = modkit.EMA(model, DECAY)
    average.update()

    def swap() -> None:
        with average.applied():
            pass

    return swap


def swap_of_torch_ema(model: nn.Module) -> Action:
    """Make swaps by torch_ema."""
    library = importlib.import_module("torch_ema")
    average = library.ExponentialMovingAverage(model.parameters(), decay=DECAY)

    def swap() -> None:
        with average.average_parameters():
            pass

    return swap


def swap_of_diffusers(model: nn.Module) -> Action:
    """Make swaps by diffusers, in the three steps of its training scripts."""
    average = importlib.import_module("diffusers.training_utils").EMAModel(model.parameters())

    def swap() -> None:
        average.store(model.parameters())
        average.copy_to(model.parameters())
        average.restore(model.parameters())

    return swap


UPDATES: Contestants = {
    "modkit.EMA": modkit_ema(decay=DECAY),
    "modkit.EMA, CountWarmup": modkit_ema(schedule=modkit.schedules.CountWarmup(DECAY)),
    "modkit.EMA, 3 decays": modkit_ema(decay=[0.99, 0.999, 0.9999]),
    "modkit AveragedModel, EMA": averaged_model(
        swa_utils, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY)
    ),
    "modkit AveragedModel, SWA": averaged_model(swa_utils),
    "torch AveragedModel, EMA, multi_avg_fn": averaged_model(
        torch.optim.swa_utils,
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY),
    ),
    "torch AveragedModel, EMA, avg_fn (Lightning)": averaged_model(
        torch.optim.swa_utils, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(DECAY)
    ),
    "torch AveragedModel, SWA": averaged_model(torch.optim.swa_utils),
    "timm ModelEmaV3": timm,
    "ema-pytorch, use_foreach": lambda model: ema_pytorch(model, use_foreach=True),
    "ema-pytorch": lambda model: ema_pytorch(model, use_foreach=False),
    "diffusers EMAModel, foreach": lambda model: diffusers(model, foreach=True),
    "diffusers EMAModel": lambda model: diffusers(model, foreach=False),
    "torch_ema": torch_ema,
}
SWAPS: Contestants = {
    "modkit.EMA, applied()": swap_of_modkit,
    "torch_ema, average_parameters()": swap_of_torch_ema,
    "diffusers, store() copy_to() restore()": swap_of_diffusers,
}


def prepare(contestants: Contestants, models: dict[str, nn.Module]) -> dict[str, Action]:
    """Make each contestant for the model of its own; leave out those that are not installed."""
    actions = {}
    for name, make in contestants.items():
        with contextlib.suppress(ModuleNotFoundError):
            actions[name] = make(models[name])
    if missing := sorted(contestants.keys() - actions.keys()):
        print("not installed:", ", ".join(missing))
    return actions


def seconds_of(action: Action) -> float:
    """Return the time that this thread takes for one call."""
    start = time.thread_time()
    action()
    return time.thread_time() - start


def measure(actions: dict[str, Action], seconds: float) -> dict[str, list[float]]:
    """Time all in turns for about that long; the k-th times of all are from the same round."""
    names = list(actions)
    for _ in range(UPDATES_TO_CHECK):
        for action in actions.values():
            action()
    times: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.thread_time() + seconds
    # In a fixed order each would always find the caches as the same other one has left them.
    order, turns = random.Random(0), 0  # noqa: S311 - no secret
    while turns < len(names) or time.thread_time() < deadline:
        order.shuffle(names)
        for name in names:
            times[name].append(seconds_of(actions[name]))
        turns += 1
    return times


def table(title: str, times: dict[str, list[float]]) -> None:
    """Print the median time of each, and how often the time of the first one goes into it."""
    print(f"\n{title}")
    base, *_ = times.values()
    for name, measured in times.items():
        ratio = statistics.median(own / first for own, first in zip(measured, base, strict=True))
        milliseconds = statistics.median(measured) * 1e3
        print(f"  {name:<46}{milliseconds:>10.3f} ms{ratio:>9.1f} x")


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each table")
    options = parser.parse_args()

    torch.set_num_threads(1)
    for size, make in (("1,000 tiny parameters", tiny), ("16M numbers in 64 parameters", large)):
        for what, contestants in (("one update", UPDATES), ("swap in and out", SWAPS)):
            models = {name: make() for name in contestants}
            times = measure(prepare(contestants, models), options.seconds)
            table(f"{what}, {size}", times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
