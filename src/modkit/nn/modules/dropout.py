"""Dropout: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# pyright: reportPrivateUsage=false

from typing import TYPE_CHECKING

import torch
from torch.nn.modules import dropout as upstream

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["AlphaDropout", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout"]


@rebased
class _DropoutNd(upstream._DropoutNd, Module): ...


@rebased
class Dropout(torch.nn.Dropout, _DropoutNd): ...


@rebased
class Dropout1d(torch.nn.Dropout1d, _DropoutNd): ...


@rebased
class Dropout2d(torch.nn.Dropout2d, _DropoutNd): ...


@rebased
class Dropout3d(torch.nn.Dropout3d, _DropoutNd): ...


@rebased
class AlphaDropout(torch.nn.AlphaDropout, _DropoutNd): ...


@rebased
class FeatureAlphaDropout(torch.nn.FeatureAlphaDropout, _DropoutNd): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
