"""Batch normalization: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: A002, D101, N812 - names and documentation are torch's, see `_layers.py`.
# pyright: reportPrivateUsage=false

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import batchnorm as upstream

from modkit.nn._layers import leaf_forward, rebase, rebased
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
class _BatchNorm(upstream._BatchNorm, _NormBase):
    @leaf_forward(upstream._BatchNorm)
    def forward(self, input: Tensor) -> Tensor:
        # Torch's own code does the rest, among it cumulative averages and batches not tracked.
        if type(self) in _LEAVES and self.momentum is not None:
            self._check_input_dim(input)  # type: ignore[no-untyped-call]
            own: Any = self._parameters
            buffers: Any = self._buffers
            state = self.__dict__
            training = self.training
            if (
                (
                    not training
                    or (
                        self.track_running_stats
                        and "num_batches_tracked" in buffers
                        and "num_batches_tracked" not in state
                    )
                )
                and "running_mean" in buffers
                and "running_var" in buffers
                and "weight" in own
                and "bias" in own
                and "running_mean" not in state
                and "running_var" not in state
                and "weight" not in state
                and "bias" not in state
            ):
                if training and buffers["num_batches_tracked"] is not None:
                    buffers["num_batches_tracked"].add_(1)
                by_batch = buffers["running_mean"] is None and buffers["running_var"] is None
                return F.batch_norm(
                    input,
                    buffers["running_mean"],
                    buffers["running_var"],
                    own["weight"],
                    own["bias"],
                    training or by_batch,
                    self.momentum,
                    self.eps,
                )
        return upstream._BatchNorm.forward(self, input)


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


_LEAVES = frozenset((BatchNorm1d, BatchNorm2d, BatchNorm3d))


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
