"""One average of named tensors: what is kept, and how it moves."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modkit.averaging._precision import (
    ROUNDED,
    Precision,
    kept_dtype,
    lerp_,
    lerp_compensated_,
    lerp_stochastic_,
    whole_value,
)
from modkit.averaging._sharded import local_shard, shards_of


@dataclass
class _Group:
    """Averages and current values that one kernel takes together; of shards, those that are here."""

    averages: list[Tensor] = field(default_factory=list)
    rests: list[Tensor] = field(default_factory=list)
    currents: list[Tensor] = field(default_factory=list)


class Average:
    """The average of tensors that have names.

    Args:
        precision: In what numbers it is kept.
        device: Where it is kept; ``None`` for where the tensors are.
        seed: Of the random rounding.

    Attributes:
        tensors: The averages by name.
        rests: For ``precision="compensated"``: what did not fit into them.
    """

    def __init__(self, precision: Precision, device: torch.device | None, seed: int) -> None:
        self.precision: Precision = precision
        self.device = device
        self.seed = seed
        self.tensors: dict[str, Tensor] = {}
        self.rests: dict[str, Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._groups: list[_Group] = []

    def reset(self) -> None:
        """Forget everything, so that the next step is the first one."""
        self.tensors, self.rests, self._generators, self._groups = {}, {}, {}, []

    def start(self, members: Mapping[str, Tensor]) -> None:
        """Make room for an average of these tensors; the first step is to copy them."""
        self.tensors = {name: self._room_for(tensor) for name, tensor in members.items()}
        self.rests = {}
        if self.precision == "compensated":
            self.rests = {
                name: torch.zeros_like(self.tensors[name])
                for name, tensor in members.items()
                if self.tensors[name].dtype == tensor.dtype
            }

    def _room_for(self, tensor: Tensor) -> Tensor:
        dtype = kept_dtype(tensor.dtype, self.precision)
        return torch.empty_like(tensor, dtype=dtype, device=self.device, requires_grad=False)

    def bind(self, members: Mapping[str, Tensor]) -> None:
        """Say which tensors are averaged from now on, the names and shapes being the same.

        An average without a device of its own follows a model that has been moved.
        """
        groups: dict[tuple[Any, ...], _Group] = {}
        for name, current in members.items():
            average = self.tensors[name]
            if self.device is None and average.device != current.device:
                average = self.tensors[name] = average.to(current.device)
                if name in self.rests:
                    self.rests[name] = self.rests[name].to(current.device)
            key = (average.device, average.dtype, current.device, current.dtype, name in self.rests)
            group = groups.setdefault(key, _Group())
            group.averages.append(local_shard(average))
            group.currents.append(local_shard(current))
            if name in self.rests:
                group.rests.append(local_shard(self.rests[name]))
        self._groups = list(groups.values())

    def step(self, weight: float, finite: Tensor | None = None, n: int = 0) -> None:
        """Move by ``weight`` of the way to the current values.

        Args:
            weight: From 0 to 1; 1 copies.
            finite: A truth value as a tensor; where it is false, nothing changes. The step is taken
                back rather than not taken, so that nobody has to wait for the value.
            n: The number of the step, for averages that need more than the weight.
        """
        for group in self._groups:
            kept = [*group.averages, *group.rests]
            before = [] if finite is None else [tensor.clone() for tensor in kept]
            self._step_group(group, weight)
            if finite is not None:
                for tensor, old in zip(kept, before, strict=True):
                    tensor.copy_(torch.where(finite.to(tensor.device), tensor, old))

    def _step_group(self, group: _Group, weight: float) -> None:
        first = group.averages[0]
        if group.rests:
            lerp_compensated_(group.averages, group.rests, group.currents, weight)
        elif self.precision == "stochastic" and first.dtype in ROUNDED and weight != 1.0:
            generator = self.generator(first.device)
            lerp_stochastic_(group.averages, group.currents, weight, generator)
        else:
            lerp_(group.averages, group.currents, weight)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the random rounding on a device."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device).manual_seed(self.seed)
        return self._generators[device]

    def value(self, name: str) -> Tensor:
        """Return the average of a name: what is kept, not a copy, unless it is kept in two parts."""
        return whole_value(self.tensors[name], self.rests.get(name))

    def names(self) -> Iterable[str]:
        """Return the names, in the order of the model."""
        return self.tensors.keys()

    # What a checkpoint holds.

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and all that the next step depends on; tensors are not copied."""
        return {
            "tensors": dict(self.tensors),
            "rests": dict(self.rests),
            "generators": {
                str(device): generator.get_state() for device, generator in self._generators.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over averages whose names and shapes have been checked already."""
        for name, tensor in self.tensors.items():
            value = shards_of(state["tensors"][name], tensor)
            tensor.copy_(value)
            if name in self.rests:
                rest = self.rests[name]
                saved = state["rests"].get(name)
                rest.copy_(_rest_of(value, tensor) if saved is None else shards_of(saved, rest))
        self._generators = {}
        for device, random_state in state["generators"].items():
            self.generator(torch.device(device)).set_state(random_state.cpu())


def _rest_of(value: Tensor, average: Tensor) -> Tensor:
    """Return what an average of another precision holds beyond the one that it was copied to."""
    return value.to(average.device) - average
