import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.transformers.trainers import equal, gpt2, weights


ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.distributed


def launch(folder: Path, resumed: str, output: Path) -> list[dict[str, Any]]:
    """Run the training in two processes, as users do, and return what each has written."""
    # `--cpu` starts one process; this starts two, which the training arguments keep on the CPU.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    launcher += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    launcher += ["--dynamo_backend=no", "--main_process_port=0"]
    launcher += ["-m", "tests.integration.transformers.launched"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [*launcher, str(folder), resumed, str(output)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    return [torch.load(f"{output}-{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes(tmp_path: Path) -> None:
    """Two launched processes keep the same averages, evaluate and save them, and resume to the bit."""
    whole = launch(tmp_path / "run", "-", tmp_path / "whole")
    resumed = launch(tmp_path / "again", str(tmp_path / "run/checkpoint-4"), tmp_path / "resumed")

    for first, second in (whole, resumed):
        assert first["wrapped"] == "DistributedDataParallel"
        assert first["world"] == 2
        assert equal(first["raw"], second["raw"])
        assert equal(first["average"], second["average"])
        for process in (first, second):
            assert process["counts"] == [6, 6]
            assert equal(process["seen"], process["average"])
            assert equal(process["left"], process["raw"])
            assert not equal(process["raw"], process["average"])
    for before, after in zip(whole, resumed, strict=True):
        assert equal(after["raw"], before["raw"])
        assert equal(after["average"], before["average"])
        assert after["loss"] == before["loss"]
    saved = type(gpt2()).from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert equal(weights(saved), whole[0]["average"])
