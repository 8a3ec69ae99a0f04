"""The mean of the latest models, which needs a copy of each of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from modkit.averaging._average import Average
from modkit.averaging._precision import Precision
from modkit.averaging._sharded import local_shard, shards_of


class WindowAverage(Average):
    """The mean of the last few copies of the tensors, which stand in a ring.

    It is computed from the copies each time. A sum that is kept, from which the oldest copy is taken
    off, would drift away from it.
    """

    def __init__(
        self, window: int, precision: Precision, device: torch.device | None, seed: int
    ) -> None:
        super().__init__(precision, device, seed)
        self._window = window
        self._ring: list[dict[str, Tensor]] = []
        self._seen = 0
        self._currents: Mapping[str, Tensor] = {}

    @override
    def reset(self) -> None:
        """Forget everything, so that the next step is the first one."""
        super().reset()
        self._ring, self._seen, self._currents = [], 0, {}

    @override
    def start(self, members: Mapping[str, Tensor]) -> None:
        """Make room for the mean; room for the copies comes with each of them."""
        super().start(members)
        self.rests, self._ring, self._seen = {}, [], 0

    @override
    def bind(self, members: Mapping[str, Tensor]) -> None:
        """Say which tensors are averaged from now on; the copies go where the mean is."""
        super().bind(members)
        self._currents = {name: local_shard(tensor) for name, tensor in members.items()}
        for copies in self._ring:
            for name, average in self.tensors.items():
                copies[name] = copies[name].to(average.device)

    @override
    def step(self, weight: float, finite: Tensor | None = None, n: int = 0) -> None:
        """Copy the present values in the place of the oldest ones; the weight is always the same."""
        slot = self._seen % self._window
        if slot == len(self._ring):
            self._ring.append({name: torch.empty_like(mean) for name, mean in self.tensors.items()})
        for name, current in self._currents.items():
            local_shard(self._ring[slot][name]).copy_(current)
        self._seen += 1
        for name, mean in self.tensors.items():
            wide = torch.float32 if mean.dtype.itemsize < _SINGLE else mean.dtype
            copies = torch.stack([local_shard(copies[name]) for copies in self._ring])
            local_shard(mean).copy_(copies.mean(0, dtype=wide))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the mean, the copies and how many there have been."""
        ring = [dict(copies) for copies in self._ring]
        return {**super().state_dict(), "ring": ring, "seen": self._seen}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a mean; one without copies, of another kind of average, counts as one copy."""
        super().load_state_dict(state)
        ring: list[Mapping[str, Tensor]] = state.get("ring", [self.tensors])
        self._ring = [
            {
                name: mean.clone().copy_(shards_of(copies[name], mean))
                for name, mean in self.tensors.items()
            }
            for copies in ring
        ]
        self._seen = state.get("seen", 1)


# Bytes of a float32: sums of less are rounded too much.
_SINGLE = 4
