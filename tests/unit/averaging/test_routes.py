"""How many functions of modkit a warm update and a warm swap go through: these only fall."""

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


ROOT = os.fspath(Path(modkit.__file__).parent)


def route(job: Callable[[], object]) -> list[str]:
    """Return the file of each function of modkit that a job calls, in order, when it is warm."""
    files: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            files.append(file)

    for _ in range(3):
        job()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(before)
    return files


def average() -> "modkit.EMA[nn.Module]":
    """Return averages of a network with parameters and buffers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    ema = modkit.EMA(net, 0.9)
    ema.update()
    return ema


def test_an_update_goes_through_few_functions() -> None:
    """A section, the schedule, the cached plan, and the kernels."""
    files = route(average().update)

    assert len(files) <= 14
    assert len(set(files)) <= 6


def test_a_swap_goes_through_few_functions() -> None:
    """The cached pairing, and a section on either side of the block."""
    ema = average()

    def swap() -> None:
        with ema.applied():
            pass

    files = route(swap)
    moves = sum(before != after for before, after in itertools.pairwise(files))

    assert len(files) <= 29
    assert len(set(files)) <= 4
    assert moves <= 12
