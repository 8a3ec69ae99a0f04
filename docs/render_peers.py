"""Run every cell of the table of features, and write the table into docs/peers.md.

python docs/render_peers.py      # with the libraries of `nox -s ecosystem` installed
"""

import importlib
import re
import sys
import textwrap
import warnings
from importlib.metadata import version
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "peers.md"
MARKS = "<!-- features: by docs/render_peers.py -->", "<!-- end of features -->"
CLASSES = {
    "modkit": "`EMA`, `PostHocEMA`",
    "torch": "`AveragedModel` with `get_ema_multi_avg_fn`",
    "timm": "`ModelEmaV3`",
    "ema-pytorch": "`EMA`, `PostHocEMA`",
    "diffusers": "`EMAModel`",
    "torch_ema": "`ExponentialMovingAverage`",
    "Lightning": "`EMAWeightAveraging`",
}


def table(cells: dict[str, list[str]]) -> str:
    """Return the table in Markdown, from the outcomes of each feature in the order of the libraries."""
    lines = [f"| feature | {' | '.join(CLASSES)} |", f"|---|{'---|' * len(CLASSES)}"]
    lines += [f"| {feature} | {' | '.join(outcomes)} |" for feature, outcomes in cells.items()]
    return "\n".join(lines)


def cells() -> dict[str, list[str]]:
    """Run every cell, and return the outcomes of each feature in the order of the libraries."""
    features = importlib.import_module("tests.integration.averaging_peers.features")
    return {
        feature: [features.outcome(feature, library) for library in CLASSES]
        for feature in features.FEATURES
    }


def versions() -> str:
    """Name the classes that were compared, with the versions of their libraries."""
    peers = importlib.import_module("tests.integration.averaging_peers.peers").PEERS
    named = []
    for library, classes in CLASSES.items():
        distribution = peers[library].distribution
        number = f" {version(distribution).partition('+')[0]}" if distribution else ""
        named.append(f"{library}{number} ({classes})")
    return ", ".join(named)


def render() -> str:
    """Return the page with the table and the versions between its marks."""
    start, end = MARKS
    compared = textwrap.fill(f"Compared: {versions()}.", 120, break_on_hyphens=False)
    content = f"{table(cells())}\n\n{compared}"
    pattern = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
    page = PAGE.read_text(encoding="utf-8")
    return pattern.sub(lambda _: f"{start}\n\n{content}\n\n{end}", page)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    PAGE.write_text(render(), encoding="utf-8")
