"""Channel shuffle: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.

from typing import TYPE_CHECKING

import torch

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["ChannelShuffle"]


@rebased
class ChannelShuffle(torch.nn.ChannelShuffle, Module): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
