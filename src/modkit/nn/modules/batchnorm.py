"""Batch normalization: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# pyright: reportPrivateUsage=false

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import batchnorm as upstream

from modkit.nn._layers import rebase, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names
from modkit.nn.modules.lazy import LazyModuleMixin


__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "SyncBatchNorm",
]


@rebased
class _NormBase(upstream._NormBase, Module): ...


@rebased
class _BatchNorm(upstream._BatchNorm, _NormBase): ...


@rebased
class _LazyNormBase(upstream._LazyNormBase, LazyModuleMixin, _NormBase): ...


@rebased
class BatchNorm1d(torch.nn.BatchNorm1d, _BatchNorm): ...


@rebased
class LazyBatchNorm1d(torch.nn.LazyBatchNorm1d, _LazyNormBase, _BatchNorm):
    cls_to_become = BatchNorm1d


@rebased
class BatchNorm2d(torch.nn.BatchNorm2d, _BatchNorm): ...


@rebased
class LazyBatchNorm2d(torch.nn.LazyBatchNorm2d, _LazyNormBase, _BatchNorm):
    cls_to_become = BatchNorm2d


@rebased
class BatchNorm3d(torch.nn.BatchNorm3d, _BatchNorm): ...


@rebased
class LazyBatchNorm3d(torch.nn.LazyBatchNorm3d, _LazyNormBase, _BatchNorm):
    cls_to_become = BatchNorm3d


@rebased
class SyncBatchNorm(torch.nn.SyncBatchNorm, _BatchNorm):
    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> Any:
        """Convert all batch normalization in ``module``; the new layers are modkit's."""
        # Torch's method calls itself through ``cls`` for each child, so every level passes here.
        converted = super().convert_sync_batchnorm(module, process_group)  # type: ignore[no-untyped-call]
        return converted if converted is module else rebase(converted)


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
