"""A recipe: average a model of FullyShardedDataParallel (FSDP1), which modkit.EMA refuses.

It averages the flat shards of each rank, without collectives. FSDP1 keeps them in private attributes, and they have
no names: all parameters are averaged, and a state loads at the same world size and wrapping only. For new code use
``torch.distributed.fsdp.fully_shard`` with ``modkit.EMA``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel


class FlatAverage:
    """Exponential moving average of the flat shards of an FSDP1 model.

    Call ``update()`` after each optimizer step, and evaluate or save inside ``applied()``, outside of a forward.
    Save ``shards`` on each rank to resume.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.shards: list[Tensor] = []

    def _current(self) -> list[Tensor]:
        """Return the flat shards of the training weights on this rank."""
        modules = FullyShardedDataParallel.fsdp_modules(self.model)
        handles = [module._handle for module in modules if module._handle is not None]
        return [handle.flat_param._local_shard.detach() for handle in handles]

    @torch.no_grad()
    def update(self) -> None:
        """Copy the weights in the first update, and average in later ones."""
        current = self._current()
        if not self.shards:
            self.shards = [shard.clone() for shard in current]
        else:
            torch._foreach_lerp_(self.shards, current, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Copy the average into the model for a block."""
        training = [shard.clone() for shard in self._current()]
        torch._foreach_copy_(self._current(), self.shards)
        try:
            yield
        finally:
            torch._foreach_copy_(self._current(), training)
