"""Linear layers: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: A002, D101, D102, N812 - names and documentation are torch's, see `_layers.py`.
# Torch declares some members otherwise than the bases of the class do; that stays as it is.
# pyright: reportPrivateUsage=false, reportIncompatibleVariableOverride=false

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import linear as upstream

from modkit.nn._layers import leaf_forward, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names
from modkit.nn.modules.lazy import LazyModuleMixin


__all__ = ["Bilinear", "Identity", "LazyLinear", "Linear"]


@rebased
class Identity(torch.nn.Identity, Module): ...


@rebased
class Linear(torch.nn.Linear, Module):
    @leaf_forward(torch.nn.Linear)
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is Linear
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
        ):
            return F.linear(input, own["weight"], own["bias"])
        return F.linear(input, self.weight, self.bias)


@rebased
class NonDynamicallyQuantizableLinear(upstream.NonDynamicallyQuantizableLinear, Linear): ...


@rebased
class Bilinear(torch.nn.Bilinear, Module):
    @leaf_forward(torch.nn.Bilinear)
    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is Bilinear
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
        ):
            return F.bilinear(input1, input2, own["weight"], own["bias"])
        return F.bilinear(input1, input2, self.weight, self.bias)


@rebased
class LazyLinear(torch.nn.LazyLinear, LazyModuleMixin, Linear):
    cls_to_become = Linear


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
