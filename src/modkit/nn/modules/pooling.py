"""Pooling: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# pyright: reportPrivateUsage=false

from typing import TYPE_CHECKING

import torch
from torch.nn.modules import pooling as upstream

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "FractionalMaxPool2d",
    "FractionalMaxPool3d",
    "LPPool1d",
    "LPPool2d",
    "LPPool3d",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MaxUnpool1d",
    "MaxUnpool2d",
    "MaxUnpool3d",
]


@rebased
class _MaxPoolNd(upstream._MaxPoolNd, Module): ...


@rebased
class MaxPool1d(torch.nn.MaxPool1d, _MaxPoolNd): ...


@rebased
class MaxPool2d(torch.nn.MaxPool2d, _MaxPoolNd): ...


@rebased
class MaxPool3d(torch.nn.MaxPool3d, _MaxPoolNd): ...


@rebased
class _MaxUnpoolNd(upstream._MaxUnpoolNd, Module): ...


@rebased
class MaxUnpool1d(torch.nn.MaxUnpool1d, _MaxUnpoolNd): ...


@rebased
class MaxUnpool2d(torch.nn.MaxUnpool2d, _MaxUnpoolNd): ...


@rebased
class MaxUnpool3d(torch.nn.MaxUnpool3d, _MaxUnpoolNd): ...


@rebased
class _AvgPoolNd(upstream._AvgPoolNd, Module): ...


@rebased
class AvgPool1d(torch.nn.AvgPool1d, _AvgPoolNd): ...


@rebased
class AvgPool2d(torch.nn.AvgPool2d, _AvgPoolNd): ...


@rebased
class AvgPool3d(torch.nn.AvgPool3d, _AvgPoolNd): ...


@rebased
class FractionalMaxPool2d(torch.nn.FractionalMaxPool2d, Module): ...


@rebased
class FractionalMaxPool3d(torch.nn.FractionalMaxPool3d, Module): ...


@rebased
class _LPPoolNd(upstream._LPPoolNd, Module): ...


@rebased
class LPPool1d(torch.nn.LPPool1d, _LPPoolNd): ...


@rebased
class LPPool2d(torch.nn.LPPool2d, _LPPoolNd): ...


@rebased
class LPPool3d(torch.nn.LPPool3d, _LPPoolNd): ...


@rebased
class _AdaptiveMaxPoolNd(upstream._AdaptiveMaxPoolNd, Module): ...


@rebased
class AdaptiveMaxPool1d(torch.nn.AdaptiveMaxPool1d, _AdaptiveMaxPoolNd): ...


@rebased
class AdaptiveMaxPool2d(torch.nn.AdaptiveMaxPool2d, _AdaptiveMaxPoolNd): ...


@rebased
class AdaptiveMaxPool3d(torch.nn.AdaptiveMaxPool3d, _AdaptiveMaxPoolNd): ...


@rebased
class _AdaptiveAvgPoolNd(upstream._AdaptiveAvgPoolNd, Module): ...


@rebased
class AdaptiveAvgPool1d(torch.nn.AdaptiveAvgPool1d, _AdaptiveAvgPoolNd): ...


@rebased
class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d, _AdaptiveAvgPoolNd): ...


@rebased
class AdaptiveAvgPool3d(torch.nn.AdaptiveAvgPool3d, _AdaptiveAvgPoolNd): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
