import sys
import threading

import pytest
import torch

from tests.helpers import MODKIT
from tests.models import chain


# Far below the depth of the tree: torch, which recurses, ends in a RecursionError.
RECURSION_LIMIT = 330
DEPTH = 1000


CHECKPOINT = {"n." * (DEPTH - 1) + "weight": torch.ones(1)}
OPERATIONS = {
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: list(m.named_parameters()),
    "modules": lambda m: list(m.modules()),
    "named_modules": lambda m: list(m.named_modules(remove_duplicate=False)),
    "apply": lambda m: m.apply(lambda each: None),
    "float": lambda m: m.float(),
    "to": lambda m: m.to("cpu", torch.float64),
    "load_state_dict": lambda m: m.load_state_dict(CHECKPOINT),
    "load_assign": lambda m: m.load_state_dict(CHECKPOINT, assign=True),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_modules_go_deeper_than_the_recursion_limit(operation: str) -> None:
    """Walking, converting and loading do not recurse."""
    module = chain(MODKIT, DEPTH)
    raised: list[BaseException] = []

    def target() -> None:
        try:
            OPERATIONS[operation](module)
        except BaseException as error:
            raised.append(error)

    # A thread begins with an empty stack.
    thread = threading.Thread(target=target)
    default = sys.getrecursionlimit()
    sys.setrecursionlimit(RECURSION_LIMIT)
    try:
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(default)
    # From the top, since a chain would be destroyed recursively.
    while module is not None:
        module = module._modules.pop("n", None)

    assert raised == []
