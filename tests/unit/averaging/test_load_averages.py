import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import modkit
from modkit import schedules
from modkit.distributed import load_averages
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import network, train


# Torch says so whenever it saves without other processes.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

KINDS = {
    "one": {"decay": 0.9},
    "several": {"decay": [0.5, 0.9]},
    "rounded": {"decay": 0.9, "precision": "stochastic"},
    "per update": {"schedule": schedules.PerUpdate(schedules.Equal())},
    "chosen": {"decay": 0.9, "include": "0.*", "buffers": "ignore"},
}


def trained(steps=2, **options):
    """Return an average, its optimizer attached, and the model after a few steps."""
    net = network(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = modkit.EMA(net, **options).attach(optimizer)
    train(net, optimizer, 0, steps)
    return ema, optimizer


@for_each("kind", KINDS)
@for_each("steps", [0, 2])
def test_the_next_update_is_the_one_that_would_have_followed(kind, steps, tmp_path) -> None:
    """Saved and loaded, before the first update or after some, an average goes on with all bits."""
    ema, optimizer = trained(steps, **KINDS[kind])
    dcp.save({"runs": {"first": ema.state_dict()}}, checkpoint_id=tmp_path)
    resumed = modkit.EMA(ema.model, **KINDS[kind])
    load_averages(resumed, tmp_path, key="runs.first")
    loaded = freeze(resumed.state_dict())
    saved = freeze(ema.state_dict())
    resumed.attach(optimizer)
    train(ema.model, optimizer, steps, steps + 2)

    assert loaded == saved
    assert freeze(resumed.state_dict()) == freeze(ema.state_dict())
    assert resumed.n_averaged == steps + 2


def test_the_default_device_is_not_that_of_a_state(tmp_path) -> None:
    """`torch.set_default_device()` is for tensors that are made, not for those that are loaded."""
    ema, _ = trained(decay=0.9)
    dcp.save({"ema": ema.state_dict()}, checkpoint_id=tmp_path)
    resumed = modkit.EMA(ema.model, decay=0.9)
    with torch.device("meta"):
        load_averages(resumed, tmp_path, key="ema")

    assert freeze(resumed.state_dict()) == freeze(ema.state_dict())


def test_names_with_dots_are_no_ways(tmp_path) -> None:
    """A key of a dict may have dots itself; what it is below is told from the way to it."""
    ema, _ = trained(decay=0.9)
    other, _ = trained(4, decay=0.9)
    state = {"ema": ema.state_dict(), "emas": other.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path)
    found = modkit.EMA(network(torch.bfloat16), decay=0.9)
    load_averages(found, tmp_path)

    assert found.step == 2
    assert freeze(found.state_dict()) == freeze(ema.state_dict())


class Trap:
    """Something that tells when it is unpickled."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_nothing_in_a_state_is_run(tmp_path) -> None:
    """Entries that are not tensors are read as by torch.load with weights_only=True."""
    ema, _ = trained(decay=0.9)
    dcp.save({"ema": {**ema.state_dict(), "more": Trap()}}, checkpoint_id=tmp_path)
    Trap.sprung = False
    with pytest.raises(CheckpointException) as caught:
        load_averages(ema, tmp_path)

    assert "Weights only load failed" in str(caught.value)
    assert not Trap.sprung
    assert pickle.load(io.BytesIO(pickle.dumps(Trap()))) is None
    assert Trap.sprung
