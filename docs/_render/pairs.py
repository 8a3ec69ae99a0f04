"""The counts of `nox -s pairs` on docs/test_evidence.md."""

from _render.markdown import table
from _render.stored_results import read


KINDS = ("right", "refused", "not sensible", "not installed")


def blocks() -> dict[str, str]:
    """Return the block of the page, with the last complete run."""
    run = read("pairs")
    headings = ["features", "situations", "pairs", *KINDS, "faults found so far", "date", "torch"]
    kinds = [f"{run.get(kind, 0):,}" for kind in KINDS]
    sizes = [run["features"], run["situations"], f"{run['pairs']:,}"]
    return {"pairs": table(headings, [[*sizes, *kinds, run["faults"], run["date"], run["torch"]]])}
