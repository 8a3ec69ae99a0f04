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
NOTICE = "<!-- from docs/compat.json, by docs/render_compat.py -->"
COUNTS = ("cases", "equal", "listed", "unlisted")


def table(headings: list[str], rows: list[list[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def numbers(release: str) -> tuple[int, ...]:
    """Return a release in an order that sorts."""
    return tuple(int(part) for part in release.split("."))


def render() -> str:
    """Return the part of the page below its introduction."""
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
    return "\n\n".join(
        (
            NOTICE,
            table(["torch", "Python", *COUNTS, "date"], totals),
            f"The areas, on torch {runs[-1]['torch']}:",
            table(["area", *COUNTS], areas),
            "Models of other libraries, which are imported with modkit.nn:",
            table(
                ["model", "version", "torch", "modules", "equal", "equal errors", "differ", "date"],
                models,
            ),
        )
    )


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
    PAGE.write_text(render() + "\n", encoding="utf-8")
