import pytest
import torch


pl = pytest.importorskip(
    "lightning.pytorch", reason="needs Lightning: nox -s ecosystem installs it"
)
runs = pytest.importorskip("tests.integration.lightning_runs")
EMACallback = pytest.importorskip("modkit.integrations.lightning").EMACallback

pytestmark = [
    pytest.mark.distributed,
    # Advice about loaders and checkpoints.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]


def fit_on_two(folder, *callbacks, strategy="ddp_fork", ema=None, **options):
    """Train on two processes; return the model and what each process has reported."""
    folder.mkdir(exist_ok=True)
    ema = EMACallback(decay=0.9) if ema is None else ema
    report = runs.Report(folder, ema)
    net, _, _ = runs.fit(
        folder, *callbacks, ema=ema, after=[report], devices=2, strategy=strategy, **options
    )
    return net, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("place", runs.PLACES)
def test_two_processes_resume(place, tmp_path) -> None:
    """Each process ends in the bits of the run that went through; the averages of both are equal."""
    saver = runs.Saver(tmp_path)
    _, through = fit_on_two(tmp_path / "through", saver, accumulate_grad_batches=2)
    path = tmp_path / f"{place}.ckpt"
    _, resumed = fit_on_two(tmp_path / "resumed", resume=path, accumulate_grad_batches=2)

    assert [one["numbers"] for one in resumed] == [one["numbers"] for one in through]
    assert torch.equal(through[0]["average"], through[1]["average"])
    assert all(torch.equal(one["seen"], one["average"]) for one in through)
    assert [one["step"] for one in through] == [runs.BATCHES, runs.BATCHES]


def test_spawned_processes_bring_the_average_home(tmp_path) -> None:
    """The callback stays behind with its process, and the model comes back with the average."""
    ema = EMACallback(decay=0.9, swap_to_average_at_end=True)
    net, reports = fit_on_two(tmp_path / "spawned", strategy="ddp_spawn", ema=ema)

    assert torch.equal(net.net[0].weight, reports[0]["average"])
    assert ema.ema is None
