import io
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from tests.helpers import freeze
from tests.unit.averaging.recipes import averaged, model_of, network, set_to, train


class Run:
    """A training run with an average, which can be saved and gone on with."""

    def __init__(self) -> None:
        self.net = network()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.ema = modkit.EMA(self.net, decay=0.9).attach(self.optimizer)

    def steps(self, first: int, last: int) -> None:
        """Take some steps."""
        train(self.net, self.optimizer, first, last)

    def save(self) -> io.BytesIO:
        """Write a checkpoint."""
        file = io.BytesIO()
        parts = {"net": self.net, "optimizer": self.optimizer, "ema": self.ema}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        """Read a checkpoint, with nothing in it but plain data."""
        state = torch.load(file, weights_only=True)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.load_state_dict(state["ema"])


def test_a_checkpoint_from_inside_the_swap_brings_the_weights_back() -> None:
    """A state saved with the average in the model resumes from the training weights, and warns."""
    whole = Run()
    whole.steps(0, 4)
    with whole.ema.applied():
        file = whole.save()
    whole.steps(4, 9)
    resumed = Run()
    message = r"^EMA: .* inside applied\(\), or between copy_to\(\) and restore\(\); its training"
    with pytest.warns(UserWarning, match=message):
        resumed.load(file)
    resumed.steps(4, 9)

    assert freeze(resumed.ema.state_dict()) == freeze(whole.ema.state_dict())
    assert torch.equal(resumed.net[0].weight, whole.net[0].weight)


# --- other states ----------------------------------------------------------------------------------


def started(decay: Any = 0.5, model: nn.Module | None = None) -> "modkit.EMA[Any]":
    """Return an average after two updates."""
    model = network() if model is None else model
    ema = modkit.EMA(model, decay=decay)
    ema.update()
    set_to(model, 1.0)
    ema.update()
    return ema


def test_an_empty_state_starts_anew() -> None:
    """A checkpoint without an average loads; the next update copies."""
    ema = started()
    with pytest.warns(UserWarning, match="averaging starts anew"):
        ema.load_state_dict({})
    waiting = list(ema.named_averages())
    ema.update()

    assert waiting == []
    assert torch.equal(averaged(ema, "0.weight"), ema.model[0].weight)
    assert (ema.step, ema.n_averaged) == (1, 1)


def test_options_of_the_state_win_and_are_told() -> None:
    """Schedule and intervals are those of the state; its precision is that of the object."""
    source = modkit.EMA(model_of([1.0]), decay=0.5, update_every=2, update_after_step=1)
    for _ in range(5):
        source.update()
    ema = modkit.EMA(model_of([1.0]), decay=0.9, precision="fp64")
    with pytest.warns(UserWarning, match="from here on") as warned:
        ema.load_state_dict(source.state_dict())

    told = [str(warning.message).split(" is ")[0] for warning in warned]
    assert told == ["EMA: the schedule", "EMA: update_every", "EMA: update_after_step"]
    assert ema.schedules == source.schedules
    assert (ema.update_every, ema.update_after_step) == (2, 1)
    assert averaged(ema).dtype == torch.float64


def test_an_interval_that_grows_before_a_step_is_skipped() -> None:
    """Its state loads: a schedule has counted one step, or more, for each model but the first."""
    model = network()
    ema = modkit.EMA(model, schedule=modkit.schedules.Equal(), on_nonfinite="skip")
    for number in range(10):
        set_to(model, float(number))
        ema.update()
    ema.update_every = 5
    set_to(model, float("nan"))
    ema.update()
    set_to(model, 4.5)
    resumed = modkit.EMA(model, schedule=ema.schedules, update_every=5, on_nonfinite="skip")
    resumed.load_state_dict(ema.state_dict())
    resumed.update()

    assert (ema.n_averaged, resumed.n_averaged) == (10, 11)
    assert averaged(resumed, "0.weight").eq(4.5).all()


def test_the_average_of_torch_goes_on() -> None:
    """A state of torch's `AveragedModel` goes on with torch's bits, and comes back into torch's class."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    net = network()
    theirs = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for value in 1.0, 2.0, 3.0:
        set_to(net, value)
        theirs.update_parameters(net)
    ours = modkit.EMA(net, decay=0.9, precision="same")
    ours.load_state_dict(theirs.state_dict())
    set_to(net, 4.0)
    theirs.update_parameters(net)
    ours.update()
    back = AveragedModel(ours.averaged_model())

    for name, value in theirs.module.state_dict().items():
        assert torch.equal(averaged(ours, name), value)
        assert torch.equal(back.module.state_dict()[name], value)
    assert ours.n_averaged == theirs.n_averaged.item()
