"""Layer, group and local response normalization: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.

from typing import TYPE_CHECKING

import torch

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["CrossMapLRN2d", "GroupNorm", "LayerNorm", "LocalResponseNorm", "RMSNorm"]


@rebased
class LocalResponseNorm(torch.nn.LocalResponseNorm, Module): ...


@rebased
class CrossMapLRN2d(torch.nn.CrossMapLRN2d, Module): ...


@rebased
class LayerNorm(torch.nn.LayerNorm, Module): ...


@rebased
class GroupNorm(torch.nn.GroupNorm, Module): ...


@rebased
class RMSNorm(torch.nn.RMSNorm, Module): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
