"""Write what the benchmark has found into README.md and docs/benchmarks.md.

python docs/render_bench.py             # from docs/bench.json, as it was measured last
python docs/render_bench.py --measure   # measure first: half an hour, on an idle machine
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402 - the folder is found only now


FOUND = ROOT / "docs" / "bench.json"
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "benchmarks.md"
MARKS = "<!-- {name}: from docs/bench.json, by docs/render_bench.py -->", "<!-- end of {name} -->"


def growth(found: dict[str, Any]) -> str:
    """Say in a sentence how time grows with the number of modules."""
    ours = [row["modkit_exponent"] for row in found["growth"]]
    loads = [
        f"{row['torch_exponent']:.1f}"
        for row in found["growth"]
        if row["operation"] == "load_state_dict()" and row["torch_exponent"] is not None
    ]
    smallest, largest = found["growth"][0]["sizes"][0], found["growth"][0]["sizes"][-1]
    return (
        f"Between {smallest:,} and {largest:,} modules, time grows with an exponent of {min(ours):.2f} "
        f"to {max(ours):.2f}\nin modkit (1 is linear); loading in torch with {' and '.join(loads)}."
    )


def replace(text: str, name: str, content: str) -> str:
    """Put the content between the two marks of that name."""
    start, end = (mark.format(name=name) for mark in MARKS)
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the marks of {name!r} are not there once")
    return pattern.sub(lambda _: f"{start}\n\n{content}\n\n{end}", text)


def render() -> dict[Path, str]:
    """Return the text of each page that has figures of the benchmark."""
    found: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8"))
    rows = found["rows"]
    warm = [row for row in rows if not row["name"].endswith("caches evicted")]
    # The first page has the ten slowest operations, and every model with warm caches.
    slowest = report.ratios(report.ordered(rows, "operations")[:10], "operations")
    parts = [report.heading(found), slowest, report.ratios(warm, "inference"), growth(found)]
    guide = GUIDE.read_text(encoding="utf-8")
    operations = f"{report.heading(found)}\n\n{report.ratios(rows, 'operations')}"
    guide = replace(guide, "ratios", operations)
    guide = replace(guide, "inference", report.ratios(rows, "inference"))
    return {
        README: replace(README.read_text(encoding="utf-8"), "ratios", "\n\n".join(parts)),
        GUIDE: replace(guide, "growth", report.growth(found["growth"])),
    }


def measure() -> None:
    """Measure everything; a missed budget is shown, and no reason to stop."""
    command = [sys.executable, "-m", "benchmarks", "--json", str(FOUND)]
    subprocess.run(command, check=True, cwd=ROOT)  # noqa: S603 - our own command


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure()
    for page, text in render().items():
        page.write_text(text, encoding="utf-8")
