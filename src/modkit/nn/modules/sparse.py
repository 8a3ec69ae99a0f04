"""Embeddings: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: A002, D101, D102, N812 - names and documentation are torch's, see `_layers.py`.

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modkit.nn._layers import leaf_forward, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["Embedding", "EmbeddingBag"]


@rebased
class Embedding(torch.nn.Embedding, Module):
    @leaf_forward(torch.nn.Embedding)
    def forward(self, input: Tensor) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if type(self) is Embedding and "weight" not in state and "weight" in own:
            return F.embedding(
                input,
                own["weight"],
                self.padding_idx,
                self.max_norm,
                self.norm_type,
                self.scale_grad_by_freq,
                self.sparse,
            )
        return torch.nn.Embedding.forward(self, input)


@rebased
class EmbeddingBag(torch.nn.EmbeddingBag, Module):
    @leaf_forward(torch.nn.EmbeddingBag)
    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        own: Any = self._parameters
        state = self.__dict__
        if type(self) is EmbeddingBag and "weight" not in state and "weight" in own:
            return F.embedding_bag(
                input,
                own["weight"],
                offsets,
                self.max_norm,
                self.norm_type,
                self.scale_grad_by_freq,
                self.mode,
                self.sparse,
                per_sample_weights,
                self.include_last_offset,
                self.padding_idx,
            )
        return torch.nn.EmbeddingBag.forward(self, input, offsets, per_sample_weights)


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
