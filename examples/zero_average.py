"""A recipe: average the fp32 weights of DeepSpeed ZeRO-1, ZeRO-2 and ZeRO-3.

``modkit.EMA`` refuses ZeRO-3, whose parameters are empty between steps, and averages the bf16 parameters of ZeRO-1
and ZeRO-2, not their fp32 masters. This class averages the fp32 partitions of each rank, without collectives. DeepSpeed
keeps them in attributes that are not documented: run ``tests/integration/deepspeed`` after an upgrade.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


# The lists of fp32 partitions: of ZeRO-3, of ZeRO-1 and ZeRO-2, and of the optimizer for bf16.
PARTITIONS = (
    "fp32_partitioned_groups_flat",
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
)


class ZeroAverage:
    """Exponential moving average of the fp32 partitions of a DeepSpeed engine.

    Call ``update()`` after ``engine.step()`` at the boundary of gradient accumulation, and evaluate or save inside
    ``applied()``, which all ranks must enter. Save ``partitions`` on each rank to resume at the same world size.
    """

    def __init__(self, engine: Any, decay: float) -> None:
        self.engine = engine
        self.decay = decay
        self.partitions: list[Tensor] = []

    def _current(self) -> list[Tensor]:
        """Return the fp32 partitions of the training weights on this rank."""
        optimizer = self.engine.optimizer
        for name in PARTITIONS:
            if partitions := getattr(optimizer, name, None):
                return [partition.data for partition in partitions]
        message = f"{type(optimizer).__name__} has no fp32 partitions"
        raise TypeError(message)

    @torch.no_grad()
    def update(self) -> None:
        """Copy the weights in the first update, and average in later ones."""
        current = self._current()
        if not self.partitions:
            self.partitions = [partition.clone() for partition in current]
        else:
            torch._foreach_lerp_(self.partitions, current, 1 - self.decay)

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        """Write fp32 partitions, and the parameters that the model computes with."""
        optimizer = self.engine.optimizer
        torch._foreach_copy_(self._current(), values)
        if hasattr(optimizer, "update_lp_params"):
            # ZeRO-1 and ZeRO-2 gather the parameters.
            optimizer.update_lp_params()
            return

        for half, full in zip(
            optimizer.fp16_partitioned_groups_flat,
            optimizer.fp32_partitioned_groups_flat,
            strict=True,
        ):
            half.data.copy_(full.data)
        # Small parameters of ZeRO-3 stay gathered: they are partitioned, and gathered again.
        parameters = list(self.engine.module.parameters())
        for parameter in parameters:
            if parameter.ds_status.name == "AVAILABLE" or parameter.ds_persist:
                parameter.partition([parameter], has_been_updated=False)
        for parameter in parameters:
            if parameter.ds_persist:
                parameter.all_gather([parameter])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Write the average into the model for a block. This is a collective."""
        training = [partition.clone() for partition in self._current()]
        self._write(self.partitions)
        try:
            yield
        finally:
            self._write(training)
