"""Whether the tensors of models are still as they were: the one mechanism that notices changes."""

import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final, cast

import torch
from torch import Tensor

from modkit._upstream import tensor_guard
from modkit.averaging.named_tensors import NamedTensors, Registry
from modkit.averaging.sharding import is_sharded, local_shard


PLAIN: Final = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Snapshot:
    """The objects that tables held at one moment, compared by identity.

    The comparison is a loop in C over ``is``: tensors compare elements, so ``==`` of tables is not
    usable, and a mode that changes ``==`` could stay entered after an interrupt.
    """

    def __init__(self, tables: Iterable[Registry]) -> None:
        self.tables: list[Registry] = list(tables)
        self._views = [table.values() for table in self.tables]
        self._lengths = list(map(len, self.tables))
        self._keys = list(chain.from_iterable(self.tables))
        self._values = list(chain.from_iterable(self._views))

    def changed(self) -> bool:
        """Return True if a table has other keys, or another object under one of them."""
        return (
            list(map(len, self.tables)) != self._lengths
            or not all(map(operator.is_, chain.from_iterable(self._views), self._values))
            or list(chain.from_iterable(self.tables)) != self._keys
        )


class Watch:
    """Detects tensors that were added, removed, replaced, tied, renamed, moved, cast or reshaped.

    It runs before each update, so it consists of loops in C. Assigning to ``parameter.data`` is not
    a change if the metadata of ``tensors`` stay. Buffers may be replaced, unless ``buffers``.
    """

    def __init__(
        self, models: Iterable[NamedTensors], tensors: Iterable[Tensor], *, buffers: bool = False
    ) -> None:
        models = list(models)
        # A scripted model cannot be watched, so it is walked again each time.
        self._unknown = any(model.scripted for model in models)
        registries = [table for model in models for table in model.registries]
        named = [table for model in models for table in model.buffer_registries]
        if buffers:
            registries, named = registries + named, []
        # Most tables are empty, and those are checked together.
        self._empty = [table for table in (*registries, *named) if not table]
        self._filled = Snapshot(table for table in registries if table)
        self._named = [table for table in named if table]
        self._names = list(chain.from_iterable(self._named))
        self._alike = metadata_guard(list(tensors))

    def changed(self) -> bool:
        """Return True if anything is not as it was."""
        return (
            self._unknown
            or self._filled.changed()
            or any(self._empty)
            or list(chain.from_iterable(self._named)) != self._names
            or not self._alike()
        )


def metadata_guard(tensors: list[Tensor]) -> Callable[[], bool]:
    """Return a function that returns True while the tensors have their present metadata."""
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    if sharded:
        return _alike_with_shards(tensors, sharded)
    if all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in tensors):
        guard = tensor_guard(tensors)
        if guard is not None:
            return guard
    facts = _facts_of(tensors)
    return lambda: _facts_of(tensors) == facts


def _alike_with_shards(tensors: list[Tensor], sharded: list[Tensor]) -> Callable[[], bool]:
    # FSDP may replace the shards.
    alike = metadata_guard([local_shard(tensor) for tensor in tensors])
    here = [local_shard(tensor) for tensor in sharded]

    def same() -> bool:
        with torch.no_grad():
            now = [cast("Any", tensor).to_local() for tensor in sharded]
        return all(map(operator.is_, now, here)) and alike()

    return same


def _facts_of(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
