import torch

from tests.cases import for_each
from tests.helpers import same
from tests.parity.module.contents import where
from tests.parity.module.kinds import OLD, REGISTER, VALUES, host


def attempt(module: torch.nn.Module, action: object) -> list[object]:
    """Run the action and tell what it returned or raised, and where ``x`` stands then."""
    try:
        returned = ("returned", action())
    except Exception as error:
        returned = ("raised", type(error).__name__, str(error))
    return [returned, where(module, "x"), list(module.state_dict()), vars(module).get("got")]


@for_each("new", VALUES)
@for_each("old", OLD)
def test_assignment_of_every_kind_onto_every_kind(old, new):
    """Assigning a value over an existing name lands, or is refused, as in torch."""

    def scenario(impl):
        module = host(impl, old)
        value = VALUES[new](impl)
        return attempt(module, lambda: setattr(module, "x", value))

    assert same(scenario)[0] == "returned"


@for_each("call", REGISTER)
@for_each("old", OLD)
def test_registration_of_every_kind_onto_every_kind(old, call):
    """Registering over an existing name lands, or is refused, as in torch."""

    def scenario(impl):
        module = host(impl, old)
        return attempt(module, lambda: REGISTER[call](module, impl))

    assert same(scenario)[0] == "returned"


@for_each("old", OLD)
def test_deletion_of_every_kind(old):
    """Deleting a name removes it from its registry, or fails, as in torch."""

    def scenario(impl):
        module = host(impl, old)
        first = attempt(module, lambda: delattr(module, "x"))
        second = attempt(module, lambda: delattr(module, "x"))
        return [first, second, hasattr(module, "x")]

    assert same(scenario)[0] == "returned"
