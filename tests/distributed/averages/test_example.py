import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import modkit


SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "fsdp_ema.py"

pytestmark = pytest.mark.distributed


def launched(ranks: int, *arguments: str) -> str:
    """Run the example as its first lines say; return what it has printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(ranks), str(SCRIPT), *arguments],
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=200,
    )

    assert done.returncode == 0, done.stderr
    return done.stdout


def read(folder: Path) -> dict[str, Tensor]:
    """Read the file that a run has left."""
    found: dict[str, Tensor] = safetensors.torch.load_file(folder / "average.safetensors")
    return found


def test_a_run_goes_on_where_another_one_has_ended(tmp_path: Path) -> None:
    """At an equal world size a run resumes bitwise identically, at another with equal weights."""
    through = launched(2, "--steps", "40", "--every", "20", "--out", str(tmp_path / "through"))
    launched(2, "--steps", "20", "--out", str(tmp_path / "parts"))
    resumed = launched(2, "--steps", "40", "--out", str(tmp_path / "parts"))
    more = launched(3, "--steps", "40", "--out", str(tmp_path / "parts"))
    shares = re.findall(r"step 40: accuracy ([\d.]+)%, ([\d.]+)% with averaged weights", through)

    assert "2 ranks, from step 0" in through
    assert "2 ranks, from step 20" in resumed
    assert "3 ranks, from step 40" in more
    assert len(shares) == 1
    assert all(float(share) > 50 for share in shares[0])
    assert shares[0] == re.findall(r"step 40: accuracy ([\d.]+)%, ([\d.]+)%", resumed)[0]
    first, second = read(tmp_path / "through"), read(tmp_path / "parts")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    # A plain linear layer takes the weights that it has in the file.
    head = modkit.nn.Linear(66, 10)
    head.load_state_dict({name: first[f"5.{name}"] for name in ("weight", "bias")})
    assert first["0.weight"].shape == (66, 64)
