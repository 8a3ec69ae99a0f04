import pytest
from hypothesis import given

from tests.property import operations as operations_on_modules, vocabulary
from tests.property.operations import OPERATIONS, drawn, sequences
from tests.property.sides import lockstep
from tests.property.trees import trees


pytestmark = pytest.mark.property

HOOKED = [
    "add_hooks",
    "add_hooks",
    "remove_hook",
    "call",
    "state_dict",
    "load_state_dict",
    "copied",
]
STATE = ["state_dict", "load_state_dict", "load_something_else", "load_from_another_tree"]
REGISTRATION = sorted(
    kind
    for kind, entry in OPERATIONS.items()
    if entry.function.__module__ == operations_on_modules.__name__
)


@given(trees().strategy(), sequences(vocabulary.drawn(), 8, 14))
def test_random_operations_in_lockstep(spec, operations) -> None:
    """Any sequence of public operations leaves torch's and modkit's trees equal after every step."""
    lockstep(spec, operations)


@given(trees().strategy(), sequences(drawn(HOOKED), 8, 14))
def test_hooks_in_lockstep(spec, operations) -> None:
    """Hooks added, removed, copied and run give the same calls, values and gradients."""
    lockstep(spec, operations)


@given(trees().strategy(), sequences(drawn([*STATE, "add_hooks", "tie", "share"]), 4, 8))
def test_states_in_lockstep(spec, operations) -> None:
    """Saving and loading, strict or not, complete or edited, have equal outcomes."""
    lockstep(spec, operations)


@given(trees().strategy(), sequences(drawn([*REGISTRATION, "walk", "find", "call"]), 8, 16))
def test_registration_in_lockstep(spec, operations) -> None:
    """Registering, assigning, sharing, deleting and reading members have equal outcomes."""
    lockstep(spec, operations)
