import io
import resource
import signal
import subprocess
import sys
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
    fail,
    result,
    trainer,
    weights,
)


ROOT = Path(__file__).parents[3]


def interrupt(step: int) -> None:
    """Do what Ctrl-C does, also where Python was started in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("call", "error"), [(fail, RuntimeError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("where", ["on_prediction_step", "on_evaluate", "compute_metrics"])
def test_errors_in_an_evaluation(tmp_path: Path, where: str, call: Any, error: Any) -> None:
    """An error in an evaluation restores the training weights, and the last checkpoint resumes."""

    def compute(prediction: Any) -> dict[str, float]:
        if where == "compute_metrics" and run.state.global_step == 8:
            call(8)
        return {}

    options = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    callback, raw = EMACallback(0.9), []
    note = At("on_step_end", lambda _: raw.append(weights(run.model)), 8)
    raiser = [At(where, call, 8)] if where != "compute_metrics" else []
    run = trainer(tmp_path, note, callback, *raiser, hears=compute, **options)
    with pytest.raises(error):
        run.train()
    kept = weights(run.model)
    whole = trainer(tmp_path / "whole", second := EMACallback(0.9), hears=lambda _: {}, **options)
    whole.train()
    again = trainer(tmp_path, third := EMACallback(0.9), hears=lambda _: {}, **options)
    again.train(resume_from_checkpoint=True)

    assert equal(kept, raw[0])
    assert not equal(kept, average(callback.ema))
    assert not callback.ema._steps.optimizers
    assert equal(result(again, third), result(whole, second))


def test_errors_in_what_the_user_calls(tmp_path: Path) -> None:
    """An error in `evaluate`, `predict` or `save_model` leaves the training weights."""
    callback = EMACallback(0.9)
    run = trainer(tmp_path, callback)
    run.train()
    raw = weights(run.model)
    run.add_callback(At("on_prediction_step", fail, 12))
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(RuntimeError, match="out of paper"):
        run.evaluate()
    assert equal(weights(run.model), raw)
    with pytest.raises(RuntimeError, match="out of paper"):
        run.predict(run.eval_dataset)
    assert equal(weights(run.model), raw)
    with pytest.raises(OSError, match="exist"):
        run.save_model(str(tmp_path / "file"))
    assert equal(weights(run.model), raw)


def cut(content: bytes) -> bytes:
    """Lose the second half."""
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    """Change one bit of a training weight."""
    raw = torch.load(io.BytesIO(content), weights_only=True)["raw"]
    place = content.index(raw["transformer.wte.weight"].numpy().tobytes())
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def empty(content: bytes) -> bytes:
    """Lose all."""
    return b""


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_a_damaged_file(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A corrupt file of averages is an error that states the loss and the remedy."""
    trainer(tmp_path, EMACallback(0.9), save_strategy="steps", save_steps=4).train()
    path = tmp_path / "checkpoint-4" / "ema.pt"
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ValueError, match=r"ema\.pt cannot be read .*training weights") as caught:
        trainer(tmp_path, EMACallback(0.9)).train(resume_from_checkpoint=str(path.parent))
    assert "Resume from another checkpoint" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("global_step", 5, "is of step 5, and the checkpoint of step 4"),
        ("version", 9, "newer"),
    ],
)
def test_a_file_that_does_not_belong_here(tmp_path: Path, key: str, value: int, match: str) -> None:
    """Averages of another step or of a later version are refused before anything is changed."""
    trainer(tmp_path, EMACallback(0.9), save_strategy="steps", save_steps=4).train()
    path = tmp_path / "checkpoint-4" / "ema.pt"
    torch.save({**torch.load(path, weights_only=True), key: value}, path)
    run = trainer(tmp_path, EMACallback(0.9))

    with pytest.raises(ValueError, match=match):
        run.train(resume_from_checkpoint=str(path.parent))


def test_averages_of_another_model(tmp_path: Path) -> None:
    """Averages that do not fit the model are refused with the names, and it is not changed."""
    trainer(tmp_path, EMACallback(0.9), save_strategy="steps", save_steps=4).train()
    callback = EMACallback(0.9, include="*.mlp.*")
    run = trainer(tmp_path, callback)

    with pytest.raises(ValueError, match=r"the state does not fit the model.*wte"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    saved = type(run.model).from_pretrained(tmp_path / "checkpoint-4")
    assert equal(weights(run.model), weights(saved))


def test_a_full_disk(tmp_path: Path) -> None:
    """On a full disk the training weights are kept, and so is an older file of that name."""
    callback = EMACallback(0.9)
    run = trainer(tmp_path, callback, save_strategy="steps", save_steps=12)
    run.train()
    raw, path = weights(run.model), tmp_path / "checkpoint-12" / "ema.pt"
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)), callback._saving(path.parent, True):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir() if "ema" in one.name] == ["ema.pt"]
    assert equal(weights(run.model), raw)


CHILD = """
import sys, time
from pathlib import Path
import torch
from tests.integration.transformers.trainers import EMACallback, trainer

whole = torch.save

def half(content, path, **options):
    whole(content, path, **options)
    if "ema.pt" in str(path) and content["global_step"] == 8:
        path.write_bytes(path.read_bytes()[:1000])
        print("half", flush=True)
        time.sleep(600)

torch.save = half
run = trainer(Path(sys.argv[1]), EMACallback(0.9), save_strategy="steps", save_steps=4, save_total_limit=1)
run.train()
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """A process that dies while the averages are written leaves the checkpoint before it whole."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        assert any(line == "half\n" for line in process.stdout)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    options = {"save_strategy": "steps", "save_steps": 4}
    left = list((tmp_path / "checkpoint-8").glob(".modkit-*/ema.pt"))
    whole = trainer(tmp_path / "whole", callback := EMACallback(0.9), **options)
    whole.train()
    run = trainer(tmp_path / "again", again := EMACallback(0.9), **options)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    later = trainer(tmp_path, EMACallback(0.9), save_strategy="steps", save_steps=12)
    later.train()

    assert len(left) == 1
    assert not left[0].parent.exists(), "the next checkpoint has another folder"
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "checkpoint-8" / "ema.pt").exists()
    assert equal(result(run, again), result(whole, callback))
