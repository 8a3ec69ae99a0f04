import pytest
import torch

import modkit
from tests.integration.lightning import runs
from tests.integration.lightning.runs import QUIET, EMACallback, pl


pytestmark = QUIET


def callback_with(precision="fp32"):
    """Return a callback with two averages, of which the first is evaluated and saved."""
    schedule = [0.5, modkit.schedules.CountWarmup(0.99)]
    return EMACallback(schedule=schedule, precision=precision)


def loss_of(model) -> torch.Tensor:
    """Return the mean loss of a model on the batches of a validation."""
    model.eval()
    with torch.no_grad():
        losses = [model.net(batch).square().mean() for batch in runs.Batches(2, first_seed=1000)]
    return torch.stack(losses).mean()


def weights(model) -> dict[str, torch.Tensor]:
    """Return a copy of what a model holds."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def holds(model, expected) -> bool:
    """Return True if a model holds these values, bitwise."""
    return all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


class Comparing(runs.Net):
    """Logs the loss of two averages and of the training weights in each validation."""

    @property
    def ema(self):
        """The callback of the run."""
        return next(one for one in self.trainer.callbacks if isinstance(one, EMACallback))

    def validation_step(self, batch, batch_idx) -> None:
        """Log each loss under a prefix of its own."""
        self.log("ema/loss", self.training_step(batch, batch_idx))
        with self.ema.evaluating(index=1):
            self.log("slow/loss", self.training_step(batch, batch_idx))
        with self.ema.evaluating_training_weights():
            self.log("raw/loss", self.training_step(batch, batch_idx))
        self.look("validate")


@pytest.mark.parametrize("precision", ["fp32", "stochastic"])
def test_several_averages_in_one_validation(precision, tmp_path) -> None:
    """Metrics with a prefix are those of each average, and the run is that without them."""
    logged = []

    class Compare(pl.Callback):
        def on_validation_epoch_end(self, trainer, pl_module) -> None:
            if trainer.sanity_checking:
                return
            ema = callback.ema
            models = {"ema": ema.averaged_model(0), "slow": ema.averaged_model(1)}
            models["raw"] = ema.averaged_model()
            models["raw"].load_state_dict({**net.state_dict(), **ema.training_weights()})
            expected = {f"{name}/loss": loss_of(model) for name, model in models.items()}
            logged.append(({**trainer.callback_metrics}, expected))

    callback = callback_with(precision)
    net = Comparing()
    runs.fit(tmp_path, model=net, ema=callback, after=[Compare()], val_check_interval=3)
    reference, reference_ema, _ = runs.fit(tmp_path, ema=callback_with(precision))

    assert runs.numbers_of(net, callback) == runs.numbers_of(reference, reference_ema)
    assert len(logged) == 4
    for found, expected in logged:
        for name, loss in expected.items():
            torch.testing.assert_close(found[name], loss)
    final = logged[-1][0]
    assert len({final[name].item() for name in ("ema/loss", "slow/loss", "raw/loss")}) == 3


def test_blocks_around_validate(tmp_path) -> None:
    """`validate`, `test` and `predict` inside a block see its weights, and restore nothing else."""
    net, ema, trainer = runs.fit(tmp_path, ema=callback_with())
    raw = weights(net)
    net.net[1].eval()
    modes = [module.training for module in net.modules()]
    blocks = [
        (ema.evaluating(), ema.ema.averaged_model(0)),
        (ema.evaluating(index=1), ema.ema.averaged_model(1)),
        (ema.evaluating_training_weights(), ema.ema.averaged_model(0)),
    ]
    blocks[2][1].load_state_dict(raw)
    for block, expected in blocks:
        with block as model:
            assert model is net
            assert not any(module.training for module in model.modules())
            metrics = trainer.validate(net, runs.Batches(2, first_seed=1000), verbose=False)
            trainer.test(net, runs.Batches(1), verbose=False)
            outputs = trainer.predict(net, runs.Batches(1))
            trainer.save_checkpoint(tmp_path / "inside.ckpt")
            inside = holds(net, expected.state_dict())
        saved = torch.load(tmp_path / "inside.ckpt", weights_only=True)

        assert inside
        assert metrics[0]["loss"] == pytest.approx(loss_of(expected).item())
        assert torch.equal(net.seen["test"][-1], expected.net[0].weight)
        assert torch.equal(outputs[0], expected.net(next(iter(runs.Batches(1)))))
        assert torch.equal(saved["state_dict"]["net.0.weight"], runs.average_of(ema))
        assert torch.equal(
            saved["callbacks"]["EMACallback"]["raw"]["net.0.weight"], raw["net.0.weight"]
        )
        assert holds(net, raw)
    assert [module.training for module in net.modules()] == modes


@pytest.mark.parametrize("name", ["evaluating", "evaluating_training_weights", "applied"])
def test_fitting_inside_a_block(name, tmp_path) -> None:
    """A `fit` where the model may hold the average is refused before it loads or changes anything."""
    net, ema, trainer = runs.fit(tmp_path, ema=callback_with())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    raw, averages = weights(net), weights(ema.ema.averaged_model())
    block = ema.ema.applied() if name == "applied" else getattr(ema, name)()
    again = runs.trainer_for(tmp_path, ema, max_epochs=3)
    with block, pytest.raises(RuntimeError, match=r"fit\(\) was called inside evaluating\(\)"):
        again.fit(net, runs.Batches(), ckpt_path=tmp_path / "end.ckpt")
    unharmed = holds(net, raw) and holds(ema.ema.averaged_model(), averages)
    again.fit(net, runs.Batches(), ckpt_path=tmp_path / "end.ckpt")

    assert unharmed
    assert ema.ema.n_averaged == 3 * runs.BATCHES
