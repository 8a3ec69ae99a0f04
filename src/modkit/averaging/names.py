"""Names of tensors: canonical names, names with one more prefix, and the check that names match."""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from modkit.errors import NameMismatchError


# The parts of a name that ``torch.compile``, FSDP, activation checkpointing and Fabric add.
_WRAPPERS: Final = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)


def canonical_name(name: str) -> str:
    """Return a tensor's name without the parts that compilers and distributed wrappers add.

    Args:
        name: Dotted name of a parameter or buffer.

    Returns:
        The name in the unwrapped model.

    Example:
        >>> canonical_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its canonical name.

    Args:
        names: Names of tensors in one model.

    Returns:
        The canonical names, or the names themselves if two of those would be equal.
    """
    # They collide where a user's model has a child that is called ``module``.
    canonical = {name: canonical_name(name) for name in names}
    is_unique = len(set(canonical.values())) == len(canonical)
    return canonical if is_unique else {name: name for name in canonical}


def _prefix_between(longer: set[str], shorter: set[str]) -> str:
    """Return the prefix, such as ``"net."``, that turns the shorter names into the longer.

    It is empty unless one prefix does that for all names.
    """
    if not longer or not shorter:
        return ""
    # A common prefix leaves the alphabetical order as it is, so the first names are a pair.
    prefix = min(longer).removesuffix(min(shorter))
    fits = prefix.endswith(".") and longer == {prefix + name for name in shorter}
    return prefix if fits else ""


def names_like(mine: set[str], names: dict[str, str], theirs: set[str]) -> dict[str, str]:
    """Return the names of a model without, or with, the prefix by which its parameters differ.

    Args:
        mine: Names of the model's parameters.
        names: The names to adapt: all names of the model, by key.
        theirs: Names of the parameters of the other model, whose prefix is taken.

    Returns:
        The adapted names by key, or ``names`` if the parameters do not differ by one prefix.

    Example:
        >>> names_like({"net.weight"}, {"net.weight": "net.weight"}, {"weight"})
        {'net.weight': 'weight'}
    """
    surplus = _prefix_between(mine, theirs)
    lacking = _prefix_between(theirs, mine)
    renamed = {key: lacking + name.removeprefix(surplus) for key, name in names.items()}
    # They collide where a wrapper has a buffer of the name of one of its network.
    return renamed if len(set(renamed.values())) == len(names) else names


def check_match(
    problem: str,
    expected: Mapping[str, torch.Size | None],
    actual: Mapping[str, torch.Size | None],
    *,
    end: str = "Nothing has been changed.",
) -> None:
    """Compare names and shapes.

    Args:
        problem: What was done or does not fit, with which the error begins.
        expected: Shapes by name; None stands for any shape.
        actual: Shapes by name; None stands for any shape.
        end: Last sentence of the error; empty where nothing could have been changed.

    Raises:
        NameMismatchError: If they differ. It lists the names that are missing, unexpected, or of
            another shape.
    """
    missing = [name for name in expected if name not in actual]
    unexpected = [name for name in actual if name not in expected]

    shapes: list[str] = []
    for name, expected_shape in expected.items():
        shape = actual.get(name)
        if expected_shape is not None and shape is not None and shape != expected_shape:
            shapes.append(f"{name} ({tuple(shape)} instead of {tuple(expected_shape)})")

    if missing or unexpected or shapes:
        raise NameMismatchError(
            problem, missing=missing, unexpected=unexpected, shapes=shapes, end=end
        )


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of named tensors."""
    return {name: tensor.shape for name, tensor in tensors.items()}
