"""Random operations on two equal trees, one plain and one inside `modkit.fast_inference`."""

import pytest
from hypothesis import HealthCheck, event, given, settings, strategies as st

from tests.helpers import MODKIT, TORCH
from tests.property import choices
from tests.property.operations import OPERATIONS, Operation, of_kind
from tests.property.scoped_sides import ScopedSide, lockstep
from tests.property.scoped_trees import Tree, trees
from tests.property.trees import ModuleSpec
from tests.property.vocabulary import CALLS, NOT_IN_SCOPES, SCOPES


MEMBERS = [
    "use_table",
    "use_table",
    "change_container",
    "change_container",
    "assign_layer",
    "assign_member",
    "delete_existing",
    "set_submodule",
    "share",
    "tie",
    "write_tensor",
    "load_in_place",
    "change_weight",
]
BEHAVIOUR = [
    "add_hooks",
    "remove_hook",
    "hook_tables",
    "set_attribute",
    "set_attribute",
    "delete_attribute",
    "train",
    "evaluate",
    "cast",
    "override_call",
    "change_class",
    "patch",
    "requires_grad_",
]
AVERAGES = ["make_average", "use_average", "use_average", "enter_average", "leave_average"]
# Without and inside scopes.
implementations = st.sampled_from([(TORCH, TORCH), (MODKIT, MODKIT), (TORCH, MODKIT)])


def drawn(kinds):
    """Draw an operation of one of the kinds."""
    return choices.one_of(*(of_kind(kind, ScopedSide.operations) for kind in kinds))


# Most sequences begin inside a scope of the root.
ENTERED = choices.sampled_from([[Operation("enter_scope", 0, ())]] * 3 + [[]])
ALL = [*sorted({*ScopedSide.operations} - NOT_IN_SCOPES), *CALLS * 2, *SCOPES, *MEMBERS, *BEHAVIOUR]


def sequences(kinds, least=8, most=14):
    """Draw a sequence of operations of these kinds."""
    rest = choices.lists(drawn(kinds), min_size=least, max_size=most)
    return choices.builds(lambda first, then: [*first, *then], ENTERED, rest).strategy()


def run(impl, tree, operations):
    """Run the operations in lockstep; the counts show in the statistics of Hypothesis."""
    both = lockstep(impl, tree, operations)
    event(f"refused: {both.refusals}")


@settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(implementations, trees().strategy(), sequences(ALL))
def test_a_few_random_sequences(impl, tree, operations) -> None:
    """200 fixed sequences of operations give equal results outside and inside scopes."""
    run(impl, tree, operations)


# Any operations, and some of which a sequence has more.
KINDS = {
    "any": ALL,
    "members": [*CALLS, *SCOPES, *MEMBERS],
    "behaviour": [*CALLS, *SCOPES, *BEHAVIOUR],
    "averages": [*CALLS, *SCOPES, *AVERAGES, "write_tensor"],
}


@pytest.mark.property
@pytest.mark.parametrize("kinds", KINDS)
@given(implementations, trees().strategy(), st.data())
def test_random_sequences(kinds, impl, tree, data) -> None:
    """Any sequence of operations is bitwise identical inside scopes, with equal errors and hook calls."""
    run(impl, tree, data.draw(sequences(KINDS[kinds])))


TREE = Tree(ModuleSpec("Sequential", children=(ModuleSpec("linear"), ModuleSpec("relu"))), (2, 3))
ENTER = Operation("enter_scope", 0, ())


def test_lockstep_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that differs inside a scope is reported by name."""

    def broken(side, module) -> bool:
        return bool(side.scopes) and side.fast

    kind = type(OPERATIONS["evaluate"])
    monkeypatch.setitem(ScopedSide.operations, "evaluate", kind(broken, ()))

    with pytest.raises(AssertionError, match=r"differ after .*evaluate"):
        lockstep((TORCH, TORCH), TREE, [ENTER, Operation("evaluate", 0, ())])
