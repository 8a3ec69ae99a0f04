import functools

import pytest
import torch

import modkit
from tests.helpers import freeze
from tests.integration.lightning import runs
from tests.integration.lightning.runs import QUIET, EMACallback, callbacks, pl
from tests.unit.averaging.recipes import PRECISIONS


pytestmark = QUIET


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Train without a stop, with a checkpoint in each place; return all numbers and the folder."""

    @functools.cache
    def run(precision: str, accumulate: int):
        folder = tmp_path_factory.mktemp("run")
        ema = callback_with(precision)
        net, ema, _ = runs.fit(
            folder, runs.Saver(folder), ema=ema, accumulate_grad_batches=accumulate
        )
        return runs.numbers_of(net, ema), folder

    return run


def callback_with(precision: str):
    """Return a callback with several averages, updated at each second step."""
    schedule = [0.9, modkit.schedules.CountWarmup(0.99)]
    return EMACallback(schedule=schedule, precision=precision, update_every=2, index=1)


@pytest.mark.parametrize(
    ("precision", "accumulate", "place"),
    [
        *(("fp32", accumulate, place) for accumulate in (1, 2) for place in runs.PLACES),
        *((precision, 1, "evaluating") for precision in PRECISIONS if precision != "fp32"),
    ],
)
def test_resuming_is_as_not_stopping(precision, accumulate, place, tmp_path, whole_run) -> None:
    """Wherever it was saved, the resumed run ends in the bits of the one that went through."""
    through, folder = whole_run(precision, accumulate)
    net, ema, _ = runs.fit(
        tmp_path,
        ema=callback_with(precision),
        resume=folder / f"{place}.ckpt",
        accumulate_grad_batches=accumulate,
    )

    assert runs.numbers_of(net, ema) == through


# Evaluation.


def test_validation_sees_the_average(tmp_path) -> None:
    """The sanity check sees the training weights, each validation the latest average."""
    ema = EMACallback(decay=0.9)
    watch = runs.Watch(ema)
    untrained = runs.Net().net[0].weight
    model = runs.Net()
    runs.fit(tmp_path, model=model, ema=ema, after=[watch], val_check_interval=2)
    sanity, validations = model.seen["validate"][:2], model.seen["validate"][2:]

    assert all(torch.equal(seen, untrained) for seen in sanity)
    assert len(validations) == 2 * 6
    assert all(map(torch.equal, validations[::2], watch.averages[1::2]))
    assert all(map(torch.equal, validations[1::2], watch.averages[1::2]))
    assert torch.equal(model.net[0].weight, watch.raw[-1])


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_that_were_loaded_are_evaluated(weights_only, tmp_path) -> None:
    """A test of an older checkpoint has its average, not that of the end of the run."""
    ema = EMACallback(decay=0.9)
    watch = runs.Watch(ema)
    checkpoint = callbacks.ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1, save_weights_only=weights_only
    )
    net, ema, trainer = runs.fit(tmp_path, checkpoint, ema=ema, after=[watch])
    trainer.test(net, runs.Batches(1), ckpt_path=tmp_path / "step=4.ckpt", verbose=False)
    trainer.test(net, runs.Batches(1), verbose=False)

    assert all(torch.equal(seen, watch.averages[3]) for seen in net.seen["test"])
    assert len(net.seen["test"]) == 2


# Checkpoints.


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_is_the_average(weights_only, tmp_path) -> None:
    """The best checkpoint loads without the callback, into the average that was the best."""
    best = callbacks.ModelCheckpoint(
        tmp_path, "best", monitor="loss", mode="min", save_weights_only=weights_only
    )
    net, _, _ = runs.fit(tmp_path, best)
    loaded = runs.Net.load_from_checkpoint(best.best_model_path).eval()
    with torch.no_grad():
        losses = [loaded.net(b).square().mean() for b in runs.Batches(2, first_seed=1000)]

    assert not torch.equal(loaded.net[0].weight, net.net[0].weight)
    torch.testing.assert_close(best.best_model_score, sum(losses) / 2)


def test_a_checkpoint_without_averages_is_told(tmp_path) -> None:
    """Averaging starts anew from its weights, with a warning."""
    _, _, trainer = runs.fit(tmp_path, ema=pl.Callback())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match="holds no averages, so averaging starts anew"):
        _, ema, _ = runs.fit(tmp_path, resume=tmp_path / "plain.ckpt", max_epochs=3)

    assert ema.ema.n_averaged == runs.BATCHES


@pytest.mark.parametrize("every", [1, 5])
def test_going_on_from_lightnings_own_averages(every, tmp_path) -> None:
    """Training weights, averages and the steps until the next update are those that were saved."""

    class Start(pl.Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            self.raw = pl_module.net[0].weight.detach().clone()
            self.average = runs.average_of(ema).clone()
            self.steps = trainer.global_step, ema.ema.step
            self.n_averaged = ema.ema.n_averaged

    theirs = callbacks.EMAWeightAveraging(decay=0.9, use_buffers=False, update_every_n_steps=every)
    runs.fit(tmp_path, ema=theirs, after=[runs.Saver(tmp_path)])
    saved = torch.load(tmp_path / "mid-epoch.ckpt", weights_only=True)
    schedule = modkit.schedules.PerUpdate(0.9)
    start, ema = Start(), EMACallback(schedule=schedule, update_every=every)
    # Lightning wants its own callback back.
    with pytest.warns(UserWarning, match="Please add the following callbacks"):
        runs.fit(tmp_path, start, ema=ema, resume=tmp_path / "mid-epoch.ckpt")

    steps = start.steps[0]
    assert torch.equal(start.raw, saved["current_model_state"]["net.0.weight"])
    assert torch.equal(start.average, saved["state_dict"]["net.0.weight"])
    assert every == 1 or steps % every != 1
    assert start.steps == (steps, steps)
    assert start.n_averaged == 1 + (steps - 1) // every
    assert ema.ema.n_averaged == 1 + (2 * runs.BATCHES - 1) // every


def test_batch_normalization_statistics_of_the_average(tmp_path) -> None:
    """`update_bn` computes them as torch does; checkpoints hold them, and training is not affected."""
    net, ema, trainer = runs.fit(tmp_path)
    expected = ema.ema.averaged_model()
    torch.optim.swa_utils.update_bn(runs.Batches(), expected.net)
    before = freeze(dict(net.state_dict()))
    net.forward = net.net.forward
    ema.ema.update_bn(runs.Batches())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]

    assert freeze(dict(saved)) == freeze(dict(expected.state_dict()))
    assert freeze(dict(net.state_dict())) == before
