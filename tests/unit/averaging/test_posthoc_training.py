import pytest
import torch
from torch import nn

import modkit
from modkit.averaging.posthoc import PostHocEMA
from modkit.errors import NameMismatchError
from modkit.schedules import Power, profile
from tests.cases import for_each
from tests.unit.averaging.recipes import CountCalls


STATE = {
    "step": 1,
    "update_every": 1,
    "sigma_rels": [0.05, 0.1],
    "branches": [],
    "averages": [{"weight": torch.ones(1, 1), "bias": torch.ones(1)}] * 2,
}


def test_a_snapshot_between_updates_has_the_step_of_the_latest_update(tmp_path):
    """After three steps, an average that is updated every two steps is that of step 2."""
    averages = PostHocEMA(nn.Linear(1, 1), tmp_path, update_every=2)
    for _ in range(3):
        averages.update()

    assert [snapshot.step for snapshot in averages.snapshot()] == [2, 2]


def test_a_snapshot_inside_another_average(tmp_path):
    """It has the buffers of the training, not those that the other average has swapped in."""
    model = nn.BatchNorm1d(2)
    other = modkit.EMA(model, 0.5, buffers="average")
    averages = PostHocEMA(model, tmp_path)
    for mean in (1.0, 2.0):
        model.running_mean.fill_(mean)
        other.update()
        averages.update()
    with other.applied():
        swapped_in = model.running_mean.tolist()
        averages.snapshot()

    assert swapped_in == [1.5, 1.5]
    assert averages.reconstruct(0.1).buffers["running_mean"].tolist() == [2.0, 2.0]


def test_model_that_changed(tmp_path):
    """An update with other parameters than before is refused by name, and changes nothing."""
    model = nn.Linear(1, 1)
    averages = PostHocEMA(model, tmp_path)
    averages.update()
    model.extra = nn.Parameter(torch.zeros(2))
    before = averages.state_dict()["averages"][0]["weight"].clone()
    nn.init.constant_(model.weight, 5)

    with pytest.raises(NameMismatchError, match="averaged: 1 unexpected: extra"):
        averages.update()
    assert averages.step == 1
    assert torch.equal(averages.state_dict()["averages"][0]["weight"], before)


def test_other_model(tmp_path):
    """A result is not written into a model with other parameters or buffers."""
    model = nn.Linear(1, 1)
    averages = PostHocEMA(model, tmp_path, snapshot_every=1)
    averages.update()
    result = averages.reconstruct(0.1)
    other = nn.Linear(1, 1)
    other.register_buffer("scale", torch.ones(1))
    before = other.weight.item()

    with pytest.raises(NameMismatchError, match="the snapshots: 1 unexpected: scale"):
        result.copy_to(other)
    assert other.weight.item() == before


def test_no_use_inside_applied(tmp_path):
    """While the model holds the average of another object, nothing is averaged or loaded."""
    model = nn.Linear(1, 1)
    ema = modkit.EMA(model)
    ema.update()
    averages = PostHocEMA(model, tmp_path)
    with ema.applied():
        with pytest.raises(RuntimeError, match="called inside applied"):
            averages.update()
        with pytest.raises(RuntimeError, match=r"^PostHocEMA\.load_state_dict\(\) was"):
            averages.load_state_dict(STATE)

    assert averages.step == 0


def test_a_model_in_bfloat16(tmp_path):
    """It is averaged in float32 without a host sync, and gets the average back in its own dtype."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    averages = PostHocEMA(model, tmp_path)
    with CountCalls("_local_scalar_dense") as reads:
        for value in torch.linspace(1, 2, 400).tolist():
            nn.init.constant_(model.weight, value)
            averages.update()
    averages.snapshot()

    result = averages.reconstruct(0.1)
    result.copy_to(model)

    weights = profile(Power(0.1), 399)
    values = torch.linspace(1, 2, 400).bfloat16().tolist()
    exact = sum(weight * value for weight, value in zip(weights, values, strict=True))
    assert reads.calls == []
    assert result.averages["weight"].dtype == torch.float32
    assert result.averages["weight"].item() == pytest.approx(exact, rel=1e-5)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == pytest.approx(exact, rel=2**-8)


@for_each(
    ("options", "error", "text"),
    [
        ({"sigma_rels": ()}, ValueError, "sigma_rels must name one width or more"),
        (
            {"sigma_rels": (0.5,)},
            ValueError,
            "sigma_rel must be more than 0 and less than 0.288675",
        ),
        ({"update_every": 0}, ValueError, "update_every must be 1 or more, got 0"),
        ({"update_every": 1.5}, TypeError, "^PostHocEMA: update_every must be an int, got 1.5"),
        ({"update_every": True}, TypeError, "^PostHocEMA: update_every must be an int, got True"),
        ({"snapshot_every": 0}, ValueError, "must be a multiple of update_every=1, got 0"),
        (
            {"snapshot_every": 15, "update_every": 10},
            ValueError,
            "snapshot_every must be a multiple of update_every=10, got 15",
        ),
    ],
)
def test_refused_options(tmp_path, options, error, text):
    """Invalid numbers are refused when the averages are created."""
    with pytest.raises(error, match=text):
        PostHocEMA(nn.Linear(1, 1), tmp_path, **options)


INVALID = "the state of modkit.PostHocEMA is invalid:"


@for_each(
    ("state", "text"),
    [
        (3, "the state must be a mapping, got 3"),
        ({}, "the state of modkit.PostHocEMA has no step"),
        ({**STATE, "step": "7"}, f"{INVALID} step must be an int from 0 to 9007199254740992"),
        ({**STATE, "step": torch.tensor(1)}, f"{INVALID} step must be an int from 0"),
        ({**STATE, "update_every": 2}, f"{INVALID} update_every must be 1, as in this object"),
        ({**STATE, "update_every": True}, f"{INVALID} update_every must be 1, as in this"),
        ({**STATE, "sigma_rels": [0.05]}, f"{INVALID} sigma_rels must be [0.05, 0.1], as in this"),
        ({**STATE, "averages": []}, f"{INVALID} averages must be a list of 2 at step 1, got []"),
        ({**STATE, "averages": 3}, f"{INVALID} averages must be a list, got 3"),
        (
            {**STATE, "averages": [{"weight": torch.ones(1, 1), "bias": 5}] * 2},
            f"{INVALID} averages[0]['bias'] must be a tensor with data, got 5",
        ),
    ],
)
def test_invalid_states_are_refused_in_the_words_of_the_class(tmp_path, state, text):
    """The error names PostHocEMA, the entry of its state, what it must be and what it is."""
    averages = PostHocEMA(nn.Linear(1, 1), tmp_path)

    with pytest.raises(ValueError, match="PostHocEMA") as raised:
        averages.load_state_dict(state)

    assert text in str(raised.value)
    assert "Nothing has been changed" in str(raised.value)
    assert averages.step == 0


def test_a_state_of_another_model_is_refused(tmp_path):
    """Its names and shapes must be those of the model, and nothing changes otherwise."""
    averages = PostHocEMA(nn.Linear(2, 1), tmp_path)

    with pytest.raises(ValueError, match="the state does not fit the model"):
        averages.load_state_dict(STATE)
    assert averages.step == 0


def test_no_average_yet(tmp_path):
    """Before the first update there is nothing to save, and no average to put together."""
    averages = PostHocEMA(nn.Linear(1, 1), tmp_path, update_every=5)
    averages.update()

    with pytest.raises(RuntimeError, match="no average to save before the first update"):
        averages.snapshot()
    with pytest.raises(FileNotFoundError, match=f"no snapshots up to step 1 in {tmp_path}"):
        averages.reconstruct(0.1)
