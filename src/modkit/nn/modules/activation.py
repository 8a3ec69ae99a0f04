"""Activation functions and multi-head attention: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: A002, D101, D102, N812 - names and documentation are torch's, see `_layers.py`.

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modkit.nn._layers import composite, leaf_forward, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "SELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "LogSoftmax",
    "Mish",
    "MultiheadAttention",
    "PReLU",
    "RReLU",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
]


@rebased
class Threshold(torch.nn.Threshold, Module): ...


@rebased
class ReLU(torch.nn.ReLU, Module): ...


@rebased
class RReLU(torch.nn.RReLU, Module): ...


@rebased
class Hardtanh(torch.nn.Hardtanh, Module): ...


@rebased
class ReLU6(torch.nn.ReLU6, Hardtanh): ...


@rebased
class Sigmoid(torch.nn.Sigmoid, Module): ...


@rebased
class Hardsigmoid(torch.nn.Hardsigmoid, Module): ...


@rebased
class Tanh(torch.nn.Tanh, Module): ...


@rebased
class SiLU(torch.nn.SiLU, Module): ...


@rebased
class Mish(torch.nn.Mish, Module): ...


@rebased
class Hardswish(torch.nn.Hardswish, Module): ...


@rebased
class ELU(torch.nn.ELU, Module): ...


@rebased
class CELU(torch.nn.CELU, Module): ...


@rebased
class SELU(torch.nn.SELU, Module): ...


@rebased
class GLU(torch.nn.GLU, Module): ...


@rebased
class GELU(torch.nn.GELU, Module): ...


@rebased
class Hardshrink(torch.nn.Hardshrink, Module): ...


@rebased
class LeakyReLU(torch.nn.LeakyReLU, Module): ...


@rebased
class LogSigmoid(torch.nn.LogSigmoid, Module): ...


@rebased
class Softplus(torch.nn.Softplus, Module): ...


@rebased
class Softshrink(torch.nn.Softshrink, Module): ...


@rebased
@composite()
class MultiheadAttention(torch.nn.MultiheadAttention, Module): ...


@rebased
class PReLU(torch.nn.PReLU, Module):
    @leaf_forward(torch.nn.PReLU)
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if type(self) is PReLU and "weight" not in state and "weight" in own:
            return F.prelu(input, own["weight"])
        return F.prelu(input, self.weight)


@rebased
class Softsign(torch.nn.Softsign, Module): ...


@rebased
class Tanhshrink(torch.nn.Tanhshrink, Module): ...


@rebased
class Softmin(torch.nn.Softmin, Module): ...


@rebased
class Softmax(torch.nn.Softmax, Module): ...


@rebased
class Softmax2d(torch.nn.Softmax2d, Module): ...


@rebased
class LogSoftmax(torch.nn.LogSoftmax, Module): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
