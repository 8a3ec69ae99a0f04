"""Where averages are: in tensors of their own, which the model of ``EMA.module`` shares."""

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modkit._messages import MSG_LEAVE_OUT, add_note
from modkit._upstream import copy_
from modkit.averaging.options import Options
from modkit.averaging.sharding import local_shard, shards_of


Tensors: TypeAlias = Mapping[str, Tensor]


class Average:
    """The average of named tensors: what is stored of it, and what a checkpoint holds of it.

    Args:
        options: Options of the average, kept as an attribute.

    Attributes:
        tensors: Averages by name.
        generators: Generators of the stochastic rounding, by device.
        statistics: Batch normalization statistics that were computed for this average, by name.
    """

    def __init__(self, options: Options) -> None:
        self.options: Options = options
        self.reset()

    def reset(self) -> None:
        """Drop all values, so that the next step is the first one."""
        self.tensors: dict[str, Tensor] = {}
        self.generators: dict[torch.device, torch.Generator] = {}
        # Batch normalization statistics for this average, until the next step.
        self.statistics: dict[str, Tensor] = {}

    def start(self, members: Tensors) -> None:
        """Allocate an average; its values are those of the first step, which copies.

        Args:
            members: Tensors of the model by name. They give shapes and, with the options, dtypes
                and devices.
        """
        self.reset()
        device = self.options.device
        # In the order of the model, which is that of the state dict.
        for name, member in members.items():
            dtype = self.options.kept_dtype(member.dtype)
            try:
                tensor = torch.empty_like(member, dtype=dtype, device=device, requires_grad=False)
            except NotImplementedError as error:
                # The class of a quantized weight, for one, does not know which tensor it is.
                add_note(error, f"EMA: {name} cannot be averaged. {MSG_LEAVE_OUT}")
                raise
            self.tensors[name] = tensor

    def place(self, members: Tensors) -> bool:
        """Follow a model that was moved or sharded; averages with a device of their own stay there.

        Args:
            members: Tensors of the model by name.

        Returns:
            Whether there are other tensors now.
        """
        before = [*self.tensors.values()]
        for name, current in members.items():
            device = self.options.device or current.device
            tensor = shards_of(self.tensors[name], current)
            if tensor is not self.tensors[name] or tensor.device != device:
                # A view of the full tensor would keep all of its memory.
                self.tensors[name] = tensor.to(device, copy=True)
        return not all(map(operator.is_, self.tensors.values(), before))

    def resized(self, members: Tensors, former_names: Mapping[str, str]) -> "Average":
        """Return the average of other members.

        Args:
            members: Tensors of the model by name.
            former_names: Maps names of members to their names in this average. Members without a
                name here start as a copy, and so do those of another shape.

        Returns:
            The new average, in memory of its own. This one is unchanged.
        """
        new = Average(self.options)
        new.start(members)
        for name, tensor in new.tensors.items():
            average = self.tensors.get(former_names.get(name, ""))
            if average is None or average.shape != tensor.shape:
                average = members[name]
            new._take_over(name, average)

        new.generators = self.generators
        return new

    def set_statistics(self, statistics: Tensors) -> None:
        """Keep batch normalization statistics until the next step.

        Args:
            statistics: The statistics by name, which are moved to the device of the average.
        """
        device = self.options.device
        moved = {name: t.to(device or t.device) for name, t in statistics.items()}
        # In place: swaps watch this table.
        self.statistics.clear()
        self.statistics.update(moved)

    def _take_over(self, name: str, value: Tensor) -> None:
        """Copy another average, which may be full, or of another dtype."""
        tensor = self.tensors[name]
        copy_(local_shard(tensor), local_shard(shards_of(value, tensor)))

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the stochastic rounding on a device, seeded when it is made.

        Args:
            device: Device of the averages.

        Returns:
            The generator, which is one of the host for XLA.
        """
        if device.type == "xla":
            # XLA has one random state for all, and no generators.
            device = torch.device("cpu")
        if device not in self.generators:
            seeded = torch.Generator(device=device).manual_seed(self.options.seed)
            self.generators[device] = seeded
        return self.generators[device]

    def seed(self, seed: int) -> None:
        """Seed the stochastic rounding of one step, and of generators that are made later.

        Args:
            seed: The seed, in place of that of the options.
        """
        self.options = replace(self.options, seed=seed)
        for generator in self.generators.values():
            generator.manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on; tensors are not copied.

        Returns:
            ``"tensors"`` by name; the states of the random ``"generators"`` by device; and batch
            normalization ``"statistics"``, if there are any.
        """
        state: dict[str, Any] = {
            "tensors": dict(self.tensors),
            "generators": {str(device): g.get_state() for device, g in self.generators.items()},
        }
        # Older versions do not know the entry, so it is only there if it is needed.
        if self.statistics:
            state["statistics"] = dict(self.statistics)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the values of a state into the tensors of this average, which was started.

        Args:
            state: What :meth:`state_dict` returns, with names and shapes that were checked. Full
                tensors are sharded like those here.
        """
        for name in self.tensors:
            self._take_over(name, state["tensors"][name])

        self.generators = {}
        for device, random_state in state["generators"].items():
            self.generator(torch.device(device)).set_state(random_state.cpu())
