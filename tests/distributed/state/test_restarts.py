import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import modkit
from tests.helpers import Implementation, freeze


pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("elastic.py")


def launched(impl: Implementation, folder: Path, fatal_step: int) -> dict[str, Any]:
    """Run the script with two workers that may be restarted once, and read its checkpoint."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *(*torchrun, "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"),
            *(str(SCRIPT), impl.name, str(folder), str(fatal_step)),
        ],
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = modkit.load_checkpoint(folder / "checkpoint.pt")
    return found


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    """Weights, averages and the optimizer are bitwise those of a run that nothing has stopped."""
    through = launched(Implementation("torch"), tmp_path / "through", -1)
    killed = {
        name: launched(Implementation(name), tmp_path / name, 4) for name in ("torch", "modkit")
    }

    assert (through["attempt"], through["first"]) == (0, 0)
    for found in killed.values():
        assert (found["attempt"], found["first"]) == (1, 4)
        for part in ("net", "optimizer", "ema", "step"):
            assert freeze(found[part]) == freeze(through[part])
