import signal

import pytest
import torch

from modkit import migrations as mig
from tests.integration.lightning import runs
from tests.integration.lightning.runs import QUIET, EMACallback, callbacks, pl


plugins = pl.plugins
pytestmark = QUIET


# Optimizers.


@pytest.mark.parametrize(
    ("include", "updates"), [(None, 2 * runs.BATCHES), ("critic.*", 2 * runs.BATCHES), ("net.*", 6)]
)
def test_batches_count_in_which_an_averaged_network_steps(include, updates, tmp_path) -> None:
    """Several steps in a batch are one update; steps of excluded networks do not count."""
    ema = EMACallback(decay=0.9, include=include)
    runs.fit(tmp_path, model=runs.Adversaries(discriminator_steps=3), ema=ema)

    assert ema.ema.step == updates


# Precision.


def half_precision_with_a_scaler():
    """Return what Lightning allows of 16-mixed on a processor: its plugin, with torch's scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    return plugins.MixedPrecision("16-mixed", "cpu", scaler)


def precision_of(name: str) -> dict:
    """Return the options of a trainer."""
    if name == "16-mixed":
        return {"plugins": [half_precision_with_a_scaler()]}
    return {"precision": name}


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_every_precision_of_a_trainer_resumes(precision, tmp_path) -> None:
    """The resumed run ends in the bits of the one that went through; the average has 32 of them."""
    saver = runs.Saver(tmp_path)
    through = runs.fit(tmp_path, saver, **precision_of(precision))
    resumed = runs.fit(tmp_path, resume=tmp_path / "mid-epoch.ckpt", **precision_of(precision))

    assert runs.average_of(through[1]).dtype == torch.float32
    assert runs.numbers_of(*resumed[:2]) == runs.numbers_of(*through[:2])


def test_a_step_that_the_scaler_leaves_out_is_none(tmp_path) -> None:
    """Lightning counts the batch whose gradients are not finite, and the averages do not."""

    class Overflowing(runs.Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (torch.inf if batch_idx == 2 else 1.0)

    _, ema, trainer = runs.fit(tmp_path, model=Overflowing(), **precision_of("16-mixed"))

    assert trainer.global_step == 2 * runs.BATCHES
    assert ema.ema.step == 2 * runs.BATCHES - 2


# Faults.


@pytest.fixture
def _interrupts():
    """Put the handler back that Lightning replaces when it is interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


# There is no checkpoint yet to go on from.
@pytest.mark.filterwarnings("ignore:.*ckpt_path=")
@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize(("error", "seen"), [(KeyError, KeyError), (KeyboardInterrupt, SystemExit)])
def test_an_error_in_a_validation_leaves_all_intact(error, seen, tmp_path) -> None:
    """Weights and averages are those of the moment, and the checkpoint of the error goes on exactly."""
    through = runs.fit(tmp_path, max_epochs=3)
    ema = EMACallback(decay=0.9)
    net, watch = runs.Failing(error), runs.Watch(ema)
    saver = callbacks.OnExceptionCheckpoint(tmp_path, "error")
    with pytest.raises(seen):
        runs.fit(tmp_path, saver, model=net, ema=ema, after=[watch], max_epochs=3)
    saved = torch.load(tmp_path / "error.ckpt", weights_only=True)
    resumed = runs.fit(tmp_path, resume=tmp_path / "error.ckpt", max_epochs=3)

    assert torch.equal(net.seen["validate"][-1], watch.averages[-1])
    assert torch.equal(net.net[0].weight, watch.raw[-1])
    assert torch.equal(runs.average_of(ema), watch.averages[-1])
    assert torch.equal(saved["state_dict"]["net.0.weight"], watch.averages[-1])
    assert runs.numbers_of(*resumed[:2]) == runs.numbers_of(*through[:2])


def test_an_evaluation_that_somebody_stopped_is_ended(tmp_path) -> None:
    """A training step never sees the average, even if the end of an evaluation was not reported."""
    net, ema, _ = runs.fit(tmp_path)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    trainer = runs.trainer_for(tmp_path)
    trainer.strategy.optimizers = [optimizer]
    ema.on_fit_start(trainer, net)
    ema.on_validation_start(trainer, net)
    inside = net.net[0].weight.clone()
    optimizer.step()

    assert torch.equal(inside, runs.average_of(ema))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


# The end of a fit, and the next one.


def test_the_average_can_be_the_model_at_the_end(tmp_path) -> None:
    """The last checkpoint of the run has both, the model has the average, and it can be undone."""
    last = callbacks.ModelCheckpoint(tmp_path, "last")
    ema = EMACallback(decay=0.9, swap_to_average_at_end=True)
    watch = runs.Watch(ema)
    net, _, _ = runs.fit(tmp_path, last, ema=ema, after=[watch])
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    at_the_end = net.net[0].weight.clone()
    ema.ema.restore()

    assert torch.equal(at_the_end, runs.average_of(ema))
    assert torch.equal(net.net[0].weight, watch.raw[-1])
    assert torch.equal(saved["callbacks"]["EMACallback"]["raw"]["net.0.weight"], watch.raw[-1])


@pytest.mark.parametrize("swaps", [False, True])
def test_a_second_fit_goes_on(swaps, tmp_path) -> None:
    """A second fit goes on from the training weights; another model gets a new average."""
    plain, net = runs.Net(), runs.Net()
    ema = EMACallback(decay=0.9, swap_to_average_at_end=swaps)
    for _ in range(2):
        runs.fit(tmp_path, model=plain, ema=pl.Callback())
        runs.fit(tmp_path, model=net, ema=ema)
    if swaps:
        ema.ema.restore()
    steps, other = ema.ema.step, runs.Net()
    runs.fit(tmp_path, model=other, ema=ema)

    assert all(map(torch.equal, net.state_dict().values(), plain.state_dict().values()))
    assert steps == 4 * runs.BATCHES
    assert ema.ema.step == 2 * runs.BATCHES
    assert ema.ema.model is other


def test_checkpoints_go_through_the_users_plugin(tmp_path) -> None:
    """A plugin that writes and removes checkpoints does so, with the average in what it gets."""
    written, removed = [], []

    class Own(plugins.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
            written.append(checkpoint["state_dict"]["net.0.weight"].clone())
            super().save_checkpoint(checkpoint, path, storage_options)

        def remove_checkpoint(self, path) -> None:
            removed.append(path)
            super().remove_checkpoint(path)

    best = callbacks.ModelCheckpoint(
        tmp_path, every_n_train_steps=1, save_weights_only=True, monitor="step", mode="max"
    )
    ema = EMACallback(decay=0.9)
    watch = runs.Watch(ema)
    runs.fit(tmp_path, best, ema=ema, after=[watch], plugins=[Own()], max_epochs=1)

    assert all(map(torch.equal, written, watch.averages))
    assert len(written) == runs.BATCHES
    assert len(removed) == runs.BATCHES - 1


@mig.declare({2: [mig.rename("net.**", "body.**")]})
class Renamed(runs.Net):
    """The network with its layers renamed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self._modules.pop("net")

    def __getattr__(self, name):
        return super().__getattr__("body" if name == "net" else name)


@pytest.mark.filterwarnings("ignore:.*ckpt_path=")
def test_a_resume_with_renamed_layers(tmp_path) -> None:
    """Averages and training weights migrate with the model, whose versions the checkpoint holds."""
    through = runs.fit(tmp_path, max_epochs=3)
    _, _, trainer = runs.fit(tmp_path, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "old.ckpt")
    saved = torch.load(tmp_path / "old.ckpt", weights_only=True)["state_dict"]
    resumed = runs.fit(tmp_path, model=Renamed(), resume=tmp_path / "old.ckpt", max_epochs=3)

    assert saved._metadata["net.1"]["version"] == 2
    assert runs.numbers_of(*resumed[:2]) == runs.numbers_of(*through[:2])
