import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
ROOT = Path(__file__).parents[3]


def killed(rounds: int) -> dict[str, Any]:
    """Kill training and resume it, in some rounds; return what came of it."""
    module = "tests.integration.checkpoint_kills.loops"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, f"--rounds={rounds}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300 + 30 * rounds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_training_survives_kills():
    """A run that is killed and resumed is bitwise that of no kill, and no private folder stays."""
    found = killed(1)

    assert found["lost"] == []
    assert found["left"] == 0
    assert found["kills"] >= found["rounds"] == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_training_survives_many_kills():
    """A hundred kills or more, of which some interrupt a save."""
    found = killed(60)

    assert found["lost"] == []
    assert found["left"] == 0
    assert found["kills"] >= 100
    assert found["interrupted a save"] > 0
