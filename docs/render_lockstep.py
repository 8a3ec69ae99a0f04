"""The section on random operations; `nox -s lockstep` runs them."""

from blocks import read


# Bugs of modkit that runs have found, and the test that each was fixed with.
CONTRACT = "tests/parity/module/test_override_contract.py::"
FIXED = {
    "`train()` bypassed a `__setattr__` of a class behind `Module`": CONTRACT
    + "test_a_class_behind_module_sees_the_mode_being_set",
    "`load_state_dict(assign=True)` did not look names up, as a `__getattr__` of the class sees": (
        CONTRACT + "test_a_getattr_of_a_class_hears_of_assigned_parameters"
    ),
    "`load_state_dict(assign=True)` left a plain attribute of a parameter's name in place": CONTRACT
    + "test_an_assigned_parameter_replaces_a_plain_attribute",
    "inside `fast_inference`, a deep copy of a parametrized layer kept the block's entries": (
        "tests/parity/fast_inference/test_scope.py"
        "::test_deep_copies_of_parametrized_layers_are_plain"
    ),
    "`set_submodule(strict=True)` looked the name up once less": CONTRACT
    + "test_a_getattr_of_a_class_hears_of_a_replaced_submodule",
}
TEXT = """\
## Random operations

Random operations run side by side on a tree of torch modules and on an equal tree of modkit modules. After each
operation the result or exception, the warnings, the calls of hooks and overrides, and the structure and values of
the trees are compared bitwise.

**{operations:,} operations in {sequences:,} sequences, {differences} unlisted differences** ({date}, torch {torch},
Python {python}; {commits}). `nox -s lockstep` runs 2,000,000 operations. A seed determines the tree and the
operations of a sequence.

The {kinds} kinds of operations cover members, calls with hooks of every kind, states, conversions, copies, pickles, patched
methods of `torch.nn.Module`, global hooks, parametrizations, optimizers, `AveragedModel`, `EMA` and `fast_inference`, on
trees with layers, containers, lazy layers and {classes} user classes. {skipped:,} more did not apply or concern a listed
difference. Where a listed difference was drawn on purpose, torch and modkit must do exactly what its row says: {rows}.

The runs found {fixed} bugs in modkit, each fixed with a test."""


def section() -> str:
    """Return the section in Markdown."""
    found = read("lockstep")
    commits = ", ".join(
        "commit `{}`, seeds {:,} to {:,}".format(commit, *seeds)
        for commit, seeds in found["commits"].items()
    )
    changed = {
        "differences": len(found["differences"]),
        "commits": commits,
        "kinds": len(found["kinds"]),
        "rows": ", ".join(
            f"`{row.rpartition('::')[2]}` ({times:,} times)" for row, times in found["rows"].items()
        ),
        "fixed": len(FIXED),
    }
    return TEXT.format(**{**found, **changed})


if __name__ == "__main__":
    from render import write_pages

    write_pages()
