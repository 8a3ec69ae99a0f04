import functools
import sys
import threading

import pytest
import torch

from tests.helpers import MODKIT, TORCH, Implementation
from tests.models import chain


# A third of Python's default, at which the same search takes a ninth of the time.
RECURSION_LIMIT = 330
DEEPEST_TRIED = 400
# How far the depth that is found may be below torch's real limit.
TOLERANCE = 8


def bottom(module: torch.nn.Module) -> str:
    """Return the dotted path of the innermost module."""
    depth = 0
    while "n" in module._modules:
        module = module._modules["n"]
        depth += 1
    return ".".join(["n"] * depth)


def checkpoint(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a chain, without walking it recursively."""
    return {bottom(module) + ".weight": torch.ones(1)}


def save_with_extra_state(module: torch.nn.Module) -> None:
    """Save a chain whose class has extra state, so that it is not written as plain tensors."""
    type(module).get_extra_state = lambda self: 0
    module.state_dict()


OPERATIONS = {
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: list(m.named_parameters()),
    "modules": lambda m: list(m.modules()),
    "named_modules": lambda m: list(m.named_modules(remove_duplicate=False)),
    "apply": lambda m: m.apply(lambda each: None),
    "train": lambda m: m.train(),
    "float": lambda m: m.float(),
    "to": lambda m: m.to("cpu", torch.float64),
    "state_dict": lambda m: m.state_dict(),
    "extra_state": save_with_extra_state,
    "load_state_dict": lambda m: m.load_state_dict(checkpoint(m)),
    "load_assign": lambda m: m.load_state_dict(checkpoint(m), assign=True),
}


def survives(
    impl: Implementation, operation: str, depth: int, limit: int = RECURSION_LIMIT
) -> bool:
    """Return True if the operation ends without RecursionError, from an empty stack."""
    module = chain(impl, depth)
    raised: list[BaseException] = []

    def target() -> None:
        try:
            OPERATIONS[operation](module)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target)
    default = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(default)
    unravel(module)
    if raised and "maximum recursion depth exceeded" not in str(raised[0]):
        raise raised[0]
    return not raised


def unravel(module: torch.nn.Module) -> None:
    """Take a chain apart from the top, so that it is not destroyed recursively."""
    while module is not None:
        module = module._modules.pop("n", None)


@functools.cache
def deepest(operation: str) -> int:
    """Return about the greatest depth at which torch survives, up to a limit."""
    low, high = 50, DEEPEST_TRIED
    if survives(TORCH, operation, high):
        return high
    while high - low > TOLERANCE:
        middle = (low + high) // 2
        if survives(TORCH, operation, middle):
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize("operation", OPERATIONS)
def test_modkit_goes_as_deep_as_torch(operation: str) -> None:
    """Where torch manages a tree of some depth under a limit, so does modkit."""
    depth = deepest(operation)

    assert depth >= 50
    assert survives(MODKIT, operation, depth)
