"""``modkit diff``: how two checkpoints differ, in names, shapes, dtypes and values."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from modkit._renames import Rule, find_renames
from modkit.cli import _tables as ui
from modkit.files.tensor_files import Checkpoint


_COMPARED: Final = {
    False: "names, shapes and dtypes; --values compares values too",
    True: "names, shapes, dtypes and values",
}


@click.command(epilog=ui.epilog("the checkpoints are equal", "they differ", errors=2))
@click.argument("path_a", metavar="A", type=ui.INPUT)
@click.argument("path_b", metavar="B", type=ui.INPUT)
@click.option(
    "--key",
    "keys",
    multiple=True,
    help="Path of the state dict in torch files, as model; twice for A and for B.",
)
@click.option("--values", is_flag=True, help="Compare the values too, one tensor at a time.")
@click.option(
    "--rtol",
    type=click.FloatRange(0),
    help="Relative difference up to which floating-point values are equal; default: 0.",
)
@click.option("--limit", type=click.IntRange(0), default=100, help="Maximum rows per table [100].")
@ui.json_option
def diff(
    path_a: Path,
    path_b: Path,
    keys: tuple[str, ...],
    values: bool,
    rtol: float | None,
    limit: int,
    as_json: bool,
) -> None:
    """Compare two checkpoints.

    A and B are torch or safetensors files, sharded or not. Without --values, checkpoints are equal
    if names, shapes and dtypes are, and no tensor is read. With it, the largest difference of each
    tensor is shown: absolute, and relative to the larger of the two elements. NaN is equal to NaN.
    Names of one file alone are paired if names and shapes tell which one was renamed; if they do
    not, all candidates are shown.

    \b
    Examples:
      modkit diff last.pt best.pt --key model
      modkit diff old.pt new.safetensors --values --rtol 1e-6 --json
      modkit diff last.pt last.pt --key model --key ema.averages.0.tensors
    """  # noqa: D301
    if len(keys) > 2:
        raise click.UsageError("--key is given once for both checkpoints, or twice for A and B")
    if rtol is not None and not values:
        raise click.UsageError("--rtol needs --values")

    # A single key is the first and the last one, and is for both.
    key_a, key_b = (keys[0], keys[-1]) if keys else (None, None)
    total = 1.0 if values else None
    with ui.progress(f"comparing {path_a.name} and {path_b.name}", total) as bar:
        a, b = Checkpoint(path_a, key=key_a), Checkpoint(path_b, key=key_b)
        report = _compare(a, b)
        if values:
            rows = _compare_values(a, b, report["renamed"], rtol=rtol or 0.0, progress=bar)
            # A generator, so this is where values are compared: inside the block that shows the
            # bar.
            report["values"] = [*rows]

    differences = _count_differences(report)
    if as_json:
        facts = {"a": str(path_a), "b": str(path_b), "equal": not differences}
        unverified = [*map(str, [*a.unverified, *b.unverified])]
        ui.print_json({**facts, **report, "unverified": unverified})
    else:
        _show_tables(report, a, b, limit)
        ui.say(f"A  {path_a}: {len(a.shapes):,} tensors")
        ui.say(f"B  {path_b}: {len(b.shapes):,} tensors")
        verdict = f"different: {', '.join(differences)}" if differences else "equal"
        ui.say(f"{verdict} (compared: {_COMPARED[values]})")
    ui.warn_unverified([*a.unverified, *b.unverified])
    if differences:
        raise click.exceptions.Exit(1)


def _compare(a: Checkpoint, b: Checkpoint) -> dict[str, Any]:
    """Compare names, shapes and dtypes; return what differs as plain data for JSON."""
    # A rename in doubt is in the rules, and not in the pairs: its names stay those of one side.
    renames = find_renames(a.shapes, b.shapes)
    pairs = {n: n for n in a.shapes if n in b.shapes} | dict(sorted(renames.pairs.items()))
    paired_in_b = set(pairs.values())

    changed = [
        {
            "a": old,
            "b": new,
            "shape_a": [*a.shapes[old]],
            "shape_b": [*b.shapes[new]],
            "dtype_a": a.dtypes[old],
            "dtype_b": b.dtypes[new],
        }
        for old, new in pairs.items()
        if (a.shapes[old], a.dtypes[old]) != (b.shapes[new], b.dtypes[new])
    ]
    return {
        "only_in_a": [name for name in a.shapes if name not in pairs],
        "only_in_b": [name for name in b.shapes if name not in paired_in_b],
        "renamed": [{"a": old, "b": new} for old, new in sorted(renames.pairs.items())],
        "rules": [_rule_as_data(rule) for rule in renames.rules],
        "changed": changed,
        "values": None,
    }


def _rule_as_data(rule: Rule) -> dict[str, Any]:
    return {
        "kind": rule.kind,
        "a": [*rule.old],
        "b": [*rule.new],
        "tensors": rule.count,
        "certain": rule.is_certain,
    }


def _compare_values(
    a: Checkpoint,
    b: Checkpoint,
    renamed: list[dict[str, str]],
    *,
    rtol: float,
    progress: Callable[[float], object],
) -> Iterator[dict[str, Any]]:
    """Yield the largest difference of each two tensors of one shape; only they are in memory."""
    from modkit.cli.tensor_differences import is_inexact, largest_difference

    # In the order of A, so that a mapped file is read from its beginning to its end.
    pairs = {name: name for name in a.shapes if name in b.shapes}
    pairs |= {pair["a"]: pair["b"] for pair in renamed}
    total = sum(math.prod(a.shapes[name]) for name in pairs)
    done = 0

    for old, new in pairs.items():
        done += math.prod(a.shapes[old])
        if a.shapes[old] == b.shapes[new]:
            dtypes = a.dtype(old), b.dtype(new)
            try:
                difference = largest_difference(a.tensor(old), b.tensor(new))
            except NotImplementedError as error:
                text = f"{old} is {a.dtypes[old]}, whose values torch does not compare"
                raise ValueError(text) from error

            is_close = any(map(is_inexact, dtypes)) and difference.relative <= rtol
            is_equal = not difference.nonfinite and (difference.absolute == 0 or is_close)
            yield {"a": old, "b": new, **difference._asdict(), "equal": is_equal}
        progress(done / max(total, 1))


def _count_differences(report: Mapping[str, Any]) -> list[str]:
    """Return what differs, each with the number of tensors."""
    changed = report["changed"]
    counts = {
        "only in A": len(report["only_in_a"]),
        "only in B": len(report["only_in_b"]),
        "renamed": len(report["renamed"]),
        "of another shape": sum(row["shape_a"] != row["shape_b"] for row in changed),
        "of another dtype": sum(row["dtype_a"] != row["dtype_b"] for row in changed),
        "of other values": sum(not row["equal"] for row in report["values"] or []),
    }
    return [f"{count:,} {label}" for label, count in counts.items() if count]


def _show_tables(report: Mapping[str, Any], a: Checkpoint, b: Checkpoint, limit: int) -> None:
    """Print a table for renames, for names, shapes and dtypes, and for values."""
    renames = [(rule["tensors"], *_rule_as_text(rule)) for rule in report["rules"]]
    members = [(name, _described(a, name), "-") for name in report["only_in_a"]]
    members += [(name, "-", _described(b, name)) for name in report["only_in_b"]]
    members += [
        (_shown(row), _described(a, row["a"]), _described(b, row["b"])) for row in report["changed"]
    ]

    unequal: list[dict[str, Any]] = [row for row in report["values"] or [] if not row["equal"]]
    unequal.sort(key=lambda row: (-row["nonfinite"], -row["relative"]))
    values = [
        (_shown(row), f"{row['absolute']:.3g}", f"{row['relative']:.3g}", row["nonfinite"])
        for row in unequal
    ]

    ui.print_tables(
        {
            ("renamed", "A", "B", "certain"): renames,
            ("tensor", "A", "B"): members,
            ("tensor", "largest difference", "relative", "NaN or infinite in one"): values,
        },
        limit,
    )


def _shown(row: Mapping[str, str]) -> str:
    return row["a"] if row["a"] == row["b"] else f"{row['a']} -> {row['b']}"


def _described(checkpoint: Checkpoint, name: str) -> str:
    return f"{[*checkpoint.shapes[name]]} {checkpoint.dtypes[name]}"


def _rule_as_text(rule: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the names in A, those in B, and whether these are certain."""
    names_a, names_b = (" or ".join(rule[side]) or "(no prefix)" for side in ("a", "b"))
    return names_a, names_b, "yes" if rule["certain"] else "no: shapes do not tell"
