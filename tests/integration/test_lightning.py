import functools

import pytest
import torch

import modkit
from tests.unit.averaging.recipes import PRECISIONS


pl = pytest.importorskip(
    "lightning.pytorch", reason="needs Lightning: nox -s ecosystem installs it"
)
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
runs = pytest.importorskip("tests.integration.lightning_runs")
EMACallback = pytest.importorskip("modkit.integrations.lightning").EMACallback

pytestmark = [
    # Lightning's own: of torch's trees, and advice about loaders and checkpoints.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


def average_of(callback, name: str = "net.0.weight") -> torch.Tensor:
    """Return one average of a callback."""
    return dict(callback.ema.named_averages(callback.index))[name]


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


@pytest.mark.parametrize("place", runs.PLACES)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
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
