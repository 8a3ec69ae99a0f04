import io
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.transformers.trainers import (
    At,
    EMACallback,
    average,
    equal,
    every,
    fail,
    result,
    trainer,
    weights,
)


def interrupt(step: int) -> None:
    """Do what Ctrl-C does, also where Python was started in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


EVALUATING = every(4, "eval", "save")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the result of a run without an error, with checkpoints at 4, 8 and 12."""
    folder, callback = tmp_path_factory.mktemp("whole"), EMACallback(0.9)
    whole = trainer(folder, callback, hears=lambda _: {}, **EVALUATING)
    whole.train()
    return folder, result(whole, callback)


@pytest.mark.parametrize(
    ("where", "call", "error"),
    [
        ("on_prediction_step", fail, RuntimeError),
        ("on_evaluate", interrupt, KeyboardInterrupt),
        ("compute_metrics", fail, RuntimeError),
    ],
)
def test_errors_in_an_evaluation(
    whole_run: Any, tmp_path: Path, where: str, call: Any, error: Any
) -> None:
    """An error in an evaluation restores the training weights, and the last checkpoint resumes."""

    def compute(prediction: Any) -> dict[str, float]:
        if where == "compute_metrics" and run.state.global_step == 8:
            call(8)
        return {}

    callback, raw = EMACallback(0.9), []
    note = At("on_step_end", lambda _: raw.append(weights(run.model)), 8)
    raiser = [At(where, call, 8)] if where != "compute_metrics" else []
    run = trainer(tmp_path, note, callback, *raiser, hears=compute, **EVALUATING)
    with pytest.raises(error):
        run.train()
    kept = weights(run.model)
    again = trainer(tmp_path, second := EMACallback(0.9), hears=lambda _: {}, **EVALUATING)
    again.train(resume_from_checkpoint=True)

    assert equal(kept, raw[0])
    assert not equal(kept, average(callback.ema))
    assert not callback.ema._steps.optimizers
    assert equal(result(again, second), whole_run[1])


def flip(content: bytes) -> bytes:
    """Change one bit of a training weight."""
    raw = torch.load(io.BytesIO(content), weights_only=True)["raw"]
    place = content.index(raw["transformer.wte.weight"].numpy().tobytes())
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def changed(content: bytes, **entries: int) -> bytes:
    """Replace entries of a file."""
    buffer = io.BytesIO()
    torch.save({**torch.load(io.BytesIO(content), weights_only=True), **entries}, buffer)
    return buffer.getvalue()


UNREADABLE = r"ema\.pt cannot be read .*training weights.*Resume from another checkpoint"


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda content: content[: len(content) // 2], UNREADABLE),
        (flip, UNREADABLE),
        (lambda content: b"", UNREADABLE),
        (
            lambda content: changed(content, global_step=5),
            "is of step 5, and the checkpoint of step 4",
        ),
        (lambda content: changed(content, version=9), "newer"),
    ],
    ids=["cut", "flip", "empty", "of another step", "of a later version"],
)
def test_a_file_that_cannot_be_used(
    whole_run: Any, tmp_path: Path, damage: Callable[[bytes], bytes], match: str
) -> None:
    """Corrupt averages, and those of another step or version, are an error that states the remedy."""
    folder = shutil.copytree(whole_run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    path = folder / "ema.pt"
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ValueError, match=f"(?s){match}"):
        trainer(tmp_path, EMACallback(0.9)).train(resume_from_checkpoint=str(folder))


def test_a_file_that_the_disk_hides(whole_run: Any, tmp_path: Path, monkeypatch) -> None:
    """Averages are not taken for missing where Path.exists() is False, as in Python 3.14 after an error."""
    folder = shutil.copytree(whole_run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (folder / "ema.pt").write_bytes(b"")
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda path, **options: path.name != "ema.pt" and exists(path, **options)
    )

    with pytest.raises(ValueError, match=f"(?s){UNREADABLE}"):
        trainer(tmp_path, EMACallback(0.9)).train(resume_from_checkpoint=str(folder))
