import gc

import pytest
from hypothesis import HealthCheck, given, settings

from tests.property import operations as operations_on_modules, vocabulary
from tests.property.operations import OPERATIONS, Operation, drawn, sequences
from tests.property.scoped_calls import SCOPED
from tests.property.sides import lockstep
from tests.property.trees import Member, ModuleSpec, trees


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


@pytest.mark.property
@given(trees().strategy(), sequences(vocabulary.drawn(), 8, 14))
def test_random_operations_in_lockstep(spec, operations) -> None:
    """Any sequence of public operations leaves torch's and modkit's trees equal after every step."""
    lockstep(spec, operations)


@pytest.mark.property
@given(trees().strategy(), sequences(drawn(HOOKED), 8, 14))
def test_hooks_in_lockstep(spec, operations) -> None:
    """Hooks added, removed, copied and run give the same calls, values and gradients."""
    lockstep(spec, operations)


@pytest.mark.property
@given(trees().strategy(), sequences(drawn([*STATE, "add_hooks", "tie", "share"]), 4, 8))
def test_states_in_lockstep(spec, operations) -> None:
    """Saving and loading, strict or not, complete or edited, have equal outcomes."""
    lockstep(spec, operations)


@pytest.mark.property
@given(trees().strategy(), sequences(drawn([*REGISTRATION, "walk", "find", "call"]), 8, 16))
def test_registration_in_lockstep(spec, operations) -> None:
    """Registering, assigning, sharing, deleting and reading members have equal outcomes."""
    lockstep(spec, operations)


# --- every session -----------------------------------------------------------------------------------


@settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(trees().strategy(), sequences(vocabulary.drawn(), 8, 14))
def test_a_few_random_sequences_in_lockstep(spec, operations) -> None:
    """40 fixed sequences of operations leave both trees equal after every step."""
    lockstep(spec, operations)


@pytest.mark.parametrize(
    ("spec", "operations"),
    [
        (
            ModuleSpec(
                "Node",
                members=(Member("child", "m", ModuleSpec("BatchNorm1d")), Member("shared", "a", 0)),
            ),
            [("load_state_dict", 0, (False, True, False, False, [("parameter", 2)]))],
        )
    ],
    ids=["parameter assigned to the buffer of a shared module"],
)
def test_sequences_that_once_differed(spec, operations) -> None:
    """Sequences that differed in a longer search leave both trees equal."""
    lockstep(spec, [Operation(*operation) for operation in operations])


def test_compiled_and_traced_calls_in_lockstep() -> None:
    """A tree is compiled and traced on both sides, without an exception and to one graph."""
    layers = (Member("child", "m", ModuleSpec("Linear")), Member("child", "a", ModuleSpec("Tanh")))
    operations = [Operation("compile_in_place", 0, (1,)), Operation("trace_module", 0, ())]
    run = lockstep(ModuleSpec("Node", members=layers), operations)
    (_, (_, parts)), _, _ = run.sides[1].run(Operation("call_compiled", 0, (1, True)))
    (_, results), (_, codes) = parts

    assert run.kinds == [operation.kind for operation in operations]
    assert results[0][0] == "tuple"
    assert len(codes) == 1


def test_lockstep_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that differs on modkit is reported by name."""

    def broken(side, module) -> str:
        return side.impl.name

    monkeypatch.setitem(OPERATIONS, "evaluate", type(OPERATIONS["evaluate"])(broken, ()))
    spec = ModuleSpec("Node", members=(Member("plain", "a", 3),))
    with pytest.raises(AssertionError, match=r"differ after .*evaluate"):
        lockstep(spec, [Operation("evaluate", 0, ())])


def test_lockstep_sees_a_change_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that is visible only in the tree is reported too."""

    def broken(side, module) -> None:
        module.training = side.impl.name == "torch"

    monkeypatch.setitem(OPERATIONS, "evaluate", type(OPERATIONS["evaluate"])(broken, ()))
    with pytest.raises(AssertionError, match="differ after"):
        lockstep(ModuleSpec("Node"), [Operation("evaluate", 0, ())])


def test_the_collector_rests_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """When Python frees modules in reference cycles does not depend on what ran before."""
    seen = []
    entry = type(OPERATIONS["evaluate"])(lambda side, module: seen.append(gc.isenabled()), ())
    monkeypatch.setitem(OPERATIONS, "evaluate", entry)
    lockstep(ModuleSpec("Node"), [Operation("evaluate", 0, ())])

    assert seen == [False, False]
    assert gc.isenabled()


@pytest.mark.parametrize("module", vocabulary.FILES, ids=lambda file: file.__name__.split(".")[-1])
def test_all_operations_are_drawn(module) -> None:
    """Every file of operations adds some to the tables that sequences are drawn from."""
    kinds = [*OPERATIONS.values(), *SCOPED.values()]
    entered = [kind for kind in kinds if kind.function.__module__ == module.__name__]

    assert len(entered) >= 3
