"""Convolutions: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# Torch declares some members otherwise than the bases of the class do; that stays as it is.
# mypy: disable-error-code="misc"
# pyright: reportPrivateUsage=false, reportIncompatibleVariableOverride=false

from typing import TYPE_CHECKING

import torch
from torch.nn.modules import conv as upstream

from modkit.nn._layers import rebased
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
class Conv1d(torch.nn.Conv1d, _ConvNd): ...


@rebased
class Conv2d(torch.nn.Conv2d, _ConvNd): ...


@rebased
class Conv3d(torch.nn.Conv3d, _ConvNd): ...


@rebased
class _ConvTransposeNd(upstream._ConvTransposeNd, _ConvNd): ...


@rebased
class ConvTranspose1d(torch.nn.ConvTranspose1d, _ConvTransposeNd): ...


@rebased
class ConvTranspose2d(torch.nn.ConvTranspose2d, _ConvTransposeNd): ...


@rebased
class ConvTranspose3d(torch.nn.ConvTranspose3d, _ConvTransposeNd): ...


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
