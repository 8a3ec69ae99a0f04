"""Layer, group and local response normalization: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: A002, D101, D102, N812 - names and documentation are torch's, see `_layers.py`.

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modkit.nn._layers import leaf_forward, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["CrossMapLRN2d", "GroupNorm", "LayerNorm", "LocalResponseNorm", "RMSNorm"]


@rebased
class LocalResponseNorm(torch.nn.LocalResponseNorm, Module): ...


@rebased
class CrossMapLRN2d(torch.nn.CrossMapLRN2d, Module): ...


@rebased
class LayerNorm(torch.nn.LayerNorm, Module):
    @leaf_forward(torch.nn.LayerNorm)
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is LayerNorm
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
        ):
            return F.layer_norm(input, self.normalized_shape, own["weight"], own["bias"], self.eps)
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


@rebased
class GroupNorm(torch.nn.GroupNorm, Module):
    @leaf_forward(torch.nn.GroupNorm)
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is GroupNorm
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
        ):
            return F.group_norm(input, self.num_groups, own["weight"], own["bias"], self.eps)
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


@rebased
class RMSNorm(torch.nn.RMSNorm, Module):
    @leaf_forward(torch.nn.RMSNorm)
    def forward(self, x: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if type(self) is RMSNorm and "weight" not in state and "weight" in own:
            return F.rms_norm(x, self.normalized_shape, own["weight"], self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
