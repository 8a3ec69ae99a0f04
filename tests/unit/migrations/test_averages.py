"""States of averages migrate with the model: in every format, and by every loader."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import modkit
from modkit import migrations as mig
from modkit.distributed import load_averages
from modkit.errors import MigrationError, NameMismatchError
from tests.cases import for_each
from tests.helpers import freeze


def make_block(version: int) -> type[nn.Module]:
    """Return a class that had two projections, and a scale later."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if version == 1:
                self.q, self.k = nn.Linear(3, 3), nn.Linear(3, 3)
            else:
                self.qk = nn.Linear(3, 6)
                self.scale = nn.Parameter(torch.ones(3))
                self.register_buffer("calls", torch.zeros(()))

    if version == 2:
        steps = [
            mig.merge(["q.*", "k.*"], "qk.*"),
            mig.add("scale", torch.ones(3)),
            mig.add("calls", torch.zeros(())),
        ]
        Block = mig.declare({2: steps})(Block)
    return Block


def make_net(version: int) -> nn.Module:
    """Return a network of a version: a layer renamed, one merged, and statistics that are computed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = make_block(version)()
            self.norm = nn.BatchNorm1d(3)
            setattr(
                self,
                "out" if version == 1 else "head",
                nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
            )

    if version == 2:
        Net = mig.declare(
            {
                2: [
                    mig.rename("out.**", "head.**"),
                    mig.convert("norm.running_mean", lambda m: m + 0, lambda m: m - 0),
                ]
            }
        )(Net)
    torch.manual_seed(version)
    return Net()


OPTIONS: list[dict[str, Any]] = [
    {"decay": 0.9},
    {"decay": [0.5, 0.9]},
    {"decay": 0.9, "buffers": "average", "precision": "fp64"},
    {"decay": 0.9, "include": "*.*", "buffers": "ignore"},
]


def trained(model: nn.Module, **options: Any) -> "modkit.EMA[nn.Module]":
    """Return averages after some updates."""
    ema = modkit.EMA(model, **options)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator).abs())
        ema.update()
    return ema


def expected(ema: "modkit.EMA[nn.Module]", index: int) -> dict[str, torch.Tensor]:
    """Return the average as the new model loads it: by migrating it as a state dict of the model."""
    old: Any = ema.model.state_dict()
    new = make_net(2)
    full = {**old, **dict(ema.named_averages(index))}
    return dict(mig.migrate(new, full, versions=old._metadata))


@for_each("options", OPTIONS)
@for_each("face", ["EMA", "EMACallback"])
@for_each("versions", [True, False])
def test_a_state_migrates(options, face, versions) -> None:
    """Averages, copied buffers and counters are those that a migrated state dict would have."""
    ema = trained(make_net(1), **options)
    state = pickle.loads(pickle.dumps(ema.state_dict()))
    if not versions:
        del state["versions"]
    new = make_net(2)
    new.load_state_dict(ema.model.state_dict())
    loaded = getattr(modkit, face)(new, **options)
    loaded.load_state_dict(state)
    resumed = getattr(loaded, "ema", loaded)

    for index in range(len(ema.schedules)):
        values = expected(ema, index)
        averages = dict(resumed.named_averages(index))
        assert averages
        for name, value in averages.items():
            assert torch.equal(value, values[name].to(value.dtype)), name
    assert (resumed.step, resumed.n_averaged) == (3, 3)
    resumed.update()
    again = modkit.EMA(make_net(2), **options)
    again.load_state_dict(resumed.state_dict())
    assert freeze(again.state_dict()) == freeze(resumed.state_dict())


def test_statistics_and_training_weights_migrate() -> None:
    """They replace buffers and parameters of the same names, each with its own values."""
    model = make_net(1)
    ema = trained(model, decay=0.9)
    forward = nn.Sequential(model.norm, model.out)
    model.forward = forward.forward
    ema.update_bn([torch.randn(8, 3)])
    weights = copy.deepcopy(model.state_dict())
    with ema.applied():
        state = pickle.loads(pickle.dumps(ema.state_dict()))
    resumed = modkit.EMA(make_net(2), decay=0.9)
    with pytest.warns(UserWarning, match="its training weights are loaded"):
        resumed.load_state_dict(state)

    old, new = dict(ema.named_averages()), dict(resumed.named_averages())
    for name in "0.weight", "1.running_mean", "1.running_var":
        assert torch.equal(new[f"head.{name}"], old[f"out.{name}"])
        assert torch.equal(resumed.model.state_dict()[f"head.{name}"], weights[f"out.{name}"])
    assert torch.equal(new["norm.running_mean"], old["norm.running_mean"])
    assert torch.equal(resumed.model.block.qk.weight[3:], weights["block.k.weight"])


@for_each("library", ["torch", "timm", "plain", "wrapped", "dcp"])
def test_states_of_other_formats_migrate(library, tmp_path) -> None:
    """So do those of other libraries, of wrapped models, and of torch.distributed.checkpoint."""
    ema = trained(make_net(1), decay=0.9)
    average = ema.averaged_model()
    new: nn.Module = make_net(2)
    if library == "wrapped":
        new = nn.DataParallel(new)
    resumed = modkit.EMA(new, decay=0.9)
    if library == "dcp":
        with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
            dcp.save({"ema": ema.state_dict()}, checkpoint_id=tmp_path)
        load_averages(resumed, tmp_path)
    elif library in ("torch", "timm"):
        theirs = torch.optim.swa_utils.AveragedModel(average)
        theirs.n_averaged += 3
        state = theirs.state_dict()
        if library == "timm":
            del state["n_averaged"]
        resumed.load_state_dict(state, step=3)
    else:
        resumed.load_state_dict(
            average.state_dict() if library == "plain" else ema.state_dict(),
            **({"step": 3} if library == "plain" else {}),
        )

    values = expected(ema, 0)
    assert resumed.n_averaged == 3
    for name, value in resumed.named_averages():
        torch.testing.assert_close(value, values[name])


def test_versions_of_other_formats_are_read() -> None:
    """Names do not tell the version where a migration converts values alone."""
    kind = type("Doubled", (nn.Linear,), {})
    doubled = mig.declare({2: [mig.convert("weight", lambda w: 2 * w, lambda w: w / 2)]})(kind)
    old = nn.Linear(2, 2).state_dict()
    lightning = {"state_dict": old, "averaging_state": {"n_averaged": torch.tensor(3)}}
    for state, step in ((old, 3), (lightning, None)):
        resumed = modkit.EMA(doubled(2, 2), decay=0.9)
        resumed.load_state_dict(state, step=step)
        assert torch.equal(dict(resumed.named_averages())["weight"], 2 * old["weight"])


def test_post_hoc_averages_migrate(tmp_path) -> None:
    """They are averages of an EMA with other schedules."""
    old = modkit.PostHocEMA(make_net(1), tmp_path / "old")
    for _ in range(2):
        old.update()
    state = old.state_dict()
    resumed = modkit.PostHocEMA(make_net(2), tmp_path / "new")
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))

    for before, after in zip(state["averages"], resumed.state_dict()["averages"], strict=True):
        new_tensors, old_tensors = after["tensors"], before["tensors"]
        assert torch.equal(new_tensors["head.0.weight"], old_tensors["out.0.weight"])
        assert torch.equal(new_tensors["block.qk.bias"][:3], old_tensors["block.q.bias"])


def test_migrate_and_plan_know_the_state() -> None:
    """`migrate()` returns a state that loads without migrations, and the way back restores it."""
    ema = trained(make_net(1), decay=[0.5, 0.9])
    state = ema.state_dict()
    before = freeze(state)
    new = make_net(2)
    migrated = mig.migrate(new, state)
    lines = mig.plan(new, state)
    back = mig.migrate(new, migrated, to={type(new): 1, type(new.block): 1})

    assert any("rename out.0.weight [3, 3] -> head.0.weight [3, 3]" in line for line in lines)
    assert mig.plan(new, migrated) == []
    assert migrated["versions"] == {"": 2, "block": 2, "norm": 2, "head.1": 2}
    assert freeze(state) == before
    modkit.EMA(new, decay=[0.5, 0.9]).load_state_dict(migrated)
    for old, again in zip(state["averages"], back["averages"], strict=True):
        assert {name: value.tolist() for name, value in again["tensors"].items()} == {
            name: value.tolist() for name, value in old["tensors"].items()
        }
    resumed = modkit.EMA(make_net(1), decay=[0.5, 0.9])
    resumed.load_state_dict(back)
    assert freeze(resumed.state_dict()["averages"]) == freeze(state["averages"])


def test_a_mapping_of_no_version_is_refused() -> None:
    """A checkpoint that holds the state dict below a key would be returned as it is."""
    new = make_net(2)
    for wrong in {"model": make_net(1).state_dict(), "epoch": 3}, {"weight": torch.ones(2)}:
        for function in mig.migrate, mig.plan:
            with pytest.raises(
                MigrationError, match="no name of the state dict is one of Net in any"
            ):
                function(new, wrong)


def test_names_of_another_version_than_the_state_says() -> None:
    """They are refused, and the true versions can be given."""
    ema = trained(make_net(1), decay=0.9)
    state = {**ema.state_dict(), "versions": {"": 2, "block": 2}}
    new = make_net(2)
    resumed = modkit.EMA(new, decay=0.9)
    with pytest.raises(NameMismatchError):
        resumed.load_state_dict(state)
    resumed.load_state_dict(mig.migrate(new, state, versions={type(new): 1, type(new.block): 1}))
    assert resumed.n_averaged == 3


def test_a_newer_state_is_refused() -> None:
    """A class that is older than the state says so, and nothing has changed."""
    resumed = modkit.EMA(make_net(2), decay=0.9)
    state = {**trained(make_net(2), decay=0.9).state_dict(), "versions": {"": 3}}
    before = freeze(resumed.state_dict())
    with pytest.raises(
        MigrationError, match="was saved in version 3, and this class has version 2"
    ):
        resumed.load_state_dict(state)

    assert freeze(resumed.state_dict()) == before


def test_averages_do_not_import_migrations() -> None:
    """A program that declares nothing does not pay for them."""
    program = (
        "import sys, torch, modkit\n"
        "ema = modkit.EMA(torch.nn.Linear(1, 1), 0.9)\n"
        "ema.update()\n"
        "ema.load_state_dict(ema.state_dict())\n"
        "assert 'modkit.migrations' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
