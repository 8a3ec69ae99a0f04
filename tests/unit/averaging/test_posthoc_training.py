import pytest
import torch
from torch import nn

import modkit
from modkit.averaging.posthoc import PostHocEMA
from modkit.errors import NameMismatchError
from modkit.schedules import Power, profile
from tests.cases import for_each
from tests.unit.averaging.recipes import CountCalls


def trained(directory, model=None):
    """Return power averages after one update, which is also a snapshot."""
    averages = PostHocEMA(model or nn.Linear(1, 1), directory, snapshot_every=1)
    averages.update()
    return averages


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
    before = dict(averages.named_averages())["weight"].clone()
    nn.init.constant_(model.weight, 5)

    with pytest.raises(NameMismatchError, match="averaged: 1 unexpected: extra"):
        averages.update()
    assert averages.step == 1
    assert torch.equal(dict(averages.named_averages())["weight"], before)


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


def test_the_tracked_averages_are_those_of_an_ema(tmp_path):
    """They can be evaluated, and nothing is averaged or loaded while the model holds one."""
    model = nn.Linear(1, 1)
    averages = trained(tmp_path, model)
    nn.init.constant_(model.weight, 5)
    averages.update()
    with averages.applied(index=1):
        assert torch.equal(model.weight, dict(averages.named_averages(1))["weight"])
        for call in (averages.update, lambda: averages.load_state_dict(averages.state_dict())):
            with pytest.raises(RuntimeError, match="called inside applied"):
                call()

    assert model.weight.item() == 5
    assert averages.step == 2


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
        ({"sigma_rels": ()}, ValueError, "must not be an empty list"),
        ({"sigma_rels": (0.5,)}, ValueError, "sigma_rel must be above 0 and below 0.2886"),
        ({"snapshot_every": 0}, ValueError, "PostHocEMA: snapshot_every must be 1 or more, got 0"),
        ({"snapshot_every": 1.5}, TypeError, "^PostHocEMA: snapshot_every must be an int, got 1.5"),
        ({"exclude": "head.*"}, ValueError, "matches exclude='head"),
        ({"precision": "bf16"}, ValueError, "precision"),
    ],
)
def test_refused_options(tmp_path, options, error, text):
    """Invalid options are refused when the averages are created."""
    with pytest.raises(error, match=text):
        PostHocEMA(nn.Linear(1, 1), tmp_path, **options)


def test_states_that_are_not_of_this_class(tmp_path):
    """Those of an EMA, of other widths and of other runs are refused, and change nothing."""
    model = nn.Linear(1, 1)
    state = trained(tmp_path / "saved", model).state_dict()
    averages = PostHocEMA(model, tmp_path, (0.05, 0.1))
    for other, text in (
        (3, "the state must be a mapping, got 3"),
        (modkit.EMA(model).state_dict(), "the state of modkit.EMA has no run"),
        (model.state_dict(), "the state of modkit.EMA has no run"),
        ({**state, "run": 5}, "run must be the id of a run, got 5"),
        ({**state, "schedules": state["schedules"][:1]}, "schedules must be .* as in this object"),
        ({**state, "step": "7"}, "step must be an int"),
    ):
        with pytest.raises(ValueError, match=text):
            averages.load_state_dict(other)

    assert (averages.step, averages.state_dict()["run"]) == (0, "")


def test_no_average_yet(tmp_path):
    """Before the first update there is nothing to save, and no average to put together."""
    averages = PostHocEMA(nn.Linear(1, 1), tmp_path)

    with pytest.raises(RuntimeError, match="no average to save before the first update"):
        averages.snapshot()
    with pytest.raises(FileNotFoundError, match=f"no snapshots up to step 0 in {tmp_path}"):
        averages.reconstruct(0.1)
