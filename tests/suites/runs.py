"""Running a library's suite on each side, and comparing the sides test by test."""

import json
import os
import runpy
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from modkit.compat.suite import Suite, counted, repeated, require_a_test, run, unsteady
from tests.suites.libraries import Library
from tests.suites.trees import unpack


ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).with_name("plugin")


def store(results: Path, rows: dict[str, Any]) -> None:
    """Store the rows of a run with its date and torch, and write the pages that show them."""
    found = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "torch": version("torch").partition("+")[0],
        "rows": rows,
    }
    results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    runpy.run_path(str(ROOT / "docs" / "render.py"))["write_pages"]()


def suite_of(library: Library, side: str, tree: Path) -> Suite:
    """Return the suite of a library on one side."""
    paths = {
        "torch": [],
        "whole": [tree],
        "user": [path for pattern in library.user for path in tree.glob(pattern)],
    }
    return Suite(
        tests=library.tests,
        paths=paths[side],
        packages=library.packages if side == "whole" else (),
        arguments=[
            *("-c", str(PLUGIN / "pytest.ini"), "--rootdir", str(tree), "--confcutdir", str(tree)),
            *("-p", "suite_sampler", "--timeout=300", "--hypothesis-seed=0"),
            *(f"-p{plugin}" for plugin in library.plugins),
            # The hooks of torch's own conftest are for an old pytest.
            *(["--noconftest"] if library.root == "test" else []),
            *(f"--deselect={test}" for test in library.left_out if "::" in test),
            *(f"--ignore={test}" for test in library.left_out if "::" not in test),
        ],
        folder=tree,
        environment={
            **library.environment,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                (
                    *map(str, (tree / library.root, tree, PLUGIN, ROOT / "src")),
                    os.environ.get("PYTHONPATH", ""),
                )
            ),
            "SUITE_DEVICE": library.device,
            "SUITE_SAMPLE": json.dumps(library.sample),
        },
        processes=library.processes,
        keep_going=True,
        seconds=library.seconds,
    )


def compare(library: Library, folder: Path) -> dict[str, Any]:
    """Run a library's suite on every side, rerun differing tests, and return the row of the report."""
    tree = unpack(library, folder)
    suites = {side: suite_of(library, side, tree) for side in library.sides}
    records = folder / library.name / "outcomes"

    started = time.perf_counter()
    first_runs = {
        side: run(suite, swap=side != "torch", folder=records / side)
        for side, suite in suites.items()
    }
    sides = {side: record.outcomes for side, record in first_runs.items()}
    seconds = time.perf_counter() - started
    require_a_test(sides["torch"])

    runs = repeated(suites, sides, records)
    unsteady_rows, differing_rows = [], []
    for test, outcomes in runs.items():
        changing = {unsteady(outcomes["torch"], outcomes[side]) for side in library.sides[1:]}
        shown = {side: list(map(str, each)) for side, each in outcomes.items()}
        if "" in changing:
            cause = next((c for s, c in library.causes.items() if test.startswith(s)), "")
            differing_rows.append({"test": test, "runs": shown, "cause": cause})
        else:
            unsteady_rows.append({"test": test, "runs": shown, "cause": ", ".join(changing)})

    row = {
        "version": library.version,
        "repository": library.repository,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(seconds),
        "sides": {side: counted(outcomes) for side, outcomes in sides.items()},
        "swapped modules": {side: len(first_runs[side].swapped) for side in library.sides[1:]},
        "differing": differing_rows,
        "unsteady": unsteady_rows,
        "left out": {**library.sides_left_out, **library.left_out},
        "sample": library.sample,
    }
    (folder / library.name / "row.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
    return row
