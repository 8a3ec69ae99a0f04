"""The models and the weight averages that `benchmarks.averaging_peers` times.

A contestant takes a model and the dtype of the averages, and returns the function to time. It raises
NotImplementedError where a library has no averages of that dtype.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import modkit
from modkit.optim import swa_utils


Action = Callable[[], object]
Contestant = Callable[[nn.Module, torch.dtype], Action]
DECAY = 0.999
THEIRS = torch.optim.swa_utils


# The models.


def small_layers(divide: int) -> nn.Module:
    """Make 512 small Linears, each with a BatchNorm."""
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(512 // divide))
    return nn.Sequential(*blocks)


def resnet50(divide: int) -> nn.Module:
    """Make the convolutions, BatchNorms and classifier of a ResNet-50, without its forward."""
    layers: list[nn.Module] = []

    def conv(inputs: int, outputs: int, size: int) -> None:
        layers.append(nn.Conv2d(inputs, outputs, size, bias=False))
        layers.append(nn.BatchNorm2d(outputs))

    stem = width = 64 // divide
    conv(3, stem, 7)
    for blocks, inner in zip((3, 4, 6, 3), (stem, 2 * stem, 4 * stem, 8 * stem), strict=True):
        conv(width, 4 * inner, 1)  # the shortcut of the first block
        for _ in range(blocks):
            conv(width, inner, 1)
            conv(inner, inner, 3)
            conv(inner, 4 * inner, 1)
            width = 4 * inner
    return nn.ModuleList([*layers, nn.Linear(width, 1000)])


def gpt2(divide: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make the parameters of GPT-2 small: 124M elements in 148 tensors."""
    width = 768 // divide
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes += [(width,)] * 4
        for inputs, outputs in ((1, 3), (1, 1), (1, 4), (4, 1)):
            shapes += [(inputs * width, outputs * width), (outputs * width,)]
    shapes += [(width,)] * 2
    return nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)


def gpt2_bf16(divide: int) -> nn.Module:
    """Make the parameters of GPT-2 small in bfloat16."""
    return gpt2(divide, torch.bfloat16)


CASES = {
    "512 Linear + BatchNorm": small_layers,
    "ResNet-50": resnet50,
    "GPT-2 small, fp32": gpt2,
    "GPT-2 small, bf16": gpt2_bf16,
}

# The contestants.


def averaged_model(library: Any, **options: Any) -> Contestant:
    """Return a maker of updates by ``AveragedModel``, of torch or of modkit."""

    def make(model: nn.Module, dtype: torch.dtype) -> Action:
        wider = is_wider(model, dtype)
        if wider and library is not swa_utils:
            raise NotImplementedError
        precise = {"precision": "fp32"} if wider else {}
        average = library.AveragedModel(model, **options, **precise)
        return lambda: average.update_parameters(model)

    return make


def is_wider(model: nn.Module, dtype: torch.dtype) -> bool:
    """Return True if the averages are kept in another dtype than the model's parameters."""
    return next(model.parameters()).dtype != dtype


def modkit_ema(model: nn.Module, dtype: torch.dtype, **options: Any) -> modkit.EMA:
    """Make an average by modkit."""
    precision: Any = "fp32" if dtype == torch.float32 else "same"
    return modkit.EMA(model, DECAY, precision=precision, **options)


def parameters_alone(model: nn.Module, dtype: torch.dtype) -> modkit.EMA:
    """Make an average by modkit that leaves buffers out, as those of diffusers and torch_ema do."""
    return modkit_ema(model, dtype, buffers="ignore")


def timm_update(model: nn.Module, dtype: torch.dtype) -> Action:
    """Make updates by timm."""
    average = importlib.import_module("timm.utils").ModelEmaV3(model, decay=DECAY, dtype=dtype)
    return lambda: average.update(model)


def ema_pytorch_update(model: nn.Module, dtype: torch.dtype) -> Action:
    """Make updates by ema-pytorch, at every step."""
    if is_wider(model, dtype):
        raise NotImplementedError
    options = {"update_every": 1, "update_after_step": 0, "use_foreach": True}
    update: Action = importlib.import_module("ema_pytorch").EMA(model, beta=DECAY, **options).update
    return update


def diffusers_ema(model: nn.Module, dtype: torch.dtype) -> Any:
    """Make an average by diffusers."""
    library = importlib.import_module("diffusers.training_utils")
    average = library.EMAModel(model.parameters(), decay=DECAY, foreach=True)
    average.to(dtype=dtype)
    return average


def torch_ema(model: nn.Module, dtype: torch.dtype) -> Any:
    """Make an average by torch_ema."""
    library = importlib.import_module("torch_ema")
    average = library.ExponentialMovingAverage(model.parameters(), decay=DECAY)
    average.to(dtype=dtype)
    return average


def diffusers_update(model: nn.Module, dtype: torch.dtype) -> Action:
    """Make updates by diffusers."""
    average = diffusers_ema(model, dtype)
    return lambda: average.step(model.parameters())


def diffusers_swap(model: nn.Module, dtype: torch.dtype) -> Action:
    """Make swaps by diffusers, in the three calls of its training scripts."""
    average = diffusers_ema(model, dtype)

    def swap() -> None:
        average.store(model.parameters())
        average.copy_to(model.parameters())
        average.restore(model.parameters())

    return swap


def block_of(enter: Callable[[], contextlib.AbstractContextManager[object]]) -> Action:
    """Return a function that enters and leaves a block."""

    def swap() -> None:
        with enter():
            pass

    return swap


def modkit_swap(make: Callable[[nn.Module, torch.dtype], modkit.EMA]) -> Contestant:
    """Return a maker of swaps by ``modkit.EMA``."""

    def swaps(model: nn.Module, dtype: torch.dtype) -> Action:
        average = make(model, dtype)
        average.update()
        return block_of(average.applied)

    return swaps


def lightning_swap(model: nn.Module, dtype: torch.dtype) -> Action:
    """Make swaps by Lightning, in the two calls around its validation."""
    if is_wider(model, dtype):
        raise NotImplementedError
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    average = callbacks.EMAWeightAveraging(decay=DECAY)
    average._average_model = THEIRS.AveragedModel(model)

    def swap() -> None:
        average.on_validation_epoch_start(None, model)
        average.on_validation_epoch_end(None, model)

    return swap


ALONE = "modkit.EMA(buffers='ignore')"
PARAMETERS_ALONE = {ALONE, "diffusers EMAModel", "torch_ema"}
OPERATIONS: dict[str, dict[str, Contestant]] = {
    "update": {
        "modkit.EMA": lambda model, dtype: modkit_ema(model, dtype).update,
        ALONE: lambda model, dtype: parameters_alone(model, dtype).update,
        "modkit AveragedModel": averaged_model(
            swa_utils, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY)
        ),
        "torch AveragedModel": averaged_model(
            THEIRS, multi_avg_fn=THEIRS.get_ema_multi_avg_fn(DECAY)
        ),
        "Lightning EMAWeightAveraging": averaged_model(
            THEIRS, avg_fn=THEIRS.get_ema_avg_fn(DECAY), use_buffers=True
        ),
        "timm ModelEmaV3": timm_update,
        "diffusers EMAModel": diffusers_update,
        "ema-pytorch EMA": ema_pytorch_update,
        "torch_ema": lambda model, dtype: torch_ema(model, dtype).update,
    },
    "swap in and out": {
        "modkit.EMA": modkit_swap(modkit_ema),
        ALONE: modkit_swap(parameters_alone),
        "Lightning EMAWeightAveraging": lightning_swap,
        "torch_ema": lambda model, dtype: block_of(torch_ema(model, dtype).average_parameters),
        "diffusers EMAModel": diffusers_swap,
    },
}
