"""Swapping averages into a model and restoring the training weights, without copies."""

import copy
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from modkit._messages import (
    MSG_CONVERTED_INSIDE,
    MSG_WRITTEN_IN_VAIN,
    MSG_WRITTEN_INSIDE,
    add_note,
)
from modkit.averaging.named_tensors import NamedTensors, check_match, shapes_of
from modkit.averaging.sharding import local_shard, reshard, sharded_places


ModelT = TypeVar("ModelT", bound=torch.nn.Module)

# The name of a tensor, the tensor of a model, and the value that it is to have.
Pair: TypeAlias = tuple[str, Tensor, Tensor]
Pairs: TypeAlias = list[Pair]


def pairs_for(named: NamedTensors, values: Mapping[str, Tensor]) -> Pairs:
    """Pair values with the tensors of a model by name; only buffers may have another shape."""
    found = {name: one for name in values if (one := named.member(name)) is not None}
    shapes = {n: one.current().shape if one.is_parameter else None for n, one in found.items()}
    check_match("EMA: the averages do not fit the model", shapes_of(values), shapes)
    return [(name, found[name].current(), value) for name, value in values.items()]


class _DetachedCopies(TorchFunctionMode):
    """Deep-copies results of autograd, which modules may hold as attributes, as values."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def copy_of(model: ModelT, copies: Mapping[int, Tensor] | None = None) -> ModelT:
    """Return a deep copy of a model with results of autograd; ``copies`` maps ids to copies."""
    try:
        return copy.deepcopy(model, dict(copies or {}))
    except RuntimeError:
        # ``weight_norm``, for one, leaves a computed tensor in its module, which torch refuses to copy.
        with _DetachedCopies():
            return copy.deepcopy(model, dict(copies or {}))
    except AssertionError as error:
        add_note(error, "modkit.EMA averages a sharded model without a copy of it.")
        raise


def write(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other values; a buffer may have had another shape."""
    if tensor.shape == value.shape:
        tensor.copy_(value)
    else:
        tensor.data = value.to(tensor.device, tensor.dtype, copy=True)


class Swap:
    """An exchange of the data of tensors for other data, which can be undone.

    The tensors stay the same objects, so optimizers, hooks and tied names are not affected. Data of
    the same dtype and device are exchanged as pointers; other data are cast or moved first.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._pairs = list(pairs)
        self._tensors = [tensor for _, tensor, _ in self._pairs]
        self._sharded = frozenset(sharded_places(self._tensors))
        self.raws: list[Tensor] = []
        self._held = list(self._tensors)
        self._pointers: list[int] = []
        self.versions: list[int] = []
        self._index: dict[int, int] = {}
        with _lock:
            try:
                with torch.no_grad():
                    self._swap_in()
            except BaseException:
                self._tensors = self._tensors[: len(self.raws)]
                self._note()
                self.undo()
                raise
            self._note()

    def _swap_in(self) -> None:
        for place, (_, tensor, value) in enumerate(self._pairs):
            if place in self._sharded:
                # FSDP has a pointer of its own to the shard, so the elements are exchanged instead.
                self.raws.append(tensor.detach().clone())
                _write_shard(tensor, value)
                self._held[place] = local_shard(tensor)
                continue
            raw = tensor.data
            if value.dtype is not raw.dtype or value.device != raw.device:
                value = value.to(raw.device, raw.dtype)
            tensor.data = value
            self.raws.append(raw)

    def _note(self) -> None:
        self._held = self._held[: len(self._tensors)]
        self._pointers = list(map(Tensor.data_ptr, self._held))
        self.versions = _versions(self._held)
        _active.append(self)

    def position(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor in the lists, or None if it is not swapped."""
        if len(self._index) != len(self._tensors):
            self._index = {id(one): place for place, one in enumerate(self._tensors)}
        return self._index.get(id(tensor))

    @torch.no_grad()
    def undo(self) -> str | None:
        """Restore the data, in any order of swaps; return a message if the tensors were changed."""
        with _lock:
            later = _active[_active.index(self) + 1 :]
            problem = self._problem()
            if later or self._sharded:
                self._undo_each(later)
            else:
                for tensor, raw in zip(self._tensors, self.raws, strict=True):
                    tensor.data = raw
            _active.remove(self)
            return problem

    def _undo_each(self, later: list["Swap"]) -> None:
        for place in reversed(range(len(self._tensors))):
            tensor, raw = self._tensors[place], self.raws[place]
            found = [(one, n) for one in later if (n := one.position(tensor)) is not None]
            if found:
                above, position = found[0]
                above.raws[position] = raw
            elif place in self._sharded:
                _write_shard(tensor, raw)
            else:
                tensor.data = raw

    def _problem(self) -> str | None:
        """Return a message for the first tensor that was changed and is not swapped again."""
        pointers, versions = list(map(Tensor.data_ptr, self._held)), _versions(self._held)
        if pointers == self._pointers and versions == self.versions:
            return None
        later = _active[_active.index(self) + 1 :]
        for place, (name, tensor, value) in enumerate(self._pairs[: len(self._tensors)]):
            if any(one.position(tensor) is not None for one in later):
                continue
            if pointers[place] != self._pointers[place]:
                return MSG_CONVERTED_INSIDE.format(name=name)
            if versions[place] != self.versions[place]:
                shared = value.data_ptr() == self._pointers[place]
                return (MSG_WRITTEN_INSIDE if shared else MSG_WRITTEN_IN_VAIN).format(name=name)
        return None


# All swaps that have not been undone, in order, so that several averages, and models that share
# tensors, lose no training weights. Readers go through a copy, since an undone swap moves the others.
_active: list[Swap] = []
_lock: Final = threading.RLock()


def raw_value(tensor: Tensor) -> Tensor | None:
    """Return the training weights of a tensor, or None if nothing is swapped in."""
    found = ((swap, swap.position(tensor)) for swap in tuple(_active))
    return next((swap.raws[place] for swap, place in found if place is not None), None)


def any_swapped(model: torch.nn.Module) -> bool:
    """Return True if an average is swapped into one of the model's parameters."""
    if not _active:
        return False
    reshard(model.modules())
    return any(raw_value(parameter) is not None for parameter in model.parameters())


def _write_shard(tensor: Tensor, value: Tensor) -> None:
    """Copy into a shard, and adapt the versions by which writes of the user are detected."""
    held = local_shard(tensor)
    (before,) = _versions([held])
    held.copy_(local_shard(value))
    for swap in _active:
        place = swap.position(tensor)
        if place is not None:
            swap.versions[place] += _versions([held])[0] - before


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return the version counters of tensors; inference tensors have none."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


@contextmanager
def exchanged(pairs: Iterable[Pair]) -> Generator[None]:
    """Exchange data for the length of a block, which must not change the tensors."""
    swap = Swap(pairs)
    try:
        yield
    except BaseException as error:
        if problem := swap.undo():
            add_note(error, problem)
        raise
    if problem := swap.undo():
        raise RuntimeError(problem)


def raw_values(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the training weights of the tensors that averages are swapped into, by name."""
    if not _active:
        return {}
    found = {name: raw_value(one.current()) for name, one in NamedTensors(model).all().items()}
    return {name: raw for name, raw in found.items() if raw is not None}
