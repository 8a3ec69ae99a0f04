"""How many functions of modkit a warm update and a warm swap go through: these only fall."""

import copy
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import modkit
from tests.cases import for_each


ROOT = os.fspath(Path(modkit.__file__).parent)


def route(job: Callable[[], object], between: Callable[[], object] = lambda: None) -> list[str]:
    """Return the file of each function of modkit that a job calls, in order, when it is warm.

    ``between`` is called before each repetition.
    """
    files: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            files.append(file)

    for _ in range(3):
        between()
        job()
    between()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(before)
    return files


def average() -> "modkit.EMA[nn.Module]":
    """Return two averages of a network with parameters and buffers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    ema = modkit.EMA(net, [0.9, 0.99])
    ema.update()
    return ema


def swap(ema: "modkit.EMA[nn.Module]", **options: Any) -> None:
    """Enter and leave a block."""
    with ema.applied(**options):
        pass


def in_mode(mode: Callable[[], Any], job: Callable[[], object]) -> None:
    """Call a job in a mode of torch."""
    with mode():
        job()


def test_an_update_goes_through_few_functions() -> None:
    """A section, the schedule, the cached plan, and the kernels."""
    files = route(average().update)

    # The schedule of the second average takes two of them.
    assert len(files) <= 16
    assert len(set(files)) <= 6


def test_a_swap_goes_through_few_functions() -> None:
    """The cached pairing, and a section on either side of the block."""
    ema = average()
    files = route(lambda: swap(ema))
    moves = sum(before != after for before, after in itertools.pairwise(files))

    assert len(files) <= 29
    assert len(set(files)) <= 4
    assert moves <= 12


OTHERS: dict[str, Callable[[Any, nn.Module], object]] = {
    "the other average": lambda ema, other: swap(ema, index=1),
    "a copy": lambda ema, other: ema.averaged_model(),
    "copying into another model": lambda ema, other: ema.copy_to(other),
    "an update from another model": lambda ema, other: ema.update(other),
    "autocast": lambda ema, other: in_mode(
        lambda: torch.autocast("cpu", torch.bfloat16), lambda: [ema.update(), swap(ema)]
    ),
    "inference mode": lambda ema, other: in_mode(
        torch.inference_mode, lambda: [ema.update(), swap(ema)]
    ),
}


@for_each("between", OTHERS)
def test_calls_in_turn_stay_warm(between: str) -> None:
    """Plans and pairings of a few models, averages and modes are kept."""
    ema = average()
    other = copy.deepcopy(ema.model)

    def call() -> None:
        OTHERS[between](ema, other)

    assert len(route(ema.update, call)) == len(route(ema.update))
    assert len(route(lambda: swap(ema), call)) == len(route(lambda: swap(ema)))
