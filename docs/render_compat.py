"""Write docs/compat.md, the tables of `modkit compat`, from docs/compat.json.

python docs/render_compat.py          # from docs/compat.json, as it was run last
python docs/render_compat.py --run    # run it first: with this torch, and on the models whose libraries are here
"""

import argparse
import importlib
import importlib.util
import json
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compat.md"
FOUND = ROOT / "docs" / "compat.json"
INTRODUCTION = """\
# modkit compat

<!-- Rendered from docs/compat.json by docs/render_compat.py. -->

`modkit compat` compares modkit with the installed torch. It needs the extra `cli` and takes about 15 s of CPU time.

```console
$ modkit compat
$ modkit compat --area "forward hooks" --json -
$ modkit compat my_package.models:Net --kwargs '{"width": 64}' --input 8,3,32,32
$ modkit compat train.py:make_model --input train.py:make_inputs --html report.html
```

The exit status is 0 if nothing differs, 1 if something differs that is not listed, and 2 if an argument is wrong.
`--json FILE` and `--html FILE` write all results.

## Shared behaviors

Each case is a function that is called with `torch` and with `modkit`. Values are compared bit by bit, exceptions by
type and text, and warnings too. A case with a listed difference has a row in [the table of differences](parity.md);
what torch and modkit give must be exactly what is listed."""

MODEL = """\
## A model

The model is built in two processes from the same seed. In one of them the source of its package is compiled with
`torch.nn`, `torch.jit` and `torch.optim.swa_utils` replaced by those of modkit. `--swap PACKAGE` does this for a further
package, such as the library whose model a script builds. Compared are structure, `repr`, initial bits, outputs in both
modes, gradients, buffers, state dicts, strict loading of the other's state dict, pickle, deepcopy, `torch.compile`,
`torch.fx` and `torch.export`. The same error on both sides counts as equal. Without `--input` the shape is that of the
first layer that has one; if there is none, checks that call the model are skipped.

Models of other libraries, swapped with `--swap`:"""
COUNTS = ("cases", "equal", "listed", "unlisted")


def table(headings: list[str], rows: list[list[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def numbers(release: str) -> tuple[int, ...]:
    """Return a release in an order that sorts."""
    return tuple(int(part) for part in release.split("."))


def render() -> str:
    """Return the page."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    runs = sorted(found["behaviors"].values(), key=lambda run: numbers(run["torch"]))
    totals = [
        [run["torch"], run["Python"], *(run["areas"]["all"][one] for one in COUNTS), run["date"]]
        for run in runs
    ]
    areas = [[area, *(counts[one] for one in COUNTS)] for area, counts in runs[-1]["areas"].items()]
    models = [
        [name, run["library"], run["torch"], run["modules"], *run["counts"], run["date"]]
        for name, run in found["models"].items()
    ]
    headings = ["model", "version", "torch", "modules", "equal", "equal errors", "differ", "date"]
    parts = (
        INTRODUCTION,
        table(["torch", "Python", *COUNTS, "date"], totals),
        f"The areas, on torch {runs[-1]['torch']}:",
        table(["area", *COUNTS], areas),
        MODEL,
        table(headings, models),
    )
    return "\n\n".join(parts) + "\n"


def run() -> dict[str, Any]:
    """Run the behaviours, and compare the models whose libraries are here."""
    sys.path.insert(0, str(ROOT))
    report = importlib.import_module("modkit.compat.report")
    models = importlib.import_module("tests.integration.compat.models").MODELS
    found = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    results = importlib.import_module("modkit.compat.run").run()
    made = report.Report("behaviors", results, by_area=True).as_json()
    made["versions"]["torch"] = torch = made["versions"]["torch"].split("+")[0]
    now = {"date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    behaviors = {torch: {**made["versions"], **now, "areas": made["areas"]}}
    for name, target in models.items():
        library = name.split()[0]
        if importlib.util.find_spec(library) is not None:
            title, checks = importlib.import_module("modkit.compat.model").compare(target)
            differ = sum(each.kind != "equal" for each in checks)
            errors = sum(each.kind == "equal" and each.torch[0] == "raises" for each in checks)
            found.setdefault("models", {})[name] = {
                **now,
                "torch": torch,
                "library": version(library),
                "modules": title.partition(": ")[2].rpartition(": ")[2],
                "counts": [len(checks) - differ - errors, errors, differ],
            }
    return {**found, "behaviors": {**found.get("behaviors", {}), **behaviors}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true")
    if parser.parse_args().run:
        FOUND.write_text(json.dumps(run(), indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(render(), encoding="utf-8")
