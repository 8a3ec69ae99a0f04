"""Keeping a step with infinite or undefined weights out of an average."""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from modkit._upstream import foreach_norm


OnNonfinite: TypeAlias = Literal["ignore", "skip", "raise"]


def all_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return whether all values are finite, as a tensor on ``device``: nothing waits for it."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.dtype.itemsize == 1:
            # No norm exists in 8 bits.
            real = real.float()
        if real.numel():
            groups.setdefault((real.device, real.dtype), []).append(real)
    # The largest absolute value is undefined if any value is.
    largest = [
        norm.to(device) for group in groups.values() for norm in foreach_norm(group, math.inf)
    ]
    if not largest:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.stack([norm.to(torch.float64) for norm in largest]).isfinite().all()


def first_nonfinite(tensors: Sequence[tuple[str, Tensor]]) -> str | None:
    """Return the first name whose values are not all finite; this waits for the device."""
    for name, tensor in tensors:
        wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
        if not bool(wide.isfinite().all()):
            return name
    return None
