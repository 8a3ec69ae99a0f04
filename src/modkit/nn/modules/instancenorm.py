"""Instance normalization: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# pyright: reportPrivateUsage=false

from typing import TYPE_CHECKING

import torch
from torch.nn.modules import instancenorm as upstream

from modkit.nn._layers import rebased
from modkit.nn.modules._newer import upstream_names
from modkit.nn.modules.batchnorm import _LazyNormBase, _NormBase


__all__ = [
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
]


@rebased
class _InstanceNorm(upstream._InstanceNorm, _NormBase): ...


@rebased
class InstanceNorm1d(torch.nn.InstanceNorm1d, _InstanceNorm): ...


@rebased
class LazyInstanceNorm1d(torch.nn.LazyInstanceNorm1d, _LazyNormBase, _InstanceNorm):
    cls_to_become = InstanceNorm1d


@rebased
class InstanceNorm2d(torch.nn.InstanceNorm2d, _InstanceNorm): ...


@rebased
class LazyInstanceNorm2d(torch.nn.LazyInstanceNorm2d, _LazyNormBase, _InstanceNorm):
    cls_to_become = InstanceNorm2d


@rebased
class InstanceNorm3d(torch.nn.InstanceNorm3d, _InstanceNorm): ...


@rebased
class LazyInstanceNorm3d(torch.nn.LazyInstanceNorm3d, _LazyNormBase, _InstanceNorm):
    cls_to_become = InstanceNorm3d


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
