"""Recurrent layers and cells: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.
# Torch declares some members otherwise than the bases of the class do; that stays as it is.
# pyright: reportIncompatibleMethodOverride=false

from typing import TYPE_CHECKING

import torch

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNBase", "RNNCell", "RNNCellBase"]


@rebased
class RNNBase(torch.nn.RNNBase, Module): ...


@rebased
class RNN(torch.nn.RNN, RNNBase): ...


@rebased
class LSTM(torch.nn.LSTM, RNNBase): ...


@rebased
class GRU(torch.nn.GRU, RNNBase): ...


@rebased
class RNNCellBase(torch.nn.RNNCellBase, Module): ...


@rebased
class RNNCell(torch.nn.RNNCell, RNNCellBase): ...


@rebased
class LSTMCell(torch.nn.LSTMCell, RNNCellBase): ...


@rebased
class GRUCell(torch.nn.GRUCell, RNNCellBase): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
