"""Whether the tensors of models are still as they were: the one mechanism that notices changes.

An update runs these checks before each step, so they consist of loops in C.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, starmap
from typing import Any, Final, cast

import torch
from torch import Tensor

from modkit._upstream import PLAIN, tensor_guard
from modkit.averaging.named_tensors import Member, NamedTensors, Registry
from modkit.averaging.sharding import is_sharded, local_shard


_TABLES: Final = ("_modules", "_parameters", "_buffers")
_requires_grad: Final = operator.attrgetter("requires_grad")


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


class Tables:
    """The tables that modules had at one moment; another one in the place of one is a change.

    ``module._parameters = ...``, ``module.__dict__.update()`` and ``__setstate__()`` put it there,
    and so does the end of a block of ``fast_inference``, if the tables are those of the block: no
    longer does anything bring them up to date. Empty tables are not compared.

    Args:
        states: ``__dict__`` of each module, without scripted ones, which make new tables at each
            access.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]]) -> None:
        # Without the modules themselves, which an average does not keep alive.
        self._places = [(state, name) for state in states for name in _TABLES if state[name]]
        # No ``starmap``, which the compiler of torch 2.8 cannot follow.
        self._tables = [state[name] for state, name in self._places]

    def changed(self) -> bool:
        """Return True if a module has another table."""
        current = list(starmap(operator.getitem, self._places))
        if all(map(operator.is_, current, self._tables)):
            return False
        # A block that began since has put tables in front of these, which stay up to date.
        lasting = [getattr(table, "original", table) for table in current]
        return not all(map(operator.is_, lasting, self._tables))


class Watch:
    """Notices that tensors were added, removed, replaced, tied, renamed, moved, cast or reshaped.

    Assigning to ``parameter.data`` is not a change if the metadata stay.

    Args:
        models: The models whose tables of parameters and children are compared.
        tensors: Tensors whose metadata are compared.
        buffers: Whether buffers count too: otherwise forwards may replace them under the same
            names.
        tables: Further tables.
        members: Buffers that must still be registered.
        frozen: Parameters that must not begin to require gradients.
        unknown: Whether it is not known what there was, so that everything is a change.
    """

    def __init__(
        self,
        models: Sequence[NamedTensors] = (),
        tensors: Iterable[Tensor] = (),
        *,
        buffers: bool = False,
        tables: Iterable[Registry] = (),
        members: Sequence[Member] = (),
        frozen: Iterable[Tensor] = (),
        unknown: bool = False,
    ) -> None:
        # A scripted model cannot be watched, so it is walked again each time.
        self._unknown = unknown or any(model.scripted for model in models)
        states = [state for model in models for state in model.states]
        self._tables = Tables(states)
        compared = _TABLES if buffers else ("_modules", "_parameters")
        registries = [*tables, *(state[name] for state in states for name in compared)]
        named = [] if buffers else [state["_buffers"] for state in states]

        # Most tables are empty, and those are checked together.
        self._empty = [table for table in (*registries, *named) if not table]
        self._filled = Snapshot(table for table in registries if table)
        self._named = [table for table in named if table]
        self._names = list(chain.from_iterable(self._named))
        self._alike = metadata_guard([] if self._unknown else list(tensors))

        # Averaged buffers are compared by identity, because a forward may replace them.
        self._members = [member.tensor for member in members]
        self._registries = [member.registry for member in members]
        self._keys = [member.key for member in members]
        self._frozen = [tensor for tensor in frozen if not tensor.requires_grad]

    def changed(self) -> bool:
        """Return True if anything is not as it was."""
        if (
            self._unknown
            or self._filled.changed()
            or any(self._empty)
            or list(chain.from_iterable(self._named)) != self._names
            or self._tables.changed()
            or not self._alike()
        ):
            return True

        current = map(operator.getitem, self._registries, self._keys)
        if not all(map(operator.is_, current, self._members)):
            return True

        return any(map(_requires_grad, self._frozen))


def metadata_guard(tensors: list[Tensor]) -> Callable[[], bool]:
    """Return a function that compares the metadata of tensors with the present ones.

    Args:
        tensors: The tensors, of any kind. Those of FSDP are compared by their shards.

    Returns:
        A function that returns True while shapes, strides, dtypes and devices are as they are now:
        torch's guard, in C++, where it knows the tensors.
    """
    if not tensors:
        return partial(bool, True)
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    if sharded:
        return _alike_with_shards(tensors, sharded)

    if all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in tensors):
        guard = tensor_guard(tensors)
        if guard is not None:
            return guard

    # Torch's guard does not take subclasses and other layouts: compare in Python.
    facts = _metadata_of(tensors)
    return lambda: _metadata_of(tensors) == facts


def _alike_with_shards(tensors: list[Tensor], sharded: list[Tensor]) -> Callable[[], bool]:
    """Return a guard that also compares the shards, of which some tensors are made, by identity."""
    # FSDP may replace the shards.
    alike = metadata_guard([local_shard(tensor) for tensor in tensors])
    here = [local_shard(tensor) for tensor in sharded]

    def same() -> bool:
        with torch.no_grad():
            now = [cast("Any", tensor).to_local() for tensor in sharded]
        return all(map(operator.is_, now, here)) and alike()

    return same


def _metadata_of(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
