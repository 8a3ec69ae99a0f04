import json
from pathlib import Path

from tests.suites.libraries import LIBRARIES


ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def test_every_difference_has_a_cause():
    """No probe of the committed run differed, and each test that did is explained."""
    found = json.loads((DOCS / "suites.json").read_text(encoding="utf-8"))
    tests = [one for row in found["suites"].values() for one in row["differing"]]

    assert [one["test"] for one in tests if not one["cause"]] == []
    assert [
        name for name, row in found["probes"].items() if row["differing"] or row["raised"]
    ] == []


def test_the_suites_are_of_the_pinned_versions():
    """Each suite runs against the installed version that its tests come from."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()

    wanted = [f"{each.name.replace('_', '-')}=={each.version}" for each in LIBRARIES]

    assert [w for w in wanted if not any(pin.split(" ")[0].lower() == w for pin in pins)] == []
