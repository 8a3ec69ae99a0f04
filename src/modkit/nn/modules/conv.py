"""Convolutions: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: A002, D101, D102, N812 - names and documentation are torch's, see `_layers.py`.
# Torch declares some members otherwise than the bases of the class do; that stays as it is.
# mypy: disable-error-code="misc"
# pyright: reportPrivateUsage=false, reportIncompatibleVariableOverride=false

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import conv as upstream

from modkit.nn._layers import leaf_forward, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names
from modkit.nn.modules.lazy import LazyModuleMixin


__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "LazyConv1d",
    "LazyConv2d",
    "LazyConv3d",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
]


@rebased
class _ConvNd(upstream._ConvNd, Module): ...


@rebased
class Conv1d(torch.nn.Conv1d, _ConvNd):
    @leaf_forward(torch.nn.Conv1d)
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is Conv1d
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
            and self.padding_mode == "zeros"
        ):
            return self._conv_forward(input, own["weight"], own["bias"])  # type: ignore[no-any-return]
        return torch.nn.Conv1d.forward(self, input)


@rebased
class Conv2d(torch.nn.Conv2d, _ConvNd):
    @leaf_forward(torch.nn.Conv2d)
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is Conv2d
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
            and self.padding_mode == "zeros"
        ):
            return self._conv_forward(input, own["weight"], own["bias"])  # type: ignore[no-any-return]
        return torch.nn.Conv2d.forward(self, input)


@rebased
class Conv3d(torch.nn.Conv3d, _ConvNd):
    @leaf_forward(torch.nn.Conv3d)
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is Conv3d
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
            and self.padding_mode == "zeros"
        ):
            return self._conv_forward(input, own["weight"], own["bias"])  # type: ignore[no-any-return]
        return torch.nn.Conv3d.forward(self, input)


@rebased
class _ConvTransposeNd(upstream._ConvTransposeNd, _ConvNd): ...


@rebased
class ConvTranspose1d(torch.nn.ConvTranspose1d, _ConvTransposeNd):
    @leaf_forward(torch.nn.ConvTranspose1d)
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is ConvTranspose1d
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
            and output_size is None
            and self.padding_mode == "zeros"
            and isinstance(self.padding, tuple)
        ):
            return F.conv_transpose1d(
                input,
                own["weight"],
                own["bias"],
                self.stride,
                self.padding,
                self.output_padding,
                self.groups,
                self.dilation,
            )
        return torch.nn.ConvTranspose1d.forward(self, input, output_size)


@rebased
class ConvTranspose2d(torch.nn.ConvTranspose2d, _ConvTransposeNd):
    @leaf_forward(torch.nn.ConvTranspose2d)
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is ConvTranspose2d
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
            and output_size is None
            and self.padding_mode == "zeros"
            and isinstance(self.padding, tuple)
        ):
            return F.conv_transpose2d(
                input,
                own["weight"],
                own["bias"],
                self.stride,
                self.padding,
                self.output_padding,
                self.groups,
                self.dilation,
            )
        return torch.nn.ConvTranspose2d.forward(self, input, output_size)


@rebased
class ConvTranspose3d(torch.nn.ConvTranspose3d, _ConvTransposeNd):
    @leaf_forward(torch.nn.ConvTranspose3d)
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if (
            type(self) is ConvTranspose3d
            and "weight" not in state
            and "bias" not in state
            and "weight" in own
            and "bias" in own
            and output_size is None
            and self.padding_mode == "zeros"
            and isinstance(self.padding, tuple)
        ):
            return F.conv_transpose3d(
                input,
                own["weight"],
                own["bias"],
                self.stride,
                self.padding,
                self.output_padding,
                self.groups,
                self.dilation,
            )
        return torch.nn.ConvTranspose3d.forward(self, input, output_size)


@rebased
class _ConvTransposeMixin(upstream._ConvTransposeMixin, _ConvTransposeNd): ...


@rebased
class LazyConv1d(torch.nn.LazyConv1d, LazyModuleMixin, Conv1d):
    cls_to_become = Conv1d


@rebased
class LazyConv2d(torch.nn.LazyConv2d, LazyModuleMixin, Conv2d):
    cls_to_become = Conv2d


@rebased
class LazyConv3d(torch.nn.LazyConv3d, LazyModuleMixin, Conv3d):
    cls_to_become = Conv3d


@rebased
class LazyConvTranspose1d(torch.nn.LazyConvTranspose1d, LazyModuleMixin, ConvTranspose1d):
    cls_to_become = ConvTranspose1d


@rebased
class LazyConvTranspose2d(torch.nn.LazyConvTranspose2d, LazyModuleMixin, ConvTranspose2d):
    cls_to_become = ConvTranspose2d


@rebased
class LazyConvTranspose3d(torch.nn.LazyConvTranspose3d, LazyModuleMixin, ConvTranspose3d):
    cls_to_become = ConvTranspose3d


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
