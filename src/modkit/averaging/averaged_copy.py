"""The second model behind ``EMA.module``, which shares memory with an average."""

import operator
from collections.abc import Mapping
from typing import Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar

from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.sharding import is_sharded, shards_of
from modkit.averaging.swap import is_wrapper, write


ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)


class AveragedCopy(Generic[ModelT]):
    """A copy of a model whose tensors have the memory of averages, where dtype and device allow it.

    The copy stays the same object when averages get other memory, so that references to it stay
    true.
    """

    def __init__(self, module: ModelT) -> None:
        self.module = module
        # The averages at the latest refresh, and those whose memory the module has.
        self._averages: dict[str, Tensor] = {}
        self._shared: set[str] = set()

    def fits(self, model: NamedTensors) -> bool:
        """Return True if the model still has the names and shapes of the copy."""
        return model.is_like(NamedTensors(self.module))

    def is_current(self, averages: Mapping[str, Tensor]) -> bool:
        """Return True if the averages are the tensors of the latest refresh."""
        same_number = len(averages) == len(self._averages)
        return same_number and all(map(operator.is_, averages.values(), self._averages.values()))

    def release(self) -> None:
        """Give the module memory of its own, so that a reference to it does not change in part."""
        for name, member in NamedTensors(self.module).all().items():
            if name in self._shared:
                member.tensor.data = member.tensor.data.clone()

    def refresh(self, model: NamedTensors, averages: dict[str, Tensor]) -> None:
        """Share the memory of averages that have the model's dtype and device, and copy the rest.

        Args:
            model: The model in training: dtypes, devices, and what is not averaged.
            averages: The averages by name.
        """
        shared: set[str] = set()
        for name, member in NamedTensors(self.module).all().items():
            tensor = member.tensor
            source = model.tensor(name)
            # The model may have been sharded since the copy was made.
            value = shards_of(averages.get(name, source), tensor)
            place = source.dtype, source.device

            # ``value`` is another tensor if it was sharded for this copy.
            is_average = value is averages.get(name) and not (
                is_sharded(tensor) or is_wrapper(tensor)
            )
            if is_average and (value.dtype, value.device) == place:
                tensor.data = value
                shared.add(name)
            elif name in self._shared or (tensor.dtype, tensor.device) != place:
                # A write would go to the memory of a former average.
                tensor.data = value.to(source.device, source.dtype, copy=True)
            else:
                write(tensor, value)
        self._averages = averages
        self._shared = shared
