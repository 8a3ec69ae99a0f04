"""Each part of a state or a snapshot, replaced by what no writer puts there."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit import schedules
from modkit.averaging.posthoc import find_snapshots, fit_power, reconstruct
from modkit.errors import FileError
from tests.helpers import freeze
from tests.unit.averaging.recipes import diffusers_state


WEIGHT = torch.ones(2, 2)
VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, math.inf, math.nan, 10**400, 10**5000, 2**70, "a", b"a"),
    *([], {}, (), [1], {"w": 1}, {1: WEIGHT}, {"weight": WEIGHT, 5: 3}),
    *(torch.ones(2), torch.ones(1), torch.ones((), device="meta"), torch.eye(2).to_sparse()),
    *(
        {"weight": torch.eye(2).to_sparse()},
        {"weight": WEIGHT.to("meta")},
        {"weight": WEIGHT.long()},
    ),
]


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each part of a state."""
    yield path
    if isinstance(state, dict):
        for key, value in state.items():
            yield from places(value, (*path, key))
    elif isinstance(state, list):
        for index, value in enumerate(state):
            yield from places(value, (*path, index))


def variants(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the state with each part replaced or missing, or with a key that is not a string."""
    for path in places(state):
        for change in (*VALUES, "missing", "key"):
            new: Any = {"state": copy.deepcopy(state)}
            part = new
            for key in ("state", *path)[:-1]:
                part = part[key]
            last = ("state", *path)[-1]
            if change == "key" and isinstance(part[last], dict):
                part[last][7] = WEIGHT
            elif change == "missing" and path:
                del part[last]
            else:
                part[last] = change
            yield path, new["state"]


def net() -> nn.Module:
    """Return a small model with a buffer."""
    found = nn.Linear(2, 2, bias=False)
    found.register_buffer("count", torch.zeros(()))
    return found


def assert_refused(state: Any, load: Callable[[Any], Any], observed: Callable[[], Any]) -> None:
    """Check that each variant is loaded, or refused as a ValueError that changes nothing."""
    wrong = []
    for path, variant in variants(state):
        before = freeze(observed())
        try:
            load(variant)
        except ValueError:
            if freeze(observed()) != before:
                wrong.append(f"{path}: changed")
        except Exception as error:
            wrong.append(f"{path}: {error!r}")
        else:
            load(state)

    assert wrong == []


STATES: dict[str, Any] = {
    "diffusers": diffusers_state([WEIGHT]) | {"optimization_step": 3, "update_after_step": 0},
    "torch_ema": {"shadow_params": [WEIGHT], "num_updates": 3, "decay": 0.9},
    "lightning": {"averaging_state": {"n_averaged": 3}, "state_dict": net().state_dict()},
    "ema_pytorch": {
        "initted": torch.tensor(True),
        "step": torch.tensor(5),
        "ema_model.weight": WEIGHT,
        "ema_model.count": torch.zeros(()),
    },
    "weights": {"weight": WEIGHT, "count": torch.zeros(())},
}


@pytest.mark.filterwarnings("ignore:EMA")
@pytest.mark.parametrize("kind", ["decay", "warmup", "stochastic", *STATES])
def test_states_of_ema(kind: str) -> None:
    """EMA.load_state_dict() raises nothing but ValueError."""
    options: dict[str, Any] = {"decay": 0.9}
    if kind == "warmup":
        options = {"schedule": schedules.InverseGamma(power=0.6)}
    elif kind == "stochastic":
        options = {"decay": 0.9, "precision": "stochastic"}
    ema = modkit.EMA(net(), **options)
    ema.update()
    state = STATES.get(kind) or ema.state_dict()

    assert_refused(state, ema.load_state_dict, ema.state_dict)


def test_states_of_post_hoc_ema(tmp_path: Path) -> None:
    """PostHocEMA.load_state_dict() raises nothing but ValueError."""
    averages = modkit.PostHocEMA(net(), tmp_path)
    averages.update()

    assert_refused(averages.state_dict(), averages.load_state_dict, averages.state_dict)


def test_snapshots(tmp_path: Path) -> None:
    """Reading snapshots raises nothing but FileError, which names the file."""
    path = tmp_path / "ema-0000000010-0.1.pt"
    content = {"step": 10, "sigma_rel": 0.1, "averages": {"weight": WEIGHT}, "buffers": {}}
    wrong = []
    for place, variant in variants(content):
        torch.save(variant, path)
        try:
            reconstruct(tmp_path, find_snapshots(tmp_path)[0].sigma_rel)
        except FileError as error:
            if str(path) not in str(error):
                wrong.append(f"{place}: {error!r}")
        except Exception as error:
            wrong.append(f"{place}: {error!r}")

    assert wrong == []


def test_averages_that_are_too_similar() -> None:
    """Widths that hardly differ are refused, or have a finite combination, whatever the rounding."""
    outcomes = set()
    for exponent in range(8, 17):
        for count in (2, 3, 5):
            widths = [0.1 + index * 10**-exponent for index in range(count)]
            try:
                fit = fit_power([(width, 10) for width in dict.fromkeys(widths)], 0.15, 10)
            except ValueError as error:
                outcomes.add(str(error).partition(":")[0])
            else:
                assert all(map(math.isfinite, (*fit.coefficients, fit.error)))

    assert outcomes == {"some averages are too similar to combine"}
