import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import modkit
from modkit import schedules
from tests.unit.averaging.recipes import PRECISIONS, averaged, model_of, network, set_to, train


SCHEDULES: list[Any] = [
    schedules.Constant(0.9),
    schedules.CountWarmup(0.999),
    schedules.Equal(),
    schedules.HalfLife(3),
    schedules.InverseGamma(power=0.75),
    schedules.Power(sigma_rel=0.1),
    schedules.PerUpdate(schedules.Equal()),
    [schedules.Constant(0.9), schedules.Equal()],
]
LENGTH = 9


class Run:
    """A training run with an average, which can be saved and gone on with."""

    def __init__(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        self.net = network(dtype)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.ema = modkit.EMA(self.net, **options).attach(self.optimizer)

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

    def all_values(self) -> list[tuple[str, torch.Tensor]]:
        """Return all that an average holds, and its counters."""
        ema = self.ema
        counters = torch.tensor([ema.step, ema.n_averaged])
        tensors = [
            pair for index in range(len(ema.schedules)) for pair in ema.named_averages(index)
        ]
        return [("counters", counters), *tensors]


@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=12, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    buffers=st.sampled_from(["copy", "average", "ignore"]),
    stop=st.integers(0, LENGTH),
    every=st.integers(1, 3),
    after=st.integers(0, 3),
    updated=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_run_that_is_resumed_has_every_bit(
    precision, schedule, buffers, stop: int, every: int, after: int, updated: bool, dtype
) -> None:
    """Saving at any step, and going on in a new object, gives the run that was not interrupted."""
    options = {
        "schedule": schedule,
        "buffers": buffers,
        "precision": precision,
        "update_every": every,
        "update_after_step": after,
    }
    whole = Run(dtype, options)
    whole.steps(0, stop)
    file = whole.save()
    whole.steps(stop, LENGTH)
    resumed = Run(dtype, options)
    if updated:
        resumed.steps(50, 55)
    resumed.load(file)
    resumed.steps(stop, LENGTH)

    for (name, value), (_, expected) in zip(resumed.all_values(), whole.all_values(), strict=True):
        assert torch.equal(value, expected), name


def test_a_checkpoint_from_inside_the_swap_brings_the_weights_back() -> None:
    """A state saved with the average in the model resumes from the training weights, and warns."""
    whole = Run(torch.float32, {"decay": 0.9})
    whole.steps(0, 4)
    with whole.ema.applied():
        file = whole.save()
    whole.steps(4, LENGTH)
    resumed = Run(torch.float32, {"decay": 0.9})
    message = r"^EMA: .* inside applied\(\), or between copy_to\(\) and restore\(\); its training"
    with pytest.warns(UserWarning, match=message):
        resumed.load(file)
    resumed.steps(4, LENGTH)

    for (name, value), (_, expected) in zip(resumed.all_values(), whole.all_values(), strict=True):
        assert torch.equal(value, expected), name
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

    assert len(warned) == 3
    assert ema.schedules == source.schedules
    assert (ema.update_every, ema.update_after_step) == (2, 1)
    assert averaged(ema).dtype == torch.float64


def test_a_schedule_of_ones_own_stays() -> None:
    """A function is not saved; the object keeps the one that it was given."""
    source = modkit.EMA(model_of([1.0]), schedule=lambda n: n / (n + 1))
    source.update()
    own = modkit.EMA(model_of([1.0]), schedule=lambda n: 0.25)
    own.load_state_dict(source.state_dict())
    set_to(own.model, [5.0])
    own.update()

    assert averaged(own).item() == 4.0


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
