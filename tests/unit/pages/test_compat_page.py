import json
from pathlib import Path


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_nothing_differs_that_is_not_listed():
    """The committed runs found no unlisted difference, on any torch and in any model."""
    found = json.loads((DOCS / "compat.json").read_text(encoding="utf-8"))

    assert {run["areas"]["all"]["unlisted"] for run in found["behaviors"].values()} == {0}
    assert {run["counts"][-1] for run in found["models"].values()} == {0}
