import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.divergences import DIVERGENCES
from tests.property import long_run, operations as operations_on_modules, vocabulary
from tests.property.operations import OPERATIONS, Operation, drawn, sequences
from tests.property.sides import ROWS, lockstep
from tests.property.trees import NODES, Member, ModuleSpec, trees


STATE = ["state_dict", "load_state_dict", "load_something_else", "load_from_another_tree"]
REGISTRATION = sorted(
    kind
    for kind, entry in OPERATIONS.items()
    if entry.function.__module__ == operations_on_modules.__name__
)
# Any operations, and some of which a sequence has more.
KINDS = {
    "any": vocabulary.drawn(),
    "hooks": drawn([*["add_hooks"] * 2, "remove_hook", "call", *STATE[:2], "copied"]),
    "states": drawn([*STATE, "add_hooks", "tie", "share"]),
    "registration": drawn([*REGISTRATION, "walk", "find", "call"]),
}


@pytest.mark.property
@pytest.mark.parametrize("kinds", KINDS)
@given(trees().strategy(), st.data())
def test_random_operations_in_lockstep(kinds, spec, data) -> None:
    """Any sequence of public operations leaves torch's and modkit's trees equal after every step."""
    least, most = (4, 8) if kinds == "states" else (8, 14)
    lockstep(spec, data.draw(sequences(KINDS[kinds], least, most)))


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


def test_a_few_sequences_of_the_long_run() -> None:
    """12 sequences, of trees outside and inside `fast_inference`, show no difference."""
    found = long_run.portion(0, 12)

    assert found["differences"] == []
    assert sum(found["kinds"].values()) > 150


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


def test_rows_stand_in_the_table() -> None:
    """A difference is only explained by a row of the table of differences."""
    assert {*ROWS} <= {*DIVERGENCES}
    assert len(NODES) > 80
