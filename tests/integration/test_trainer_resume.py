import io
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from modkit import schedules
from tests.integration.trainers import (
    At,
    EMACallback,
    average,
    equal,
    gpt2,
    normalized,
    trainer,
    weights,
)


ROOT = Path(__file__).parents[2]
# Two epochs of 6 batches each.
STEPS = {1: (1, 4, 6, 9, 12), 2: (1, 2, 3, 5, 6), 4: (1, 2, 3, 4)}
PRECISIONS = ["fp32", "fp64", "same", "stochastic", "compensated"]


def result(run: Any, callback: EMACallback) -> dict[str, Any]:
    """Return the raw weights, the averages and the counts at the end of a run."""
    ema = callback.ema
    assert ema is not None
    averages = [dict(ema.named_averages(index)) for index in range(len(ema.schedules))]
    return {
        **{f"raw.{name}": value for name, value in weights(run.model).items()},
        **{f"{i}.{name}": value for i, one in enumerate(averages) for name, value in one.items()},
        "counts": torch.tensor([ema.step, ema.n_averaged, run.state.global_step]),
    }


def model_of(precision: str) -> Any:
    """Return the model that a precision is for: of 16 bits for those that round or compensate."""
    model = gpt2()
    return model.bfloat16() if precision in {"stochastic", "compensated"} else model


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what runs without interruption, saving at each step, once for each kind."""

    @cache
    def run(precision: Any, accumulation: int, save: Any) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("whole")
        callback = EMACallback(0.9, precision=precision, save=save)
        whole = trainer(
            folder,
            callback,
            model=model_of(precision),
            gradient_accumulation_steps=accumulation,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=2,
        )
        whole.train()
        return folder, result(whole, callback)

    return run


@pytest.mark.parametrize("save", ["average", "raw"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("accumulation", "step"), [(a, step) for a, steps in STEPS.items() for step in steps]
)
def test_resume(
    whole_run: Any, tmp_path: Path, accumulation: int, step: int, precision: Any, save: Any
) -> None:
    """Weights, averages and counts after a resume are the bits of a run without interruption."""
    folder, wanted = whole_run(precision, accumulation, save)
    callback = EMACallback(0.9, precision=precision, save=save)
    run = trainer(
        tmp_path,
        callback,
        model=model_of(precision),
        gradient_accumulation_steps=accumulation,
        eval_strategy="steps",
        eval_steps=2,
    )

    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))

    assert equal(result(run, callback), wanted)


@pytest.mark.parametrize("save", ["average", "raw"])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": schedules.InverseGamma()},
        {"schedule": [0.5, schedules.Window(3), schedules.Equal()], "index": 2},
        {"decay": 0.9, "update_after_step": 2, "update_every": 3, "buffers": "average"},
        {"decay": 0.9, "buffers": "ignore", "exclude": "head.*"},
        {"decay": 0.9, "device": "cpu", "asynchronous": True},
        {"schedule": schedules.BEMA()},
    ],
    ids=["inverse gamma", "several", "now and then", "some", "asynchronous", "BEMA"],
)
def test_resume_with_options(tmp_path: Path, options: dict[str, Any], save: Any) -> None:
    """The options of `EMA`, with running statistics, resume to the same bits at each step."""
    callback = EMACallback(**options, save=save)
    whole = trainer(tmp_path, callback, model=normalized(), save_strategy="steps", save_steps=1)
    whole.train()
    wanted = result(whole, callback)

    for step in (1, 5, 6, 8):
        again = EMACallback(**options, save=save)
        run = trainer(tmp_path / "again", again, model=normalized())
        run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))

        assert equal(result(run, again), wanted)


@pytest.mark.parametrize("save", ["average", "raw"])
@pytest.mark.parametrize("event", ["on_prediction_step", "on_evaluate"])
def test_a_checkpoint_while_evaluating(tmp_path: Path, event: str, save: Any) -> None:
    """A checkpoint that another callback saves in an evaluation holds and resumes the same."""

    def options() -> dict[str, Any]:
        return {"eval_strategy": "steps", "eval_steps": 4}

    def save_now(step: int) -> None:
        held.append(average(callback.ema) if save == "average" else raw[-1])
        whole.save_model(tmp_path / "model")
        whole._save_checkpoint(whole.model, None)

    held: list[Any] = []
    raw: list[Any] = []
    callback = EMACallback(0.9, save=save)
    note = At("on_step_end", lambda _: raw.append(weights(whole.model)), 4)
    whole = trainer(tmp_path, note, callback, At(event, save_now, 4), **options())
    whole.train()
    again = EMACallback(0.9, save=save)
    run = trainer(tmp_path / "again", again, **options())
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    assert equal(result(run, again), result(whole, callback))
    for folder in ("checkpoint-4", "model"):
        loaded = type(run.model).from_pretrained(tmp_path / folder)
        assert equal(weights(loaded), held[-1])


def test_the_last_checkpoint(tmp_path: Path) -> None:
    """`resume_from_checkpoint=True` goes on from the last checkpoint of the folder."""
    options = {"save_strategy": "steps", "save_steps": 4, "eval_on_start": True}
    callback = EMACallback(0.9)
    whole = trainer(tmp_path, callback, **options)
    whole.train()
    again = EMACallback(0.9)
    stopped = trainer(tmp_path / "again", again, At("on_step_end", fail, 6), **options)
    with pytest.raises(RuntimeError, match="out of paper"):
        stopped.train()
    seen: list[Any] = []
    see = At("on_evaluate", lambda _: seen.append(weights(run.model)), 4)
    run = trainer(tmp_path / "again", again, see, **options)

    run.train(resume_from_checkpoint=True)

    assert equal(result(run, again), result(whole, callback))
    saved = type(run.model).from_pretrained(tmp_path / "checkpoint-4")
    assert equal(seen[0], weights(saved))
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer(tmp_path / "none", EMACallback()).train(resume_from_checkpoint=True)


def test_a_resume_keeps_the_best_average(tmp_path: Path) -> None:
    """A best average of before the interruption is the one that is loaded at the end."""
    options = {
        "learning_rate": 1.0,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
    }
    callback, again = EMACallback(0.8), EMACallback(0.8)
    whole = trainer(tmp_path, callback, **options)
    whole.train()
    best = whole.state.best_global_step
    run = trainer(tmp_path / "again", again, **options)
    run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{best + 2}"))

    assert equal(weights(run.model), weights(whole.model))
    assert equal(average(again.ema), average(callback.ema))
    assert run.evaluate()["eval_loss"] == whole.state.best_metric


def test_a_checkpoint_without_averages(tmp_path: Path) -> None:
    """It is gone on from with a warning, and averaging starts anew from its weights."""
    plain = trainer(tmp_path, save_strategy="steps", save_steps=5)
    plain.train()
    callback = EMACallback(0.9)
    run = trainer(tmp_path / "again", callback)

    with pytest.warns(UserWarning, match="the checkpoint holds no averages"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))

    assert equal(weights(run.model), weights(plain.model))
    assert callback.ema.n_averaged == 7


def test_a_checkpoint_with_averages_needs_no_callback(tmp_path: Path) -> None:
    """A plain Trainer goes on from it; with `save="raw"` to the weights of the whole run."""
    whole = trainer(tmp_path, EMACallback(0.9, save="raw"), save_strategy="steps", save_steps=5)
    whole.train()
    trainer(tmp_path / "b", EMACallback(0.9), save_strategy="steps", save_steps=5).train()
    run, from_average = trainer(tmp_path / "again"), trainer(tmp_path / "again")

    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    from_average.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-5"))

    assert equal(weights(run.model), weights(whole.model))
    assert from_average.state.global_step == 12


def test_another_way_to_save(tmp_path: Path) -> None:
    """Whether the model of a checkpoint is the average or not, both go on to the same bits."""
    runs = []
    for save, other in (("average", "raw"), ("raw", "average")):
        first: Any = EMACallback(0.9, save=save)
        trainer(tmp_path / save, first, save_strategy="steps", save_steps=5).train()
        callback: Any = EMACallback(0.9, save=other)
        run = trainer(tmp_path / "again", callback)
        run.train(resume_from_checkpoint=str(tmp_path / save / "checkpoint-5"))
        runs.append(result(run, callback))

    assert equal(runs[0], runs[1])


def fail(step: int) -> None:
    """Raise an error of one's own."""
    raise RuntimeError("out of paper")


def interrupt(step: int) -> None:
    """Do what Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("call", "error"), [(fail, RuntimeError), (interrupt, KeyboardInterrupt)])
@pytest.mark.parametrize("where", ["on_prediction_step", "on_evaluate", "compute_metrics"])
def test_errors_in_an_evaluation(tmp_path: Path, where: str, call: Any, error: Any) -> None:
    """After an error in an evaluation the raw weights are in place, and the last checkpoint resumes."""

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
    assert not callback.ema._handles
    assert equal(result(again, third), result(whole, second))


def test_errors_in_what_the_user_calls(tmp_path: Path) -> None:
    """An error in `evaluate`, `predict` or `save_model` after training leaves the raw weights."""
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
    """Change one bit of a raw weight."""
    raw = torch.load(io.BytesIO(content), weights_only=True)["raw"]
    place = content.index(raw["transformer.wte.weight"].numpy().tobytes())
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def empty(content: bytes) -> bytes:
    """Lose all."""
    return b""


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_a_damaged_file(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """A damaged file of averages is an error that says what is lost and what can be done."""
    trainer(tmp_path, EMACallback(0.9), save_strategy="steps", save_steps=4).train()
    path = tmp_path / "checkpoint-4" / "ema.pt"
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(ValueError, match=r"ema\.pt cannot be read .*raw weights") as caught:
        trainer(tmp_path, EMACallback(0.9)).train(resume_from_checkpoint=str(path.parent))
    assert "goes on from its model" in str(caught.value)
    path.unlink()
    with pytest.warns(UserWarning, match="holds no averages"):
        trainer(tmp_path, EMACallback(0.9)).train(resume_from_checkpoint=str(path.parent))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("global_step", 5, "was written at step 5, and the checkpoint at step 4"),
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
    """Where no more can be written, the raw weights stay, and so does an older file of that name."""
    callback = EMACallback(0.9)
    run = trainer(tmp_path, callback, save_strategy="steps", save_steps=12)
    run.train()
    raw, path = weights(run.model), tmp_path / "checkpoint-12" / "ema.pt"
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises((OSError, RuntimeError)), callback.saving(run.model):
            callback.write_state(path.parent, 12)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir() if "ema" in one.name] == ["ema.pt"]
    assert equal(weights(run.model), raw)


CHILD = """
import sys, time
from pathlib import Path
import torch
from modkit.integrations.transformers import EMACallback
from tests.integration.trainers import trainer

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
    whole = trainer(tmp_path / "whole", callback := EMACallback(0.9), **options)
    whole.train()
    run = trainer(tmp_path / "again", again := EMACallback(0.9), **options)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "checkpoint-8" / "ema.pt").exists()
    assert equal(result(run, again), result(whole, callback))
