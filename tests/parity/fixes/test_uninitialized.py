import sys

import pytest
import torch

from tests.helpers import Implementation


def forgetful(impl: Implementation) -> torch.nn.Module:
    """Build a module whose class forgets to initialize its base."""

    class Forgetful(impl.Module):
        def __init__(self):
            self.factor = 3

        def forward(self, value):
            return value * self.factor

    return Forgetful()


USES = {
    "to": lambda module: module.to("cpu"),
    "float": lambda module: module.float(),
    "load_state_dict": lambda module: module.load_state_dict({}),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
@pytest.mark.parametrize("below", [False, True], ids=["root", "child"])
@pytest.mark.parametrize("use", USES)
def test_using_a_module_without_state_says_what_was_forgotten(
    impl: Implementation, use: str, below: bool
) -> None:
    """The error of a method has one note that names the class and the missing line."""
    module = forgetful(impl)
    if below:
        parent = impl.Module()
        parent.add_module("child", module)
        module = parent
    with pytest.raises(AttributeError) as caught:
        USES[use](module)
    (note,) = getattr(caught.value, "__notes__", [""])

    assert "Forgetful.__init__() must call super().__init__()" in note


def test_an_attribute_error_in_forward_has_no_note(impl: Implementation) -> None:
    """A module that was initialized is not suspected, whatever it lacks."""

    class Lacking(impl.Module):
        def forward(self, value):
            return value * self.factor

    with pytest.raises(
        AttributeError, match="'Lacking' object has no attribute 'factor'"
    ) as caught:
        Lacking()(torch.ones(1))

    assert not hasattr(caught.value, "__notes__")
