"""Putting averages into a model and taking them out again, without copying them."""

import copy
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from modkit._errors import (
    MSG_CONVERTED_INSIDE,
    MSG_WRITTEN_IN_VAIN,
    MSG_WRITTEN_INSIDE,
    NameMismatchError,
    add_note,
)
from modkit.averaging._members import Members
from modkit.averaging._sharded import is_fully_sharded, is_sharded, local_shard, reshard
from modkit.averaging._sharded_copy import copy_fully_sharded


ModelT = TypeVar("ModelT", bound=torch.nn.Module)

# The name of a tensor, the tensor of a model, and the value that it is to have.
Pair: TypeAlias = tuple[str, Tensor, Tensor]


def pairs_for(members: Members, values: Mapping[str, Tensor]) -> list[Pair]:
    """Pair values with the tensors of a model by name.

    A buffer may have another shape by now; the model keeps such ones for itself.

    Raises:
        NameMismatchError: A name is missing, or a parameter has another shape.
    """
    parameters = members.parameters
    found = {**parameters, **members.buffers}
    pairs: list[Pair] = []
    missing: list[str] = []
    shapes: list[str] = []
    for name, value in values.items():
        member = found.get(name)
        if member is None:
            missing.append(name)
            continue
        tensor = member.current()
        if name in parameters and tensor.shape != value.shape:
            shapes.append(f"{name} ({tuple(tensor.shape)} instead of {tuple(value.shape)})")
        pairs.append((name, tensor, value))
    if missing or shapes:
        what = "EMA: the averages do not fit the model"
        raise NameMismatchError(what, missing=missing, unexpected=[], shapes=shapes)
    return pairs


def copy_of(model: ModelT) -> ModelT:
    """Return a deep copy of a model, of one with computed tensors among its attributes too."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            # Old weight normalization keeps a computed tensor, which ``deepcopy`` refuses.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    if is_fully_sharded(model):
        return copy_fully_sharded(model, memo)
    return copy.deepcopy(model, memo)


def write(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other values; a buffer may have had another shape."""
    if tensor.shape == value.shape:
        tensor.copy_(value)
    else:
        tensor.data = value.to(tensor.device, tensor.dtype, copy=True)


class _Swapped:
    """One tensor whose data have been exchanged: what it held before, and what it holds meanwhile."""

    __slots__ = ("inside", "name", "raw", "sharded", "shared", "tensor", "version")

    def __init__(
        self, name: str, tensor: Tensor, raw: Tensor, inside: Tensor, shared: bool, sharded: bool
    ) -> None:
        self.name, self.tensor, self.raw, self.inside = name, tensor, raw, inside
        self.shared, self.sharded = shared, sharded
        self.version = _version(local_shard(tensor) if sharded else tensor)


# For each tensor whose data are exchanged now, by identity: the exchanges, the first one at the
# bottom. Those of several averages, and of several models that share tensors, know of one another
# here, so that the raw data are never lost sight of.
_stacks: dict[int, list[_Swapped]] = {}


def raw_value(tensor: Tensor) -> Tensor | None:
    """Return what a tensor holds when nothing is exchanged, or None if nothing is."""
    stack = _stacks.get(id(tensor))
    return stack[0].raw if stack else None


def any_swapped(model: torch.nn.Module) -> bool:
    """Tell whether the data of one of a model's parameters are exchanged at this moment."""
    if not _stacks:
        return False
    reshard(model)
    return any(id(parameter) in _stacks for parameter in model.parameters())


class Swap:
    """The exchange of the data of tensors for other data, which can be undone.

    The tensors stay the same objects, so optimizers, hooks and tied names do not notice. Data of
    the same dtype and device change places as pointers; other data are cast or moved first, and the
    result of that is what lives in the model for a while.

    Args:
        pairs: Name, tensor of a model, and what it is to hold.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._swapped: list[_Swapped] = []
        try:
            with torch.no_grad():
                for name, tensor, value in pairs:
                    self._put_in(name, tensor, value)
        except BaseException:
            self.undo()
            raise

    def _put_in(self, name: str, tensor: Tensor, value: Tensor) -> None:
        sharded = is_sharded(tensor)
        if sharded:
            # FSDP has a pointer of its own to the shard: the values change places instead.
            raw, inside, shared = tensor.detach().clone(), local_shard(tensor), False
            _write_shard(tensor, value)
        else:
            raw, inside, shared = self._exchange(tensor, value)
        swapped = _Swapped(name, tensor, raw, inside, shared, sharded)
        self._swapped.append(swapped)
        _stacks.setdefault(id(tensor), []).append(swapped)

    @staticmethod
    def _exchange(tensor: Tensor, value: Tensor) -> tuple[Tensor, Tensor, bool]:
        raw = tensor.data
        inside = value
        if inside.dtype != raw.dtype or inside.device != raw.device:
            inside = inside.to(raw.device, raw.dtype)
        tensor.data = inside
        return raw, inside, inside is value

    @torch.no_grad()
    def undo(self) -> str | None:
        """Put the raw data back; return what is wrong if the tensors were changed meanwhile.

        Exchanges need not be undone in order: what one of them took for raw may be what another had
        put there, and it gets the other's raw data then.
        """
        problem = None
        for swapped in reversed(self._swapped):
            tensor = swapped.tensor
            stack = _stacks[id(tensor)]
            position = stack.index(swapped)
            if position == len(stack) - 1:
                problem = _problem(swapped) or problem
                if swapped.sharded:
                    _write_shard(tensor, swapped.raw)
                else:
                    tensor.data = swapped.raw
            else:
                stack[position + 1].raw = swapped.raw
            del stack[position]
            if not stack:
                del _stacks[id(tensor)]
        self._swapped = []
        return problem


def _write_shard(tensor: Tensor, value: Tensor) -> None:
    """Give a shard other values, which no exchange is to take for a write of the block's."""
    held = local_shard(tensor)
    before = _version(held)
    held.copy_(local_shard(value))
    for swapped in _stacks.get(id(tensor), ()):
        swapped.version += _version(held) - before


def _problem(swapped: _Swapped) -> str | None:
    tensor = swapped.tensor
    held = local_shard(tensor) if swapped.sharded else tensor
    if held.dtype != swapped.inside.dtype or held.data_ptr() != swapped.inside.data_ptr():
        return MSG_CONVERTED_INSIDE.format(name=swapped.name)
    if _version(held) == swapped.version:
        return None
    message = MSG_WRITTEN_INSIDE if swapped.shared else MSG_WRITTEN_IN_VAIN
    return message.format(name=swapped.name)


def _version(tensor: Tensor) -> int:
    """Return how often the tensor has been written to; those made for inference do not count."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def exchanged(pairs: Iterable[Pair]) -> Generator[None]:
    """Exchange data for the length of a block.

    Raises:
        RuntimeError: At the end: the block has changed the tensors. If it has raised an error of its
            own, that one gets a note.
    """
    swap = Swap(pairs)
    try:
        yield
    except BaseException as error:
        problem = swap.undo()
        if problem is not None:
            add_note(error, problem)
        raise
    problem = swap.undo()
    if problem is not None:
        raise RuntimeError(problem)


def raw_values(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return what the tensors of a model hold whose data are exchanged now, when they are not."""
    if not _stacks:
        return {}
    members = Members(model)
    every = {**members.parameters, **members.buffers}
    found = {name: raw_value(member.current()) for name, member in every.items()}
    return {name: raw for name, raw in found.items() if raw is not None}
