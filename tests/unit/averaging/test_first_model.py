"""The share of the first model in an average: in `repr`, through a resume, and when it is final."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit import schedules
from modkit.distributed import export_average
from tests.cases import for_each
from tests.unit.averaging.recipes import averaged, model_of, set_to


def run(steps: int, **options: Any) -> "modkit.EMA[nn.Module]":
    """Return an average of a first model of 1, and of later ones of 0: its value is the share."""
    ema = modkit.EMA(model_of(torch.ones(1, dtype=torch.float64), torch.float64), **options)
    for _ in range(steps):
        ema.update()
        if ema.n_averaged:
            set_to(ema.model, 0.0)
    return ema


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"decay": 0.9},
    {"decay": [0.5, 0.9]},
    {"schedule": schedules.Equal(), "update_every": 3},
    {"schedule": schedules.Power(0.1), "update_after_step": 4},
    {"schedule": [lambda n: 0.9, schedules.PerUpdate(0.8)], "update_every": 2},
]


def check_shares(ema: "modkit.EMA[nn.Module]") -> None:
    """Check that `repr` shows the values of the averages."""
    values = [averaged(ema, index=index).item() for index in range(len(ema.schedules))]
    shown = ", ".join(f"{value:.1%}" for value in values)
    assert f"n_averaged={ema.n_averaged}, first_model={shown})" in repr(ema)


@for_each("options", SCHEDULES)
def test_the_share_is_the_product_of_the_decays(options) -> None:
    """It is exact through copies, resumes, another schedule, and another `update_every`."""
    ema = run(20, **options)
    check_shares(ema)

    resumed = modkit.EMA(copy.deepcopy(ema.model), **options)
    resumed.load_state_dict(pickle.loads(pickle.dumps(ema.state_dict())))
    for again in resumed, copy.deepcopy(ema):
        assert repr(again) == repr(ema)
        again.schedules[0] = schedules.Constant(0.99)
        again.update_every = 2
        for _ in range(7):
            again.update()
        check_shares(again)


def test_the_share_is_unknown_before_the_first_update_and_of_other_states() -> None:
    """Averages of another library have a first model that this one has not seen."""
    ema = run(0)
    assert repr(ema).endswith("step=0, n_averaged=0)")
    ema.load_state_dict({"weight": torch.ones(1)}, step=3)
    ema.update()

    assert repr(ema).endswith("step=4, n_averaged=4)")
    with pytest.warns(UserWarning, match="starts anew"):
        ema.load_state_dict({})
    ema.update()
    assert repr(ema).endswith("step=1, n_averaged=1, first_model=100.0%)")


def test_a_skipped_step_has_no_part_in_it() -> None:
    """A step that is not finite on CPU leaves the average, and so the share."""
    ema = run(3, decay=0.9, on_nonfinite="skip")
    before = repr(ema).partition("first_model")[2]
    set_to(ema.model, math.nan)
    ema.update()

    assert repr(ema).partition("first_model")[2] == before


FINAL = ["export_average", "swap_to_average_at_end"]


def end(call: str, ema: "modkit.EMA[nn.Module]", folder: Any) -> list[str]:
    """Make an average final, twice; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if call == "export_average":
                export_average(ema, folder / "average.pt")
            else:
                callback = modkit.EMACallback(ema.model, swap_to_average_at_end=True)
                callback.ema = ema
                callback.on_train_end()
    assert all(one.filename == __file__ for one in caught if call == "export_average")
    return [str(one.message) for one in caught]


@for_each("call", FINAL)
def test_an_average_that_is_the_first_model_warns_once(call, tmp_path) -> None:
    """Above 10 % it names the share, the schedule and the remedy."""
    (text,) = end(call, run(12, decay=0.9), tmp_path)

    assert text.startswith(f"{call}: 31% of this average is the model of the first update")
    assert "Constant(decay=0.9) is too close to 1 for 12 updates. Leave decay out" in text


@for_each("call", FINAL)
@for_each(
    ("steps", "options"),
    [(5, {}), (12, {"decay": 0.5}), (1, {"decay": 0.9}), (4, {"schedule": schedules.Equal()})],
)
def test_an_average_of_the_training_does_not_warn(call, steps, options, tmp_path) -> None:
    """Neither the default does, nor a plain mean of a few models."""
    assert end(call, run(steps, **options), tmp_path) == []
