import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import modkit
from modkit.distributed import load_averages
from tests.integration.lightning import runs
from tests.integration.lightning.runs import QUIET, EMACallback, pl


strategies = pl.strategies
pytestmark = [pytest.mark.distributed, QUIET]
ROOT = Path(__file__).parents[3]


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
    subprocess.run(
        [sys.executable, "-m", "tests.integration.lightning.spawned", str(tmp_path)],
        check=True,
        cwd=ROOT,
        timeout=480,
    )
    found = {}
    for name in ("whole", "resumed"):
        reports = [torch.load(tmp_path / name / f"{i}.pt", weights_only=True) for i in (0, 1)]
        end = torch.load(tmp_path / name / "end", weights_only=True)
        found[name] = [one["numbers"] for one in reports]

        assert torch.equal(end["weight"], reports[0]["average"])
        assert end["stayed"]
    assert found["resumed"] == found["whole"]


# Sharded models.


def enter_rank(rank, port) -> None:
    """Set what torchrun sets in each of two processes."""
    environment = {"LOCAL_RANK": rank, "RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2}
    environment |= {"LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "test"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in environment.items()})


def on_two_ranks(function, folder, *arguments) -> None:
    """Run a function on two ranks, with a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.start_processes(function, (folder, port, *arguments), nprocs=2, start_method="fork")


def run_sharded(rank, folder, port, options) -> None:
    """Run in each of two processes: train through, then go on from each place."""
    enter_rank(rank, port)
    sharded = {"save_distributed_checkpoint": options.pop("save_distributed_checkpoint")}

    def fit(name, *others, **arguments):
        place = folder / name
        place.mkdir(exist_ok=True)
        ema = EMACallback(decay=0.9, **options)
        strategy = strategies.ModelParallelStrategy(2, 1, process_group_backend="gloo", **sharded)
        report = runs.Report(place, ema)
        both = {"strategy": strategy, "devices": 2, "model": runs.Sharded()}
        runs.fit(place, *others, ema=ema, after=[report], **both, **arguments)

    fit("through", runs.Saver(folder))
    for place in runs.PLACES:
        fit(f"from-{place}", resume=folder / f"{place}.ckpt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("precision", "save_distributed_checkpoint"), [("fp64", True), ("fp32", False)]
)
def test_a_model_that_is_split_up(precision, save_distributed_checkpoint, tmp_path) -> None:
    """Validation sees the average, and a run resumes with every bit, from files of either kind."""
    options = {
        "precision": precision,
        "save_distributed_checkpoint": save_distributed_checkpoint,
    }
    on_two_ranks(run_sharded, tmp_path, options)

    def report(name, rank):
        return torch.load(tmp_path / name / f"{rank}.pt", weights_only=True)

    for rank in 0, 1:
        through = report("through", rank)
        assert through["step"] == 2 * runs.BATCHES
        assert torch.equal(through["seen"], through["average"].float())
        for place in runs.PLACES:
            assert report(f"from-{place}", rank)["numbers"] == through["numbers"]
    assert report("through", 0)["numbers"] != report("through", 1)["numbers"]
    if save_distributed_checkpoint:
        # The averages are shards too, and load on one rank.
        ema = modkit.EMA(runs.Sharded(), decay=0.9, precision=precision)
        with pytest.warns(UserWarning, match="its training weights are loaded"):
            load_averages(ema, tmp_path / "epoch-end.ckpt/ema")
        assert ema.n_averaged == runs.BATCHES
        assert "averages" not in torch.load(tmp_path / "epoch-end.ckpt/meta.pt")["callbacks"]
    else:
        check_file(tmp_path / "epoch-end.ckpt")


def check_file(file) -> None:
    """Assert that one file of Lightning loads into the model without the callback, as the average."""
    saved = torch.load(file, weights_only=True)
    average = saved["callbacks"]["EMACallback"]["ema"]["averages"][0]["tensors"]
    loaded = runs.Sharded()
    loaded.load_state_dict(saved["state_dict"])

    assert torch.equal(loaded.net[0].weight, average["net.0.weight"])
    assert not torch.equal(
        saved["callbacks"]["EMACallback"]["raw"]["net.0.weight"], average["net.0.weight"]
    )


def test_the_older_way_to_split_up_is_refused() -> None:
    """Lightning runs FSDPStrategy on accelerators alone, and the callback refuses it there."""
    with pytest.raises(Exception, match=r"requires a GPU|GPU accelerator"):
        pl.Trainer(accelerator="cpu", strategy="fsdp", logger=False)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._accelerator_connector.strategy = strategies.FSDPStrategy()
    with pytest.raises(TypeError, match=r"flattens parameters.*fully_shard.*ModelParallelStrategy"):
        EMACallback().on_fit_start(trainer, runs.Net())
