"""The largest difference of two tensors: absolute, relative, and where one is NaN or infinite."""

from typing import Final, NamedTuple

import torch
from torch import Tensor


# Elements that are compared at a time, in 64 bits: the memory beside the two tensors.
_CHUNK: Final = 1 << 18
_SIGN_BIT: Final = -(1 << 63)
# That of 1 and -1.
_LARGEST_RELATIVE: Final = 2.0


class Difference(NamedTuple):
    """How much two tensors of one shape differ.

    Attributes:
        absolute: The largest difference of two finite elements; exact for integers and bools.
        relative: The largest difference of two finite elements, relative to the larger one: 0 to 2.
        nonfinite: The number of elements that are NaN or infinite in one tensor, and not the same
            in the other.
    """

    absolute: float = 0
    relative: float = 0.0
    nonfinite: int = 0


def is_inexact(dtype: torch.dtype) -> bool:
    """Return True for floating-point and complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def largest_difference(a: Tensor, b: Tensor) -> Difference:
    """Return how much two tensors differ, computed in 64 bits, piece by piece.

    Args:
        a: A tensor on the CPU.
        b: A tensor of the same shape on the CPU, of any dtype.

    Returns:
        The largest differences. NaN is equal to NaN, and 0 to -0.

    Raises:
        NotImplementedError: If torch does not convert a dtype, such as one of packed bits.
    """
    pieces = zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True)
    differences = [_difference_of_pieces(piece_a, piece_b) for piece_a, piece_b in pieces]
    return Difference(
        absolute=max(difference.absolute for difference in differences),
        relative=max(difference.relative for difference in differences),
        nonfinite=sum(difference.nonfinite for difference in differences),
    )


def _difference_of_pieces(a: Tensor, b: Tensor) -> Difference:
    # Most pieces are bitwise equal. Bytes can be compared in all dtypes, also of packed bits.
    if a.dtype == b.dtype and torch.equal(_bytes_of(a), _bytes_of(b)):
        return Difference()

    # Elements of fewer bits are converted exactly, and their differences do not overflow.
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    wide_a, wide_b = a.to(wide), b.to(wide)
    are_finite = wide_a.isfinite() & wide_b.isfinite()
    nonfinite = int((~are_finite & ~_are_same(wide_a, wide_b)).sum())
    wide_a, wide_b = wide_a[are_finite], wide_b[are_finite]
    if not len(wide_a):
        return Difference(nonfinite=nonfinite)

    distances = (wide_a - wide_b).abs()
    ratios = distances / torch.maximum(wide_a.abs(), wide_b.abs())
    # Where a distance overflows 64 bits, its ratio is infinite or NaN.
    ratios = ratios.nan_to_num(nan=_LARGEST_RELATIVE).clamp(max=_LARGEST_RELATIVE)
    # That of two zeros is NaN.
    ratios[distances == 0] = 0

    # The largest float in place of infinity, for which JSON has no number.
    absolute: float = distances.max().nan_to_num().item()
    # No type has all integers with and without a sign.
    has_common_type = (a.dtype == torch.uint64) == (b.dtype == torch.uint64)
    if has_common_type and not (is_inexact(a.dtype) or is_inexact(b.dtype)):
        absolute = _integer_difference(a, b)
    return Difference(absolute, ratios.max().item(), nonfinite)


def _bytes_of(tensor: Tensor) -> Tensor:
    # Torch does not view tensors as bytes whose conjugation or negation is still to be computed. Of
    # a single element of a column, it takes the step for that of bytes.
    return tensor.resolve_conj().resolve_neg().contiguous().unsqueeze(-1).view(torch.uint8)


def _are_same(a: Tensor, b: Tensor) -> Tensor:
    """Return where elements are equal, or NaN in both."""
    if a.is_complex():
        return _are_same(a.real, b.real) & _are_same(a.imag, b.imag)
    return (a == b) | (a.isnan() & b.isnan())


def _integer_difference(a: Tensor, b: Tensor) -> int:
    """Return the largest difference of integers; that of int64 may need 64 bits without a sign."""
    signed_a, signed_b = _signed(a), _signed(b)
    distances = torch.maximum(signed_a, signed_b) - torch.minimum(signed_a, signed_b)
    # They have wrapped around: read as integers without a sign, they are right.
    return int((distances ^ _SIGN_BIT).max()) - _SIGN_BIT


def _signed(tensor: Tensor) -> Tensor:
    """Return integers of 64 bits that have the order and the distances of those of a tensor."""
    if tensor.dtype == torch.uint64:
        # Read as int64 with its highest bit flipped, each number is less by 2**63.
        return tensor.view(torch.int64) ^ _SIGN_BIT
    return tensor.to(torch.int64)
