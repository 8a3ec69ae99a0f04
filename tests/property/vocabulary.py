"""All operations on trees, and their weights in sequences of the long run."""

from collections.abc import Iterable
from typing import Final

from tests.property import (
    choices,
    global_operations,
    object_operations,
    operations,
    scoped_operations,
    tree_operations,
)
from tests.property.operations import FAVOURED, OPERATIONS, Kind, Operation, of_kind
from tests.property.scoped_calls import SCOPED


FILES: Final = (
    global_operations,
    object_operations,
    operations,
    scoped_operations,
    tree_operations,
)
# Operations of the sequences inside `fast_inference` that apply to any tree.
SHARED: Final = (
    "call_functionally",
    "call_in_mode",
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
    "trace_with_jit",
    "use_average",
    "write_tensor",
)
OPERATIONS.update({kind: SCOPED[kind] for kind in SHARED})
# Those that take long.
RARE: Final = {
    *("copy_and_call", "in_cycle", "is_freed", "make_averaged_model", "trace_module"),
    *("trace_with_fx", "trace_with_jit", "differentiate_functionally"),
}
# Those that take longer still.
RAREST: Final = {"call_compiled", "compile_in_place"}
# Some kernels leave memory uninitialized where an argument is on the meta device.
NOT_IN_SCOPES: Final = {"to_meta"}
CALLS: Final = (
    *("call", "call_in_mode", "call_in_mode", "call_in_mode", "call_patched"),
    *("call_with_global_hooks", "failing_call"),
)
SCOPES: Final = ("enter_scope", "enter_scope", "enter_scope", "leave_scope")


def weight(kind: str) -> int:
    """Return how often a kind is entered into the list that is drawn from."""
    if kind in RAREST:
        return 1
    return 2 if kind in RARE else 6


def weighted(kinds: Iterable[str]) -> list[str]:
    """Add kinds as often as their weight says."""
    return [kind for kind in sorted(kinds) for _ in range(weight(kind))]


def drawn() -> choices.Choice[Operation]:
    """Draw an operation of any kind."""
    kinds = [*weighted(OPERATIONS), *FAVOURED * 6, *["leave_average"] * 6]
    return choices.one_of(*map(of_kind, kinds))


def drawn_in_scopes(table: dict[str, Kind]) -> choices.Choice[Operation]:
    """Draw an operation for a sequence inside `fast_inference`."""
    kinds = [*weighted({*table} - NOT_IN_SCOPES), *CALLS * 8, *SCOPES * 4]
    return choices.one_of(*(of_kind(kind, table) for kind in kinds))
