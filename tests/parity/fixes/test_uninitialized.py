import sys

import pytest
import torch

from tests.helpers import TORCH, Implementation, outcome


def forgetful(impl: Implementation) -> torch.nn.Module:
    """Build a module whose class forgets to initialize its base."""

    class Forgetful(impl.Module):
        def __init__(self):
            self.factor = 3

        def forward(self, value):
            return value * self.factor

    return Forgetful()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_calling_a_module_without_state_says_what_was_forgotten(impl: Implementation) -> None:
    """The error of the first call has a note that names the class and the missing line."""
    with pytest.raises(AttributeError) as caught:
        forgetful(impl)(torch.ones(1))
    (note,) = getattr(caught.value, "__notes__", [""])

    assert "Forgetful.__init__() must call super().__init__()" in note


def test_the_error_itself_is_torchs(impl: Implementation) -> None:
    """Type and text of the error are the same with the note and without it."""

    def scenario(each):
        return forgetful(each)(torch.ones(1))

    assert outcome(scenario, impl) == outcome(scenario, TORCH)


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
