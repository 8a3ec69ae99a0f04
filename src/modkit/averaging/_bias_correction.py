"""The average without its lag, which needs a copy of the first model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from modkit.averaging._average import Average
from modkit.averaging._precision import Precision
from modkit.averaging._sharded import local_shard, shards_of
from modkit.averaging.schedules import BEMA


class CorrectedAverage(Average):
    """An average to which a part of the way since the first model is added.

    What there is to read is the sum; the average goes on beside it.
    """

    def __init__(
        self, schedule: BEMA, precision: Precision, device: torch.device | None, seed: int
    ) -> None:
        super().__init__(precision, device, seed)
        self._schedule = schedule
        self._plain = Average(precision, device, seed)
        self._first: dict[str, Tensor] = {}
        self._currents: Mapping[str, Tensor] = {}

    @override
    def reset(self) -> None:
        """Forget everything, so that the next step is the first one."""
        super().reset()
        self._plain.reset()
        self._first, self._currents = {}, {}

    @override
    def start(self, members: Mapping[str, Tensor]) -> None:
        """Make room for the sum, the average and the first model."""
        super().start(members)
        self.rests = {}
        self._plain.start(members)
        self._first = {name: torch.empty_like(value) for name, value in self.tensors.items()}

    @override
    def bind(self, members: Mapping[str, Tensor]) -> None:
        """Say which tensors are averaged from now on."""
        super().bind(members)
        self._plain.bind(members)
        self._currents = {name: local_shard(tensor) for name, tensor in members.items()}
        for name, value in self.tensors.items():
            self._first[name] = self._first[name].to(value.device)

    @override
    def step(self, weight: float, finite: Tensor | None = None, n: int = 0) -> None:
        """Move the average, and correct it by the way that step ``n`` is away from the first."""
        self._plain.step(weight, finite)
        correction = self._schedule.correction(n)
        for name, tensor in self.tensors.items():
            value, first = local_shard(tensor), local_shard(self._first[name])
            current = self._currents[name].to(value.device)
            if n == 0:
                first.copy_(current)
            plain = local_shard(self._plain.value(name))
            way = current.to(plain.dtype) - first
            corrected = way.mul_(correction).add_(plain).to(value.dtype)
            if finite is not None:
                corrected = torch.where(finite.to(value.device), corrected, value)
            value.copy_(corrected)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the sum, the average and the first model."""
        more = {"plain": self._plain.state_dict(), "first": dict(self._first)}
        return {**super().state_dict(), **more}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over an average; one of another kind is the first model as well."""
        super().load_state_dict({**state, "rests": {}, "generators": {}})
        self._plain.load_state_dict(state.get("plain", state))
        first: Mapping[str, Tensor] = state.get("first", state["tensors"])
        for name, value in self._first.items():
            value.copy_(shards_of(first[name], value))
