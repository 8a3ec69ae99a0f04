"""The results of the last runs: one JSON file each, in the folder ``results``."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = Path(__file__).resolve().parent / "results"


def file_of(name: str) -> Path:
    """Return the file of the results with this name."""
    return RESULTS / f"{name}.json"


def read(name: str) -> Any:
    """Return the results of the last run."""
    return json.loads(file_of(name).read_text(encoding="utf-8"))


def write(name: str, results: Any, indent: int | None = 1) -> None:
    """Store the results of a run."""
    text = json.dumps(results, indent=indent, ensure_ascii=False)
    file_of(name).write_text(f"{text}\n", encoding="utf-8")


def today() -> str:
    """Return the date of a run."""
    return f"{datetime.now(timezone.utc):%Y-%m-%d}"


def release(text: str) -> tuple[int, ...]:
    """Return a release number as a sort key."""
    return tuple(int(part) for part in text.split("."))
