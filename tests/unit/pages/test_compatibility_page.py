import json
from pathlib import Path


DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_no_test_failed():
    """No run that is committed had a failing test."""
    stored = json.loads((DOCS / "compatibility.json").read_text(encoding="utf-8"))
    runs = [*stored["tests"], *stored["devices"]]

    assert [run for run in runs if run["failed"]] == []
