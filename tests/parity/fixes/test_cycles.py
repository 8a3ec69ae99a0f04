import pytest
import torch

from tests.capabilities import MODULES_CAN_REPEAT
from tests.cases import for_each
from tests.helpers import Implementation
from tests.models import tree
from tests.parity.module.contents import run


OPERATIONS = (
    "m.float()",
    "m.to('meta')",
    "m.apply(lambda module: None)",
    "m.load_state_dict({}, strict=False)",
    "list(m.named_modules(remove_duplicate=False))",
    *(["list(m.modules(remove_duplicate=False))"] if MODULES_CAN_REPEAT else []),
    "list(m.named_parameters(remove_duplicate=False))",
)


@pytest.mark.parametrize("call", OPERATIONS)
@pytest.mark.parametrize("place", ["below", "itself"])
def test_a_cycle_is_an_error_that_names_the_module(
    impl: Implementation, place: str, call: str
) -> None:
    """A walk over every path raises at once and names the module that contains itself."""
    module = tree(impl)
    cycle = module.left if place == "below" else module
    (module.left.inner if place == "below" else module).back = cycle
    with pytest.raises(RecursionError) as caught:
        run(call, module)

    name = type(cycle).__name__
    message = f"maximum recursion depth exceeded: the module {name} contains itself"
    assert str(caught.value) == message


@for_each("call", OPERATIONS)
def test_a_shared_module_is_no_cycle(impl: Implementation, call: str) -> None:
    """A module in many places, on many levels, is visited on every path."""
    module = tree(impl)
    module.left.other = module.left.inner.other = module.again
    module.outer = impl.Module()
    module.outer.left = module.left

    assert run(call, module) is not None
    assert torch.is_tensor(module.again.mean)
