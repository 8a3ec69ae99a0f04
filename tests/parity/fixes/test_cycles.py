import pytest
import torch

from tests.capabilities import MODULES_CAN_REPEAT
from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import tree
from tests.parity.module.contents import run


OPERATIONS = (
    "m.train()",
    "m.eval()",
    "m.float()",
    "m.to('meta')",
    "m.apply(lambda module: None)",
    "m.state_dict()",
    "m.load_state_dict({}, strict=False)",
    "list(m.named_modules(remove_duplicate=False))",
    *(["list(m.modules(remove_duplicate=False))"] if MODULES_CAN_REPEAT else []),
    "list(m.named_parameters(remove_duplicate=False))",
)


@pytest.mark.parametrize("call", OPERATIONS)
def test_a_cycle_is_an_error_that_names_the_module(impl: Implementation, call: str) -> None:
    """A walk over every path raises at once and names the module that contains itself."""
    module = tree(impl)
    module.left.inner.back = module.left
    with pytest.raises(RecursionError) as caught:
        run(call, module)

    message = "maximum recursion depth exceeded: the module Branch contains itself"
    assert str(caught.value) == message


@pytest.mark.parametrize("call", OPERATIONS)
def test_a_module_that_is_its_own_child_is_named(impl: Implementation, call: str) -> None:
    """The shortest cycle is found as well."""
    module = tree(impl)
    module.itself = module
    with pytest.raises(RecursionError, match="the module Tree contains itself"):
        run(call, module)

    assert module.itself is module


@for_each("call", OPERATIONS)
def test_a_shared_module_is_no_cycle(impl: Implementation, call: str) -> None:
    """A module in many places, on many levels, is visited on every path."""
    module = tree(impl)
    module.left.other = module.left.inner.other = module.again
    module.outer = impl.Module()
    module.outer.left = module.left

    assert run(call, module) is not None
    assert torch.is_tensor(module.again.mean)
