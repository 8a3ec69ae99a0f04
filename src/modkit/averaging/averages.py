"""Storage of an average: its tensors and error terms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modkit._messages import MSG_LEAVE_OUT, add_note
from modkit._upstream import copy_
from modkit.averaging.options import Options
from modkit.averaging.precision import full_value, is_averaged, is_rounded
from modkit.averaging.sharding import local_shard, shards_of


Tensors: TypeAlias = Mapping[str, Tensor]


class Average:
    """The average of named tensors: what is stored of it, and what a checkpoint holds of it.

    Args:
        options: Options of the average, kept as an attribute.

    Attributes:
        tensors: Averages by name.
        errors: Low-order error terms by name, with ``precision="compensated"``.
        generators: Generators of the stochastic rounding, by device.
        statistics: Batch normalization statistics that were computed for this average, by name.
    """

    def __init__(self, options: Options) -> None:
        self.options: Options = options
        self.reset()

    def reset(self) -> None:
        """Drop all values, so that the next step is the first one."""
        self.tensors: dict[str, Tensor] = {}
        self.errors: dict[str, Tensor] = {}
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
        device, precision = self.options.device, self.options.precision
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

            has_error = precision == "compensated" and is_averaged(member)
            # A wider average, as ``EMA.to`` makes it, loses nothing that an error term would keep.
            if has_error and (dtype == member.dtype or is_rounded(dtype)):
                self.errors[name] = torch.zeros_like(tensor)

    def place(self, members: Tensors) -> None:
        """Follow a model that was moved or sharded; averages with a device of their own stay there.

        Args:
            members: Tensors of the model by name.
        """
        for name, current in members.items():
            device = self.options.device or current.device

            for stored in (self.tensors, self.errors):
                if name in stored:
                    tensor = shards_of(stored[name], current)
                    if tensor is not stored[name] or tensor.device != device:
                        # A view of the full tensor would keep all of its memory.
                        stored[name] = tensor.to(device, copy=True)

    def resized(
        self, members: Tensors, options: Options, former_names: Mapping[str, str]
    ) -> "Average":
        """Return the average of other members, or of the same ones in another dtype or device.

        Args:
            members: Tensors of the model by name.
            options: Options of the new average.
            former_names: Maps names of members to their names in this average. Members without a
                name here start as a copy, and so do those of another shape.

        Returns:
            The new average, in memory of its own. This one is unchanged.
        """
        new = Average(options)
        new.start(members)
        for name, tensor in new.tensors.items():
            former_name = former_names.get(name, "")
            average = self.tensors.get(former_name)
            if average is None or average.shape != tensor.shape:
                new._take_over(name, members[name], None)
            else:
                new._take_over(name, average, self.errors.get(former_name))

        new.generators = self.generators
        new.set_statistics(self.statistics)
        return new

    def set_statistics(self, statistics: Tensors) -> None:
        """Keep batch normalization statistics until the next step.

        Args:
            statistics: The statistics by name, which are moved to the device of the average.
        """
        device = self.options.device
        self.statistics = {name: t.to(device or t.device) for name, t in statistics.items()}

    def _take_over(self, name: str, value: Tensor, error: Tensor | None) -> None:
        """Copy another average and its error term, which may be full, or of other dtypes."""
        tensor = local_shard(self.tensors[name])
        value = local_shard(shards_of(value, self.tensors[name]))
        error = None if error is None else local_shard(shards_of(error, self.tensors[name]))
        error_here = self.errors.get(name)

        if error is not None and (error_here is None or tensor.dtype != value.dtype):
            # An error term only fits the tensor that it was computed for: add it first.
            wide = torch.promote_types(value.dtype, tensor.dtype)
            wide = torch.promote_types(wide, torch.float32)
            value = value.to(wide).add(error)
            error = None
        copy_(tensor, value)

        if error_here is not None:
            # Without an error term of its own, it is what rounding to the dtype here has lost.
            lost = value.to(tensor.device) - tensor if error is None else error
            copy_(local_shard(error_here), lost)

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

    def values(self) -> dict[str, Tensor]:
        """Return the averages by name.

        Returns:
            The tensors themselves. Only 16-bit averages with error terms are computed: they are the
            sums of both, in float32.
        """
        if not self.errors:
            return self.tensors
        return {name: full_value(t, self.errors.get(name)) for name, t in self.tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on; tensors are not copied.

        Returns:
            ``"tensors"`` and error terms, ``"rests"``, by name; the states of the random
            ``"generators"`` by device; and batch normalization ``"statistics"``, if there are any.
        """
        state: dict[str, Any] = {
            "tensors": dict(self.tensors),
            "rests": dict(self.errors),
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
            self._take_over(name, state["tensors"][name], state["rests"].get(name))

        self.generators = {}
        for device, random_state in state["generators"].items():
            self.generator(torch.device(device)).set_state(random_state.cpu())
