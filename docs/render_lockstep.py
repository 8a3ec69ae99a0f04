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
    "a class made by `type()` had another `__module__` than the caller": CONTRACT
    + "test_a_class_made_by_a_call_belongs_to_the_caller",
    "loading did not call a patched `Module.__getattr__` for normalization layers": CONTRACT
    + "test_a_patched_getattr_hears_of_a_layer_being_loaded",
    "a key that is not a string was reported after a layer's own error": (
        "tests/parity/module/test_load_overrides.py"
        "::test_a_key_that_is_no_string_comes_before_a_layers_own_error"
    ),
    "keys of a child with a dot in its name were unexpected beside a child that is None": (
        "tests/parity/module/test_load_overrides.py::test_a_dotted_child_beside_a_child_that_is_none"
    ),
    "`module._modules |= ...` inside `fast_inference` left the block's table behind": (
        "tests/parity/fast_inference/test_scope.py::test_a_table_assigned_back_outlasts_the_block"
    ),
    "Dropout without `inplace` did not raise inside `fast_inference`": (
        "tests/parity/fast_inference/test_scope.py"
        "::test_a_missing_option_of_a_layer_is_an_error_as_outside"
    ),
    "Dropout with `training = 0` did not raise inside `fast_inference`": (
        "tests/parity/fast_inference/test_scope.py"
        "::test_a_mode_that_is_not_a_bool_is_an_error_as_outside"
    ),
    "inside `fast_inference`, `set_submodule()` replaced a buffer that is None": (
        "tests/parity/fast_inference/test_scope.py"
        "::test_set_submodule_does_not_take_the_place_of_a_buffer_that_is_none"
    ),
    "a layer whose `_version` is below that of the class behind it did not migrate entries": (
        "tests/parity/module/test_load_overrides.py"
        "::test_a_layer_with_another_version_migrates_as_the_class_behind_it"
    ),
    "registering a parameter, buffer or child read a property of that name twice": (
        "tests/parity/module/test_registration.py::test_a_name_that_is_taken_is_asked_for_once"
    ),
    "`register_parameter()` looked up the name of a value that it refuses twice": (
        "tests/parity/module/test_registration.py"
        "::test_a_name_is_asked_for_once_for_a_value_that_is_refused"
    ),
    "`to()` reported another missing attribute of a parameter that is not a tensor": (
        "tests/parity/module/test_conversion.py::test_what_is_not_a_tensor_cannot_be_converted"
    ),
    "`modules()` passed a wrong path to an override below a child with an empty name": (
        "tests/parity/module/test_traversal.py"
        "::test_modules_names_an_override_below_children_without_names"
    ),
    "`modules()` passed a wrong path to an override if its parent was replaced in the walk": (
        "tests/parity/module/test_traversal.py"
        "::test_modules_names_an_override_below_a_parent_that_is_replaced"
    ),
    "`modules()` passed a wrong path to an override if its parent had grown in the walk": (
        "tests/parity/module/test_traversal.py"
        "::test_modules_names_an_override_below_a_parent_that_grows"
    ),
    "`train()` set the mode of a module that has a member named `training`": CONTRACT
    + "test_a_member_named_training_refuses_the_mode",
}
TEXT = """\
## Random operations

Random operations run side by side on a tree of torch modules and on an equal tree of modkit modules. After each
operation the result or exception, the warnings, the calls of hooks and overrides, and the structure and values of
the trees are compared bitwise.

**{operations:,} operations in {sequences:,} sequences, {differences} unlisted differences** ({date}, torch {torch},
Python {python}; {commits}). `nox -s lockstep` runs 2,000,000 operations. A seed determines the tree and the
operations of a sequence.

The {kinds} kinds of operations cover members, calls with hooks of every kind, `torch.compile`, `torch.fx`, states,
conversions, copies, pickles, patched methods of `torch.nn.Module`, global hooks, parametrizations, optimizers,
`AveragedModel`, `EMA` and `fast_inference`, on trees with layers, containers, lazy layers and {classes} user classes. {skipped:,} more did not apply or concern a listed
difference. Where a listed difference was drawn on purpose, torch and modkit must do exactly what its row says: {rows}.

This run and those before it found {fixed} bugs in modkit, each fixed with a test. The sequences that showed one count
as no difference, because they ran again after the fix and showed none."""


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
