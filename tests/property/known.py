"""Listed differences, matched exactly: one row, one pair of outcomes."""

from collections.abc import Callable
from typing import Any, Final

from modkit._messages import MSG_CYCLE
from tests.property.operations import Operation


Outcome = tuple[Any, ...]
Match = Callable[[Operation, Any, Any, Outcome, Outcome], bool]


def contains_itself(
    operation: Operation, torch_side: Any, modkit_side: Any, theirs: Outcome, ours: Outcome
) -> bool:
    """Torch exceeds Python's recursion limit, and modkit names a module of the tree."""
    names = {type(module).__name__ for module in torch_side.model.modules()}
    expected = {("raised", "RecursionError", MSG_CYCLE.format(name=name)) for name in names}
    return (
        operation.kind == "in_cycle"
        and theirs[0] == ("raised", "RecursionError", "maximum recursion depth exceeded")
        and ours[0] in expected
        and theirs[1:] == ours[1:]
    )


def unhashable(
    operation: Operation, torch_side: Any, modkit_side: Any, theirs: Outcome, ours: Outcome
) -> bool:
    """Modkit compares modules by identity; torch raises, or treats two equal modules as one."""
    if operation.kind != "among_data_classes":
        return False
    kind, width, method, _ = operation.arguments
    if method == "children":
        return False  # torch's own
    if kind == "eq":
        refused = theirs[0] == ("raised", "TypeError", "unhashable type: 'Data'")
    else:
        refused = kind == "hash" and width == 1
    by_identity = Operation(operation.kind, operation.target, (kind, width, method, True))
    return refused and torch_side.run(by_identity) == ours


# By row of the table of differences: whether it explains a pair of outcomes of an operation.
ROWS: Final[dict[str, Match]] = {
    "tests/parity/fixes/test_cycles.py::test_a_cycle_is_an_error_that_names_the_module": (
        contains_itself
    ),
    "tests/parity/fixes/test_hashing.py::test_modules_that_cannot_be_hashed_are_walked": unhashable,
}


def explain(
    operation: Operation, torch_side: Any, modkit_side: Any, theirs: Outcome, ours: Outcome
) -> str | None:
    """Return the row that says why the outcomes of an operation differ, or None."""
    for row, matches in ROWS.items():
        if matches(operation, torch_side, modkit_side, theirs, ours):
            return row
    return None
