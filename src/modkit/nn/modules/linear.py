"""Linear layers: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# Torch declares some members otherwise than the bases of the class do; that stays as it is.
# pyright: reportPrivateUsage=false, reportIncompatibleVariableOverride=false

from typing import TYPE_CHECKING

import torch
from torch.nn.modules import linear as upstream

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names
from modkit.nn.modules.lazy import LazyModuleMixin


__all__ = ["Bilinear", "Identity", "LazyLinear", "Linear"]


@rebased
class Identity(torch.nn.Identity, Module): ...


@rebased
class Linear(torch.nn.Linear, Module): ...


@rebased
class NonDynamicallyQuantizableLinear(upstream.NonDynamicallyQuantizableLinear, Linear): ...


@rebased
class Bilinear(torch.nn.Bilinear, Module): ...


@rebased
class LazyLinear(torch.nn.LazyLinear, LazyModuleMixin, Linear):
    cls_to_become = Linear


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
