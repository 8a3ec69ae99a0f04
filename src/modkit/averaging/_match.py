"""Which tensors of an average belong to which tensors of the model."""

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def averaged_tensors(module: torch.nn.Module, *, use_buffers: bool) -> Iterator[Tensor]:
    """Yield the tensors that take part in an average: the parameters, and the buffers on request.

    Args:
        module: The model, or the averaged copy of it.
        use_buffers: Whether the buffers follow the parameters.

    Returns:
        An iterator; a tensor that several names share comes once.
    """
    if use_buffers:
        return itertools.chain(module.parameters(), module.buffers())
    return module.parameters()


def pair_by_position(
    averaged: Iterable[Tensor], current: Iterable[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Pair two sequences of tensors by position, with the values on the device of the average.

    The longer of the two is cut, which is what torch does.

    Args:
        averaged: Tensors of the average.
        current: Tensors of the model, in the same order.

    Returns:
        Two lists of one length. The first holds aliases of the average outside of autograd, ready
        to be written; the second holds the model's values on the same devices.
    """
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for target, source in zip(averaged, current, strict=False):
        targets.append(target.detach())
        sources.append(source.detach().to(target.device))
    return targets, sources
