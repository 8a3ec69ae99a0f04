"""Padding: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# Torch declares some members otherwise than the bases of the class do; that stays as it is.
# pyright: reportPrivateUsage=false, reportIncompatibleVariableOverride=false

from typing import TYPE_CHECKING

import torch
from torch.nn.modules import padding as upstream

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = [
    "CircularPad1d",
    "CircularPad2d",
    "CircularPad3d",
    "ConstantPad1d",
    "ConstantPad2d",
    "ConstantPad3d",
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "ZeroPad1d",
    "ZeroPad2d",
    "ZeroPad3d",
]


@rebased
class _CircularPadNd(upstream._CircularPadNd, Module): ...


@rebased
class CircularPad1d(torch.nn.CircularPad1d, _CircularPadNd): ...


@rebased
class CircularPad2d(torch.nn.CircularPad2d, _CircularPadNd): ...


@rebased
class CircularPad3d(torch.nn.CircularPad3d, _CircularPadNd): ...


@rebased
class _ConstantPadNd(upstream._ConstantPadNd, Module): ...


@rebased
class ConstantPad1d(torch.nn.ConstantPad1d, _ConstantPadNd): ...


@rebased
class ConstantPad2d(torch.nn.ConstantPad2d, _ConstantPadNd): ...


@rebased
class ConstantPad3d(torch.nn.ConstantPad3d, _ConstantPadNd): ...


@rebased
class _ReflectionPadNd(upstream._ReflectionPadNd, Module): ...


@rebased
class ReflectionPad1d(torch.nn.ReflectionPad1d, _ReflectionPadNd): ...


@rebased
class ReflectionPad2d(torch.nn.ReflectionPad2d, _ReflectionPadNd): ...


@rebased
class ReflectionPad3d(torch.nn.ReflectionPad3d, _ReflectionPadNd): ...


@rebased
class _ReplicationPadNd(upstream._ReplicationPadNd, Module): ...


@rebased
class ReplicationPad1d(torch.nn.ReplicationPad1d, _ReplicationPadNd): ...


@rebased
class ReplicationPad2d(torch.nn.ReplicationPad2d, _ReplicationPadNd): ...


@rebased
class ReplicationPad3d(torch.nn.ReplicationPad3d, _ReplicationPadNd): ...


@rebased
class ZeroPad1d(torch.nn.ZeroPad1d, ConstantPad1d): ...


@rebased
class ZeroPad2d(torch.nn.ZeroPad2d, ConstantPad2d): ...


@rebased
class ZeroPad3d(torch.nn.ZeroPad3d, ConstantPad3d): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
