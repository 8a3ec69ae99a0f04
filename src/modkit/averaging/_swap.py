"""Putting averages into a model and taking them out again, without copying them."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from modkit._errors import NameMismatchError
from modkit.averaging._members import Members


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
    return copy.deepcopy(model, memo)


def write(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other values; a buffer may have had another shape."""
    if tensor.shape == value.shape:
        tensor.copy_(value)
    else:
        tensor.data = value.to(tensor.device, tensor.dtype, copy=True)


class _Swapped(NamedTuple):
    name: str
    tensor: Tensor
    raw: Tensor
    version: int


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
        raw = tensor.data
        inside = value
        if inside.dtype != raw.dtype or inside.device != raw.device:
            inside = inside.to(raw.device, raw.dtype)
        tensor.data = inside
        self._swapped.append(_Swapped(name, tensor, raw, _version(tensor)))

    def undo(self) -> list[str]:
        """Put the raw data back; return the names of the tensors that were written to meanwhile."""
        written = []
        for swapped in reversed(self._swapped):
            if _version(swapped.tensor) != swapped.version:
                written.append(swapped.name)
            swapped.tensor.data = swapped.raw
        self._swapped = []
        return written[::-1]

    def raw_values(self) -> dict[str, Tensor]:
        """Return what the tensors hold when nothing is exchanged, by name."""
        return {swapped.name: swapped.raw for swapped in self._swapped}


def _version(tensor: Tensor) -> int:
    """Return how often the tensor has been written to; those made for inference do not count."""
    return 0 if tensor.is_inference() else tensor._version
