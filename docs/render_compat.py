"""The section on `modkit compat`: the tables of its last runs.

python docs/render_compat.py --run    # run it with this torch, and on the models whose libraries are installed
"""

import argparse
import importlib
import importlib.util
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from blocks import ROOT, read, release, table, write


TEXT = """\
## `modkit compat`

[`modkit compat`](command_line.md) calls {cases} functions with `torch` and with `modkit`, and compares values bit
by bit, exceptions by type and text, and warnings. A case with a listed difference must give exactly what its row in
[Differences from torch](parity.md) says.

{releases}

`modkit compat` also builds a model twice from the same seed, once with `torch.nn`, `torch.jit` and
`torch.optim.swa_utils` replaced in the source of its package. It compares structure, `repr`, initial weights,
outputs in both modes, gradients, buffers, state dicts and loading, pickle, deepcopy, `torch.compile`, `torch.fx` and
`torch.export`. Models of other libraries, each with its number of checks: {models}."""
COUNTS = ("cases", "equal", "listed", "unlisted")


def section() -> str:
    """Return the section in Markdown."""
    found = read("compat")
    runs = sorted(found["behaviors"].values(), key=lambda run: release(run["torch"]))
    totals = [
        [run["torch"], run["Python"], *(run["areas"]["all"][one] for one in COUNTS), run["date"]]
        for run in runs
    ]
    models = [
        f"{name} {run['library']} ({sum(run['counts'][:2])} equal, {run['counts'][2]} differ)"
        for name, run in found["models"].items()
    ]
    return TEXT.format(
        cases=runs[-1]["areas"]["all"]["cases"],
        releases=table(["torch", "Python", *COUNTS, "date"], totals),
        models=", ".join(models),
    )


def run() -> dict[str, Any]:
    """Run the behaviors, and compare the models whose libraries are installed."""
    sys.path.insert(0, str(ROOT))
    runner = importlib.import_module("modkit.compat.run")
    models = importlib.import_module("tests.integration.compat.models").MODELS
    found = read("compat")
    made = runner.Report("behaviors", runner.run(), by_area=True).as_json()
    made["versions"]["torch"] = torch = made["versions"]["torch"].split("+")[0]
    now = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    behaviors = {torch: {**made["versions"], **now, "areas": made["areas"]}}
    for name, target in models.items():
        library = name.split()[0]
        if importlib.util.find_spec(library) is not None:
            title, checks = importlib.import_module("modkit.compat.model").compare(target)
            differ = sum(each.kind == "unlisted" for each in checks)
            errors = sum(each.kind == "not compared" for each in checks)
            found.setdefault("models", {})[name] = {
                **now,
                "torch": torch,
                "library": version(library),
                "modules": title.partition(": ")[2].rpartition(": ")[2].partition("; ")[0],
                "counts": [len(checks) - differ - errors, errors, differ],
            }
    return {**found, "behaviors": {**found.get("behaviors", {}), **behaviors}}


if __name__ == "__main__":
    from render import write_pages

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true")
    if parser.parse_args().run:
        write("compat", run())
    write_pages()
