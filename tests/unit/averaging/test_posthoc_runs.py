"""Runs that share a folder of snapshots: resumed, repeated, or with other options."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit import posthoc
from modkit.averaging.posthoc import PostHocEMA, find_snapshots
from modkit.errors import FileError
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


def without_a_snapshot(folder: Path) -> Run:
    """Resume, and end before another snapshot is due."""
    return resumed_at(folder, 850, 20)


def repeated(folder: Path) -> Run:
    """Start anew with the same numbers, and end sooner."""
    Run(folder).train(1000)
    return Run(folder).train(800)


@for_each("way", [clean, ends_sooner, with_another_interval, resumed_twice, repeated])
def test_a_folder_of_one_run(way: Any, tmp_path: Path) -> None:
    """Steps that a resume has given up have no part in any average, wherever that is asked for."""
    run = way(tmp_path)

    averages = [run.averages.reconstruct(WIDTH), posthoc.reconstruct(tmp_path, WIDTH)]
    assert [average.step for average in averages] == [800, 800]
    assert max(map(run.error, averages)) < 0.03


def test_a_run_that_ends_before_its_next_snapshot(tmp_path: Path) -> None:
    """The latest average is that of the last snapshot before the resume."""
    run = without_a_snapshot(tmp_path)

    assert posthoc.reconstruct(tmp_path, WIDTH).step == 800
    assert min(path.name[:14] for path in (tmp_path / "abandoned").iterdir()) == "ema-0000000900"
    assert run.error(posthoc.reconstruct(tmp_path, WIDTH)) < 0.03


@for_each(("every", "steps"), [(100, 600), (200, 800), (100, 1000)])
def test_a_second_run_in_the_folder(every: int, steps: int, tmp_path: Path) -> None:
    """Each run keeps its files, and an average of both is refused until one is chosen."""
    runs = [Run(tmp_path).train(800), Run(tmp_path, seed=1, every=every).train(steps)]
    ids = [snapshot.run for snapshot in find_snapshots(tmp_path)]
    with pytest.raises(
        ValueError, match=r"of several runs: '\w+' \(steps .*Choose one, as in run="
    ):
        posthoc.reconstruct(tmp_path, WIDTH)
    with pytest.raises(ValueError, match="there is no run 'x'"):
        posthoc.reconstruct(tmp_path, WIDTH, run="x")

    assert len(set(ids)) == 2
    for run in runs:
        mine = run.averages.state_dict()["branches"][-1][0]
        chosen = posthoc.reconstruct(tmp_path, WIDTH, run=mine, max_error=1.0)
        assert chosen.step == len(run.path)
        assert run.error(chosen) < (0.03 if run is runs[0] or every == 100 else 0.06)
        assert run.averages.reconstruct(WIDTH, max_error=1.0).step == len(run.path)


def test_branches_that_were_brought_together(tmp_path: Path) -> None:
    """Files of what a resume elsewhere has given up are refused; either part can be chosen."""
    there = tmp_path / "there"
    first = Run(tmp_path / "here")
    saved = saved_at(first, 550)
    shutil.copytree(tmp_path / "here", there)
    first.train(450)
    second = first.resumed(saved, there, seed=1).train(350)
    shutil.copytree(there, tmp_path / "here", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="of several runs"):
        posthoc.reconstruct(tmp_path / "here", WIDTH)

    for run in (first, second):
        mine = run.averages.state_dict()["branches"][-1][0]
        assert run.error(posthoc.reconstruct(tmp_path / "here", WIDTH, run=mine)) < 0.03


@pytest.mark.parametrize("branches", [3, None, [["a"]], [["a", 1.0]], [[1, 2]]])
def test_invalid_branches(branches: Any, tmp_path: Path) -> None:
    """A file with them is refused by its path, and a state by the entry."""
    run = Run(tmp_path).train(100)
    path = find_snapshots(tmp_path)[0].path
    torch.save({**torch.load(path, weights_only=True), "branches": branches}, path)
    with pytest.raises(FileError, match=r"ema-0000000100.* is corrupt: "):
        find_snapshots(tmp_path)
    with pytest.raises(ValueError, match="PostHocEMA: branches of the state cannot be loaded"):
        run.averages.load_state_dict({**run.averages.state_dict(), "branches": branches})


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
    result.copy_to(other)

    assert averages.step == 8
    assert {name.partition(".")[0] for name in (*result.averages, *result.buffers)} == {"1", "3"}
    assert {tensor.dtype for tensor in result.averages.values()} == {torch.float64}
    assert torch.equal(other[0].weight, net[0].weight)
    assert torch.equal(other[3].weight, result.averages["3.weight"].float())
    assert repr(result).startswith("Reconstruction(sigma_rel=0.1, step=8, ")


def test_the_options_of_ema_are_refused_as_there(tmp_path: Path) -> None:
    """Globs that match no name, and unknown precisions."""
    with pytest.raises(ValueError, match="matches exclude='head"):
        modkit.PostHocEMA(network(), tmp_path, exclude="head.*")
    with pytest.raises(ValueError, match="precision"):
        modkit.PostHocEMA(network(), tmp_path, precision="bf16")  # type: ignore[arg-type]


def test_another_rank_that_is_ahead_keeps_its_snapshots(tmp_path: Path) -> None:
    """Ranks write the same files: what one has written since this one began is not given up."""
    behind, ahead = Run(tmp_path), Run(tmp_path)
    ahead.train(800)
    behind.train(100)

    assert posthoc.reconstruct(tmp_path, WIDTH).step == 800
    assert ahead.error(posthoc.reconstruct(tmp_path, WIDTH)) < 0.03
    assert not (tmp_path / "abandoned").exists()
