"""All operations on trees, and how often a sequence of the long run draws each."""

from typing import Final

from tests.property import (
    average_operations,
    changing_operations,
    choices,
    global_operations,
    object_operations,
    operations,
    scoped_operations,
    state_operations,
    tree_operations,
)
from tests.property.operations import FAVOURED, OPERATIONS, Operation, of_kind
from tests.property.scoped_calls import SCOPED


FILES: Final = (
    average_operations,
    changing_operations,
    global_operations,
    object_operations,
    operations,
    scoped_operations,
    state_operations,
    tree_operations,
)
# Operations of the sequences inside `fast_inference` that make sense on any tree.
SHARED: Final = (
    "call_functionally",
    "change_class",
    "change_container",
    "change_during_call",
    "change_weight",
    "copy_and_call",
    "enter_average",
    "hook_during_call",
    "hook_tables",
    "leave_average",
    "make_average",
    "shallow_copy",
    "step_optimizer",
    "trace_with_fx",
    "use_average",
    "write_tensor",
)
OPERATIONS.update({kind: SCOPED[kind] for kind in SHARED})
RARE: Final = {"share_memory", "trace_with_fx", "is_freed", "save_file"}


def drawn() -> choices.Choice[Operation]:
    """Draw an operation of any kind."""
    kinds = [kind for kind in sorted(OPERATIONS) for _ in range(1 if kind in RARE else 3)]
    return choices.one_of(*map(of_kind, [*kinds, *FAVOURED * 3, *["leave_average"] * 3]))
