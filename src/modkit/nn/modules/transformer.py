"""Transformers: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.

from typing import TYPE_CHECKING

import torch

from modkit.nn._layers import composite, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = [
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]


def _activations(transformer: torch.nn.Transformer) -> list[torch.nn.Module]:
    """Return the copies of an activation module, one in each layer; of a function there are none."""
    return [m for name, m in transformer.named_modules() if name.endswith(".activation")]


@rebased
@composite(copies=_activations)
class Transformer(torch.nn.Transformer, Module): ...


@rebased
@composite(copies=lambda stack: stack.layers)
class TransformerEncoder(torch.nn.TransformerEncoder, Module): ...


@rebased
@composite(copies=lambda stack: stack.layers)
class TransformerDecoder(torch.nn.TransformerDecoder, Module): ...


@rebased
@composite()
class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer, Module): ...


@rebased
@composite()
class TransformerDecoderLayer(torch.nn.TransformerDecoderLayer, Module): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
