"""Whether the tensors of a model are still those that were found in it.

This is asked before each update, so it is made of loops in C.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from modkit._upstream import tensor_guard
from modkit.averaging._sharded import is_sharded, local_shard


Registry = Mapping[str, Any]

_PLAIN: Final = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Watch:
    """Sees whether tensors were added, removed, replaced, tied, renamed, moved, cast or reshaped.

    A tensor that is given to ``parameter.data`` and is like the one before is no change, as the
    parameter is the same object.

    Args:
        registries: The tables of parameters and children, of which names and values are to stay.
        named: Tables of buffers that may be replaced in each step: only their names are to stay.
        tensors: Whose shape, dtype, device and layout are to stay.
    """

    def __init__(
        self,
        registries: Iterable[Registry],
        named: Iterable[Registry],
        tensors: Iterable[Tensor],
    ) -> None:
        registries, named = list(registries), list(named)
        # Most tables are empty, and those are looked at together.
        self._empty = [table for table in (*registries, *named) if not table]
        self._filled = [table for table in registries if table]
        self._were = [dict(table) for table in self._filled]
        self._with_own_equality = [
            (table, key, value)
            for table in self._filled
            for key, value in table.items()
            if isinstance(value, torch.nn.Module) and type(value).__eq__ is not object.__eq__
        ]
        self._named = [table for table in named if table]
        self._names = list(chain.from_iterable(self._named))
        self._alike = _alike(list(tensors))

    def changed(self) -> bool:
        """Tell whether something is not as it was."""
        with _NoEquality():
            same = self._filled == self._were
        return (
            not same
            or any(self._empty)
            or any(table.get(key) is not value for table, key, value in self._with_own_equality)
            or list(chain.from_iterable(self._named)) != self._names
            or not self._alike()
        )


class _NoEquality(TorchFunctionMode):
    """Lets tables of tensors be compared: a tensor is equal to itself alone, whatever it holds.

    Comparing tables asks first whether two values are the same object, and only then whether they
    are equal, which for tensors would be another tensor.
    """

    @override
    def __torch_function__(self, *_: Any, **__: Any) -> bool:
        return False


def _alike(tensors: list[Tensor]) -> Callable[[], bool]:
    """Return what tells whether tensors have the shape, dtype and device that they have now."""
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    if sharded:
        return _alike_with_shards(tensors, sharded)
    if all(type(tensor) in _PLAIN and tensor.layout is torch.strided for tensor in tensors):
        guard = tensor_guard(tensors)
        if guard is not None:
            return guard
    facts = _facts_of(tensors)
    return lambda: _facts_of(tensors) == facts


def _alike_with_shards(tensors: list[Tensor], sharded: list[Tensor]) -> Callable[[], bool]:
    """Return what tells, too, whether the shards are the same objects: FSDP may make others."""
    shards = [local_shard(tensor) for tensor in tensors]
    alike = _alike(shards)
    here = [local_shard(tensor) for tensor in sharded]

    def same() -> bool:
        with torch.no_grad():
            now = [cast("Any", tensor).to_local() for tensor in sharded]
        return all(map(operator.is_, now, here)) and alike()

    return same


def _facts_of(tensors: list[Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    shapes = [tensor.shape for tensor in tensors]
    return shapes, [tensor.dtype for tensor in tensors], [tensor.device for tensor in tensors]
