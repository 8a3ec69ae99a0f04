"""The page on the tests themselves: complete runs, faults while writing, planted bugs, random operations.

`nox -s mutation`, `nox -s lockstep` and `python docs/render.py --renew write_faults` store the results.
"""

from collections import Counter
from typing import Any

from _render.markdown import table
from _render.stored_results import read
from _render.tested_with import COUNTS, by_version


# The rows of the table of faults.
KINDS = (
    ("killed", "interrupted", "leftovers"),
    ("two_threads", "two_processes", "same_pid"),
    ("full_disk", "size_limit", "full_device"),
    ("read_only_folder", "read_only_system", "missing_folder", "folder_as_target"),
    ("long_name", "odd_name", "undecodable_name"),
    ("link", "dangling_link", "link_loop", "mode_and_owner"),
    ("fifo", "open_pipe", "null_device"),
)
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
# Test evidence

For contributors: what the tests were run on, which faults and bugs they were tried with, and what was left out.
[Tested with](tested_with.md) is the page for users.

## Complete runs

`skipped` counts tests that need a missing package, device or feature, `xfailed` the rows of
[Differences from torch](differences.md). `again` counts the test files that failed, and ran a second time after a fix;
the other columns have their second outcome. `nox -s "tests(torch='2.8.0')"` runs the tests and stores its row;
`nox -s xla` runs `tests/xla` on the CPU client of torch_xla, which has memory of its own, records each step as a graph
and counts compilations and tensors that the host reads.

{runs}

{faults}

{planted}

{random}

## Left out of third-party suites

`nox -s suites` runs the suites, except for:

{left_out}"""
FAULTS = """\
## Faults while writing

Processes killed by `SIGKILL`, full and read-only file systems, real devices and PID namespaces, for each of
{writers}. A trial passes if the target is a complete version, the next save leaves nothing beside it, and the error
has `errno` and the path.

{rows}

{intact:,} of {trials:,} trials passed ({date}; {versions}). {hits} of the {kills:,} kills interrupted a save."""
PLANTED = """\
## Planted bugs

`nox -s mutation` changes the code of modkit in a copy and runs the tests. A change that no test catches is a gap.
`nox -s tests` catches {caught} of {bugs} planted bugs ({date}, torch {torch}). There is at least one in each mechanism
of modules, and in each file of `averaging`, `files` and `jit`; `docs/_render/results/planted_bugs.json` names each bug and the test.

{rows}"""
SAMPLE = """\
A random sample (seed {seed}) of the mutants of [mutmut](https://mutmut.readthedocs.io/) {mutmut}, against the tests of
each part ({date}, torch {torch}):

{rows}"""
RANDOM = """\
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


def page() -> str:
    """Return the page in Markdown."""
    suites = read("library_suites")
    return TEXT.format(
        runs=runs_table(),
        faults=write_faults(),
        planted=planted_bugs(),
        random=random_operations(),
        left_out=left_out(suites["suites"] | suites["torch's tests"]),
    )


def runs_table() -> str:
    """Return all counts of the complete runs."""
    stored = read("test_runs")
    rows = []
    for run in [*sorted(stored["tests"], key=by_version), *stored.get("devices", [])]:
        counts = [f"{run[name]:,}" for name in COUNTS]
        line = [
            run.get("device", "CPU"),
            run["torch"],
            run["python"],
            *counts,
            run.get("again", ""),
        ]
        rows.append([*line, run["date"]])
    return table(["device", "torch", "Python", *COUNTS, "again", "date"], rows)


def write_faults() -> str:
    """Return the section on faults while files are written."""
    found = read("write_faults")
    cells = {
        name: [one for one in row["cells"].values() if "skipped" not in one]
        for name, row in found["faults"].items()
    }
    every = [one for some in cells.values() for one in some]
    killed = cells["killed"]
    rows = []
    for names in KINDS:
        shown = "; ".join(found["faults"][name]["title"] for name in names)
        found_here = counts([one for name in names for one in cells[name]])
        rows.append([shown, *(f"{count:,}" for count in found_here)])
    trials, intact = counts(every)
    return FAULTS.format(
        writers=", ".join(found["writers"].values()),
        rows=table(["fault", "trials", "passed"], rows, numbers=True),
        intact=intact,
        trials=trials,
        date=found["date"],
        versions=", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        hits=sum(one["notes"].get("left a temporary file", 0) for one in killed if "notes" in one),
        kills=sum(one["trials"] for one in killed),
    )


def counts(cells: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of trials, and of those that passed."""
    return sum(one["trials"] for one in cells), sum(one["intact"] for one in cells)


def planted_bugs() -> str:
    """Return the section on bugs that were planted by hand, and on generated mutants."""
    return f"{planted()}\n\n{sampled()}"


def planted() -> str:
    """Return the part on bugs that were written by hand."""
    found = read("planted_bugs")["planted"]
    folders = Counter(bug["file"].partition("/")[0] for bug in found["bugs"])
    caught = Counter(bug["file"].partition("/")[0] for bug in found["bugs"] if bug["caught by"])
    rows = ([f"`{name}`", count, caught[name]] for name, count in folders.items())
    return PLANTED.format(
        caught=caught.total(),
        bugs=folders.total(),
        date=found["date"],
        torch=found["torch"],
        rows=table(["folder", "bugs", "caught"], rows, numbers=True),
    )


def sampled() -> str:
    """Return the part on the sample of generated mutants."""
    found = read("planted_bugs").get("sample")
    if not found:
        return ""
    rows = []
    for part in found["parts"]:
        numbers = [part["sample"], part["killed"], f"{part['killed'] / part['sample']:.0%}"]
        rows.append([f"`{part['name']}`", *numbers])
    shown = table(["part", "sample", "caught", "score"], rows, numbers=True)
    return SAMPLE.format(**{**found, "rows": shown}) + f"\n\n{found.get('survivors', '')}"


def random_operations() -> str:
    """Return the section on random operations."""
    found = read("random_operations")
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
    return RANDOM.format(**{**found, **changed})


def left_out(suites: dict[str, Any]) -> str:
    """Return what of each suite was not run, with the reasons."""
    lines = [
        "`tests/suites/libraries.py` names the files that run, `tests/suites/torch_tests.py` those of torch."
    ]
    for name, row in suites.items():
        parts = [f"`{test}` ({reason})" for test, reason in row["left out"].items()]
        parts += [
            f"`{start}` ({'all' if rate == 1 else f'1 in {rate}'} run)"
            for start, rate in row["sample"].items()
        ]
        lines += [f"{name}: {', '.join(parts)}."] * bool(parts)
    return "\n".join(f"- {line}" for line in lines)
