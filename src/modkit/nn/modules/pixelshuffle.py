"""Pixel shuffle and its inverse: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.

from typing import TYPE_CHECKING

import torch

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["PixelShuffle", "PixelUnshuffle"]


@rebased
class PixelShuffle(torch.nn.PixelShuffle, Module): ...


@rebased
class PixelUnshuffle(torch.nn.PixelUnshuffle, Module): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
