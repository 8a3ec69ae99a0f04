import contextlib
import io
import json
import math
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.processes import python


SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "train_digits.py"
EPOCHS = 3


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Undo what the example sets for its whole process."""
    kept = sys.argv, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        sys.argv = kept[0]
        torch.set_num_threads(kept[1])
        torch.use_deterministic_algorithms(kept[2])


def run_here(*arguments: object) -> tuple[int, str, str]:
    """Run the example in this process, which has torch loaded; return status and output."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with process_state_kept(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = [str(SCRIPT), *(str(argument) for argument in arguments)]
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            status = end.code
    return int(status or 0), out.getvalue(), err.getvalue()


def run_alone(*arguments: object) -> tuple[int, str, str]:
    """Run the example as users do, in a process of its own."""
    done = python(SCRIPT, *arguments, env={"COLUMNS": "100"})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Train for a few epochs on each backend; give the output folder and what was printed."""
    results = {}
    for backend, run in {"torch": run_here, "modkit": run_alone}.items():
        folder = tmp_path_factory.mktemp(backend) / "new" / "folder"
        status, printed, errors = run("--backend", backend, "--epochs", EPOCHS, "--out", folder)
        assert status == 0, errors
        results[backend] = folder, printed
    return results


def metrics(folder: Path, name: str = "metrics.json") -> dict:
    """Read what a run has written about what both backends have."""
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    del content["backend"]
    for results in content["test"], content.get("history", {}):
        results.pop("in_place", None)
    return content


def test_losses_and_accuracies_are_equal_to_the_last_bit(runs) -> None:
    """Training has equal results on torch and on modkit."""
    expected, actual = metrics(runs["torch"][0]), metrics(runs["modkit"][0])

    assert actual == expected
    assert len(actual["history"]["losses"]) == EPOCHS * 28
    assert [len(actual["history"][name]) for name in ("raw", "swa", "ema")] == [EPOCHS, 1, EPOCHS]
    assert all(math.isfinite(loss) for loss in actual["history"]["losses"])


@pytest.mark.parametrize(("writer", "reader"), [("torch", "modkit"), ("modkit", "torch")])
def test_checkpoint_of_either_loads_into_the_other(runs, tmp_path, writer, reader) -> None:
    """Evaluating the other backend's checkpoint is bitwise identical to the writer's results."""
    checkpoint = runs[writer][0] / "checkpoint.pt"
    status, _, errors = run_here("--backend", reader, "--load", checkpoint, "--out", tmp_path)
    expected = {"test": metrics(runs[writer][0])["test"]}

    assert (status, errors) == (0, "")
    assert metrics(tmp_path, "evaluation.json") == expected
