"""Lightning's tuners save the model before they run, and load it after."""

import pytest
import torch

from tests.integration.lightning import runs
from tests.integration.lightning.runs import EMACallback, pl


tuner = pytest.importorskip("lightning.pytorch.tuner")

pytestmark = [
    runs.QUIET,
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning"),
]


class Tunable(runs.Net):
    """A network that makes loaders of the batch size that a tuner chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 8
        self.lr = 0.05

    def train_dataloader(self):
        """Return batches of the data."""
        data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class LaterFinder(pl.callbacks.LearningRateFinder):
    """Searches a learning rate at the start of the second epoch, as in Lightning's docs."""

    def on_fit_start(self, trainer, pl_module) -> None:
        """Wait."""

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        """Search."""
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def trained(folder, *, swap_to_average_at_end: bool = False):
    """Train, and return what took part, with the training weights and the average."""
    net = Tunable()
    ema = EMACallback(decay=0.9, swap_to_average_at_end=swap_to_average_at_end)
    trainer = runs.trainer_for(folder, ema)
    trainer.fit(net)
    stored = ema.ema.training_weights() or dict(net.named_parameters())
    return net, ema, trainer, stored["net.0.weight"].detach().clone(), average(ema)


def average(ema) -> torch.Tensor:
    """Return a copy of the average of the first weight."""
    return runs.average_of(ema).clone()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_batch_size_finder_in_an_evaluation(tmp_path, stage: str, is_first: bool) -> None:
    """The evaluation after it sees the average, and the training weights are restored."""
    net, ema, trainer, raw, expected = trained(tmp_path)
    finder = pl.callbacks.BatchSizeFinder(max_trials=2, steps_per_trial=1)
    trainer.callbacks = [finder, ema] if is_first else [ema, finder]

    getattr(trainer, stage)(net)

    assert torch.equal(net.seen[stage][-1], expected)
    assert torch.equal(net.net[0].weight, raw)
    assert torch.equal(average(ema), expected)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tuner_in_the_middle_of_a_fit(tmp_path, is_first: bool) -> None:
    """The steps after it are averaged, and its own are not."""
    ema, finder = EMACallback(decay=0.9), LaterFinder(num_training_steps=3, update_attr=False)
    trainer = runs.trainer_for(tmp_path, *([finder, ema] if is_first else [ema, finder]))

    trainer.fit(Tunable())

    assert ema.ema.n_averaged == trainer.global_step == 12
