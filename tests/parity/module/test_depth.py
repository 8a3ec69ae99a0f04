import copy
import functools
import sys
import threading

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation
from tests.models import chain


# Half of Python's default, at which the same search takes a quarter of the time.
RECURSION_LIMIT = 500
DEEPEST_TRIED = 600
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


def call_with_hooks(module: torch.nn.Module) -> torch.Tensor:
    """Call the chain with a hook of two kinds on every module."""
    node = module
    while True:
        node.register_forward_pre_hook(lambda *_: None)
        node.register_forward_hook(lambda *_: None)
        if "n" not in node._modules:
            return module(torch.ones(1))
        node = node._modules["n"]


OPERATIONS = {
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: list(m.named_parameters()),
    "buffers": lambda m: list(m.buffers()),
    "modules": lambda m: list(m.modules()),
    "named_modules": lambda m: list(m.named_modules(remove_duplicate=False)),
    "apply": lambda m: m.apply(lambda each: None),
    "train": lambda m: m.train(),
    "eval": lambda m: m.eval(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to("cpu", torch.float64),
    "to_empty": lambda m: m.to_empty(device="meta"),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "zero_grad": lambda m: m.zero_grad(),
    "share_memory": lambda m: m.share_memory(),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(checkpoint(m)),
    "load_assign": lambda m: m.load_state_dict(checkpoint(m), assign=True),
    "call": lambda m: m(torch.ones(1)),
    "call with hooks": call_with_hooks,
    "repr": repr,
    "get_submodule": lambda m: m.get_submodule(bottom(m)),
    "deepcopy": copy.deepcopy,
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

    assert depth >= 75
    assert survives(MODKIT, operation, depth)


@for_each("operation", ["named_parameters", "state_dict", "repr", "float", "train"])
def test_three_hundred_levels(impl: Implementation, operation: str) -> None:
    """The operations of a training loop work on three hundred levels under Python's default limit."""
    assert survives(impl, operation, 300, limit=1000)


def test_the_results_at_depth_are_equal(impl: Implementation) -> None:
    """Names, state and modes of a deep tree are complete."""
    module = chain(impl, 200)
    path = bottom(module)
    module.eval()

    assert [name for name, _ in module.named_parameters()] == [f"{path}.weight"]
    assert list(module.state_dict()) == [f"{path}.weight"]
    assert len(list(module.modules())) == 200
    assert not any(each.training for each in module.modules())
    assert module.get_submodule(path).weight is module.get_parameter(f"{path}.weight")
