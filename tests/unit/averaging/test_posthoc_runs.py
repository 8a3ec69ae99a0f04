"""Runs that share a folder of snapshots: resumed, repeated, or with other options."""

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modkit import posthoc
from modkit.averaging.posthoc import PostHocEMA
from modkit.errors import NameMismatchError
from modkit.schedules import Power, profile
from tests.cases import for_each
from tests.unit.averaging.recipes import gradients, network, sgd


WIDTH = 0.13


class Run:
    """A model whose weights walk at random, its averages, and the path of the weights."""

    def __init__(self, folder: Path, seed: int = 0, every: int = 100) -> None:
        self.model = nn.Linear(16, 4, bias=False)
        nn.init.constant_(self.model.weight, 0.0)
        self.generator = torch.Generator().manual_seed(seed)
        self.averages = PostHocEMA(self.model, folder, snapshot_every=every)
        self.path: list[Tensor] = []

    def train(self, steps: int) -> "Run":
        """Take steps."""
        for _ in range(steps):
            with torch.no_grad():
                noise = torch.randn(self.model.weight.shape, generator=self.generator)
                self.model.weight.add_(noise)
            self.path.append(self.model.weight.detach().double().clone())
            self.averages.update()
        return self

    def resumed(self, saved: "Run", folder: Path, seed: int, every: int = 100) -> "Run":
        other = Run(folder, seed, every)
        other.model.load_state_dict(saved.model.state_dict())
        other.averages.load_state_dict(saved.averages.state_dict())
        other.path = list(saved.path)
        return other

    def error(self, average: posthoc.Reconstruction) -> float:
        """Return the relative error to the exact average of the path, in float64."""
        weights = torch.tensor(profile(Power(WIDTH), average.step - 1), dtype=torch.float64)
        exact = torch.einsum("n,nij->ij", weights, torch.stack(self.path[: average.step]))
        found = average.averages["weight"].double()
        return float((found - exact).norm() / exact.norm())


def saved_at(run: Run, steps: int) -> Run:
    """Return a copy of a run after some steps; the run itself goes on."""
    run.train(steps)
    other = copy.copy(run)
    other.model = copy.deepcopy(run.model)
    other.path = list(run.path)
    state = copy.deepcopy(run.averages.state_dict())
    other.averages = PostHocEMA(other.model, run.averages.directory)
    other.averages.load_state_dict(state)
    return other


def clean(folder: Path) -> Run:
    """Train once."""
    return Run(folder).train(800)


def resumed_at(folder: Path, step: int, more: int, every: int = 100) -> Run:
    """Resume from a checkpoint, after which the run had gone on for 450 steps."""
    first = Run(folder)
    saved = saved_at(first, step)
    first.train(450)
    return first.resumed(saved, folder, seed=1, every=every).train(more)


def ends_sooner(folder: Path) -> Run:
    """Resume from an earlier checkpoint, and end sooner than before."""
    return resumed_at(folder, 550, 250)


def with_another_interval(folder: Path) -> Run:
    """Resume with another interval of snapshots."""
    return resumed_at(folder, 550, 250, every=50)


def resumed_twice(folder: Path) -> Run:
    """Resume from a checkpoint of the run, and then from an earlier one."""
    first = Run(folder)
    saved = saved_at(first, 350)
    first.resumed(saved_at(first, 300), folder, seed=1).train(350)
    return first.resumed(saved, folder, seed=2).train(450)


def before_its_first_snapshot(folder: Path) -> Run:
    """Resume from a checkpoint that does not know the id of the run yet."""
    return resumed_at(folder, 50, 750)


def from_a_pickle(folder: Path) -> Run:
    """Resume from pickles of the model and the averages."""
    run = Run(folder).train(550)
    content = pickle.dumps((run.model, run.averages))
    path = list(run.path)
    run.train(450)
    run.model, run.averages = pickle.loads(content)
    run.path = path
    return run.train(250)


WAYS = (clean, ends_sooner, with_another_interval, resumed_twice, before_its_first_snapshot)


@for_each("way", [*WAYS, from_a_pickle])
def test_a_folder_of_one_run(way: Any, tmp_path: Path) -> None:
    """Steps that a resume has given up have no part in any average, wherever that is asked for."""
    run = way(tmp_path)

    averages = [run.averages.reconstruct(WIDTH), posthoc.reconstruct(tmp_path, WIDTH)]
    assert [average.step for average in averages] == [800, 800]
    assert max(map(run.error, averages)) < 0.03


def test_a_run_that_ends_before_its_next_snapshot(tmp_path: Path) -> None:
    """The latest average is that of the last snapshot before the resume."""
    run = resumed_at(tmp_path, 850, 20)

    assert posthoc.reconstruct(tmp_path, WIDTH).step == 800
    assert min(path.name[:14] for path in (tmp_path / "abandoned").iterdir()) == "ema-0000000900"
    assert run.error(posthoc.reconstruct(tmp_path, WIDTH)) < 0.03


@for_each("seed", [0, 1])
def test_a_second_run_in_the_folder(seed: int, tmp_path: Path) -> None:
    """It is refused at its first update, new or resumed, also with the same weights."""
    first = Run(tmp_path / "first").train(800)
    before = sorted(path.name for path in (tmp_path / "first").iterdir())
    second = Run(tmp_path / "second", seed=2).train(900)
    new = Run(tmp_path / "first", seed)
    resumed = first.resumed(second, tmp_path / "first", seed)
    for run in (new, resumed):
        with pytest.raises(FileExistsError, match=r"has snapshots of another run, such as ema-"):
            run.train(1)

    assert (new.averages.step, resumed.averages.step) == (0, 900)
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == before


def test_runs_that_were_brought_together(tmp_path: Path) -> None:
    """Files of two runs are refused; those of one are chosen by their names."""
    runs = [Run(tmp_path / str(seed), seed=seed).train(800) for seed in range(2)]
    shutil.copytree(tmp_path / "1", tmp_path / "0", dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"of 2 runs, which the names of the files end with: '\w+"):
        posthoc.reconstruct(tmp_path / "0", WIDTH)

    for run in runs:
        files = (tmp_path / "0").glob(f"*-{run.averages.state_dict()['run']}.pt")
        assert run.error(posthoc.reconstruct(files, WIDTH)) < 0.03
    assert runs[0].error(runs[0].averages.reconstruct(WIDTH)) < 0.03


def test_adapters_alone(tmp_path: Path) -> None:
    """Snapshots hold what trains, and the average goes into a model with everything else."""
    net = network()
    net[0].requires_grad_(False)
    optimizer = sgd(net[1], net[3])
    averages = PostHocEMA(net, tmp_path, snapshot_every=4, trainable_only=True, precision="fp64")
    averages.attach(optimizer)
    for number in range(8):
        gradients(net, number)
        optimizer.step()
    averages.detach()
    result = averages.reconstruct(0.1)
    other = copy.deepcopy(net)
    nn.init.zeros_(other[3].weight)
    with pytest.raises(NameMismatchError, match=r"2 unexpected: 0\.weight.*strict=False"):
        result.copy_to(other)
    result.copy_to(other, strict=False)

    assert averages.step == 8
    assert {name.partition(".")[0] for name in (*result.averages, *result.buffers)} == {"1", "3"}
    assert {tensor.dtype for tensor in result.averages.values()} == {torch.float64}
    assert torch.equal(other[0].weight, net[0].weight)
    assert torch.equal(other[3].weight, result.averages["3.weight"].float())
    assert repr(result).startswith("Reconstruction(sigma_rel=0.1, step=8, ")


def test_another_rank_that_is_ahead_keeps_its_snapshots(tmp_path: Path) -> None:
    """Ranks write the same files: what one has written since this one began is not given up."""
    behind, ahead = Run(tmp_path), Run(tmp_path)
    ahead.train(800)
    behind.train(100)

    assert posthoc.reconstruct(tmp_path, WIDTH).step == 800
    assert ahead.error(posthoc.reconstruct(tmp_path, WIDTH)) < 0.03
    assert not (tmp_path / "abandoned").exists()
