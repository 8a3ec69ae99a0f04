"""Write docs/lockstep.md, the account of the last long lockstep run, from docs/lockstep.json.

python docs/render_lockstep.py

`nox -s lockstep` runs the operations and then this.
"""

import json
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "lockstep.md"
FOUND = ROOT / "docs" / "lockstep.json"
# What runs have found in modkit, and the test that each was fixed with.
CONTRACT = "tests/parity/module/test_override_contract.py::"
FIXED = {
    "`train()` set the mode past a `__setattr__` of a class behind `Module`": CONTRACT
    + "test_a_class_behind_module_sees_the_mode_being_set",
    "`load_state_dict(assign=True)` did not look names up, as a `__getattr__` of the class sees": (
        CONTRACT + "test_a_getattr_of_a_class_hears_of_assigned_parameters"
    ),
    "`load_state_dict(assign=True)` left a plain attribute of a parameter's name in place": CONTRACT
    + "test_an_assigned_parameter_replaces_a_plain_attribute",
    "Inside `fast_inference`, a deep copy of a parametrized layer kept the block's entries": (
        "tests/parity/fast_inference/test_scope.py"
        "::test_deep_copies_of_parametrized_layers_are_plain"
    ),
    "`set_submodule(strict=True)` looked the name up once less": CONTRACT
    + "test_a_getattr_of_a_class_hears_of_a_replaced_submodule",
}
TEXT = """<!-- from docs/lockstep.json, by docs/render_lockstep.py -->

# Lockstep runs

Random operations run on a tree of torch and on an equal one of modkit. After each one the result or the error, the
warnings, the calls of hooks and overrides, and the structure and values of the trees are compared, bit by bit. After
every tenth, and at the end, so is everything else that can be seen of the trees.

**{operations:,} operations in {sequences:,} sequences: {differences} unlisted differences.** {date}, torch {torch},
Python {python}; commits and seeds: {commits}. `nox -s lockstep` runs 2,000,000
operations; the seed of a sequence decides its tree and its operations.

What is drawn:

- trees of layers, containers, lazy layers and {classes} user classes: torch's layers and mixins before and behind
  modkit's `Module`, `ABC`, `Generic`, `Protocol`, dataclasses, and overrides of the protocol's methods;
- members registered, assigned, tied, shared, replaced and deleted, under odd names too; containers changed;
- calls with hooks of every kind, in torch's modes, functional, failing and traced by fx; optimizer steps;
- states saved, edited and loaded; conversions, shared memory; copies and pickles of trees and pieces;
- any method of `torch.nn.Module` patched, before and after classes are defined; late `_call_impl`;
- global hooks that outlive operations, and global tables that are emptied or replaced;
- cycles, modules that compare equal or cannot be hashed, parametrizations, pruning;
- `AveragedModel` and `EMA`: updated, swapped in around other operations, saved and loaded;
- one sequence in ten inside `fast_inference`, against torch or modkit without it.

{kinds} kinds of operations ran. {skipped:,} more drew a combination that [a listed difference](parity.md) concerns, or
that does not apply to the module. Where a listed difference was drawn on purpose, torch and modkit must do exactly what
its row says:

| row | times |
|---|---|
{rows}

Differences that the runs found, each fixed with a test:

{fixed}
"""


def render() -> str:
    """Return the page."""
    found: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8"))
    table = found | {
        "differences": len(found["differences"]),
        "commits": ", ".join(
            "`{}` ({:,} to {:,})".format(commit, *seeds)
            for commit, seeds in found["commits"].items()
        ),
        "kinds": len(found["kinds"]),
        "rows": "\n".join(f"| `{row}` | {times:,} |" for row, times in found["rows"].items()),
        "fixed": "\n".join(f"- {what}: `{test}`" for what, test in FIXED.items()),
    }
    return TEXT.format(**table)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
