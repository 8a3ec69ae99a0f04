"""Losses: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# pyright: reportPrivateUsage=false, reportDeprecated=false

import warnings
from typing import TYPE_CHECKING

import torch
from torch.nn.modules import loss as upstream

from modkit.nn._layers import composite, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "GaussianNLLLoss",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "MarginRankingLoss",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "NLLLoss2d",
    "PoissonNLLLoss",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
]

if hasattr(torch.nn, "LinearCrossEntropyLoss"):  # since torch 2.13
    __all__ += ["LinearCrossEntropyLoss"]


@rebased
class _Loss(upstream._Loss, Module): ...


@rebased
class _WeightedLoss(upstream._WeightedLoss, _Loss): ...


@rebased
class L1Loss(torch.nn.L1Loss, _Loss): ...


@rebased
class NLLLoss(torch.nn.NLLLoss, _WeightedLoss): ...


with warnings.catch_warnings():
    # Torch warns of each subclass of a deprecated class; `rebased` makes ours do the same.
    warnings.simplefilter("ignore", FutureWarning)

    @rebased
    class NLLLoss2d(torch.nn.NLLLoss2d, NLLLoss): ...


@rebased
class PoissonNLLLoss(torch.nn.PoissonNLLLoss, _Loss): ...


@rebased
class GaussianNLLLoss(torch.nn.GaussianNLLLoss, _Loss): ...


@rebased
class KLDivLoss(torch.nn.KLDivLoss, _Loss): ...


@rebased
class MSELoss(torch.nn.MSELoss, _Loss): ...


@rebased
class BCELoss(torch.nn.BCELoss, _WeightedLoss): ...


@rebased
class BCEWithLogitsLoss(torch.nn.BCEWithLogitsLoss, _Loss): ...


@rebased
class HingeEmbeddingLoss(torch.nn.HingeEmbeddingLoss, _Loss): ...


@rebased
class MultiLabelMarginLoss(torch.nn.MultiLabelMarginLoss, _Loss): ...


@rebased
class SmoothL1Loss(torch.nn.SmoothL1Loss, _Loss): ...


@rebased
class HuberLoss(torch.nn.HuberLoss, _Loss): ...


@rebased
class SoftMarginLoss(torch.nn.SoftMarginLoss, _Loss): ...


@rebased
class CrossEntropyLoss(torch.nn.CrossEntropyLoss, _WeightedLoss): ...


if hasattr(torch.nn, "LinearCrossEntropyLoss"):  # since torch 2.13

    @rebased
    @composite()
    class LinearCrossEntropyLoss(torch.nn.LinearCrossEntropyLoss, _WeightedLoss): ...


@rebased
class MultiLabelSoftMarginLoss(torch.nn.MultiLabelSoftMarginLoss, _WeightedLoss): ...


@rebased
class CosineEmbeddingLoss(torch.nn.CosineEmbeddingLoss, _Loss): ...


@rebased
class MarginRankingLoss(torch.nn.MarginRankingLoss, _Loss): ...


@rebased
class MultiMarginLoss(torch.nn.MultiMarginLoss, _WeightedLoss): ...


@rebased
class TripletMarginLoss(torch.nn.TripletMarginLoss, _Loss): ...


@rebased
@composite()
class TripletMarginWithDistanceLoss(torch.nn.TripletMarginWithDistanceLoss, _Loss): ...


@rebased
class CTCLoss(torch.nn.CTCLoss, _Loss): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
