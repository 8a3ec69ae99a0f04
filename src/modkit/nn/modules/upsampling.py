"""Upsampling: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.

from typing import TYPE_CHECKING

import torch

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d"]


@rebased
class Upsample(torch.nn.Upsample, Module): ...


@rebased
class UpsamplingNearest2d(torch.nn.UpsamplingNearest2d, Upsample): ...


@rebased
class UpsamplingBilinear2d(torch.nn.UpsamplingBilinear2d, Upsample): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
