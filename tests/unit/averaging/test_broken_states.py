"""States of averages with a part that no writer puts there, and states of other schedules and names."""

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import modkit
from modkit import schedules
from modkit.averaging import state as states
from modkit.averaging.posthoc import find_snapshots, fit_power, reconstruct
from modkit.errors import FileError
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import diffusers_state, network, set_to


State = dict[str, Any]
END = "Nothing has been changed."

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"decay": 0.9},
    "several": {"decay": [0.5, 0.9]},
    "rounded": {"decay": 0.9, "precision": "stochastic"},
}


def started(kind: str) -> "modkit.EMA[Any]":
    """Return an average of a bfloat16 network after three updates."""
    ema = modkit.EMA(network(torch.bfloat16), **KINDS[kind])
    for value in (1.0, 2.0, 3.0):
        set_to(ema.model, value)
        ema.update()
    return ema


MISSING = object()


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a state with another value at a path, or without it."""
    new = {"state": copy.deepcopy(state)}
    *parents, last = ("state", *path)
    part: Any = new
    for key in parents:
        part = part[key]
    if value is MISSING:
        del part[last]
    else:
        part[last] = value
    return new.get("state")


ONES = torch.ones(6, 4)
FIRST = ("averages", 0)
TENSORS = (*FIRST, "tensors")
WEIGHT = (*TENSORS, "0.weight")

CUSTOM = r"^EMA: schedules\[0\], {'name': 'Custom'}, of the state cannot be loaded: .*this one has Constant"

# The kind of average, a path in its state, the value that is put there, and what the error says.
BROKEN: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("plain", ("version",), 99, "version 99, newer than 1"),
    ("plain", ("version",), 0, "version must be an int of at least 1, got 0"),
    ("plain", ("version",), MISSING, "has no version"),
    ("plain", ("step",), -5, "step must be an int of at least 0, got -5"),
    ("plain", ("step",), True, "step must be an int of at least 0, got True"),
    ("plain", ("step",), 0, "start must be an int from 1 to 0, got 1"),
    ("plain", ("n_averaged",), 4, "n_averaged must be an int from 0 to 3, got 4"),
    ("plain", ("start",), 2, "n_averaged must be an int from 0 to 2, got 3"),
    ("plain", ("n_averaged",), 0, "start must be None, as n_averaged is 0, got 1"),
    ("plain", ("update_every",), 0, "update_every must be an int of at least 1, got 0"),
    ("plain", ("update_after_step",), -1, "update_after_step must be an int of at least 0"),
    ("plain", ("schedules",), ["Equal"], r"schedules\[0\] must be a mapping, got 'Equal'"),
    ("plain", ("schedules",), [{"name": "Mine", "a": 1.0}], "pass an equal one to EMA"),
    ("plain", ("schedules",), [{"name": "Custom"}], CUSTOM),
    ("plain", ("schedules",), [{"name": "Constant"}], "its fields must be those of Constant"),
    ("plain", ("schedules",), [{"name": "Constant", "decay": 7.0}], "from 0 to 1, got 7.0"),
    ("several", ("schedules", 1), MISSING, "holds 2 averages with 1 schedules, and this object 2"),
    ("plain", ("averages",), [], "holds 0 averages with 1 schedules, and this object 1"),
    ("plain", ("averages",), MISSING, "6 missing: 0.weight"),
    ("plain", (*FIRST, "tensors"), MISSING, "6 missing: 0.weight"),
    ("plain", WEIGHT, 1.0, r"averages\[0\]\['tensors'\]\['0.weight'\] must be a tensor"),
    ("plain", WEIGHT, ONES.cfloat(), "'0.weight'.* must be like a tensor of dtype torch.bfloat16"),
    ("plain", WEIGHT, ONES.T, r"0.weight \(\(4, 6\) instead of \(6, 4\)\)"),
    ("plain", (*TENSORS, "more"), ONES, "1 unexpected: more"),
    ("plain", WEIGHT, MISSING, "1 missing: 0.weight"),
    ("plain", (*FIRST, "statistics"), {"1.running_mean": torch.ones(5)}, "1.running_mean"),
    ("plain", (*FIRST, "rests"), {"0.weight": ONES.T}, r"0.weight \(\(4, 6\) instead"),
    ("plain", (*FIRST, "rests"), {"other": ONES}, "1 unexpected: other"),
    ("plain", ("raw",), {"0.weight": ONES.T}, "training weights of the state do not fit"),
    ("plain", ("raw",), {"0.weight": ONES.cfloat()}, r"raw\['0.weight'\] .* must be like"),
]


@for_each(
    ("kind", "path", "value", "text"),
    BROKEN,
    ids=[f"{number} {row[0]}: {row[-1]}" for number, row in enumerate(BROKEN)],
)
def test_a_broken_state_changes_nothing(
    kind: str, path: tuple[Any, ...], value: Any, text: str
) -> None:
    """Versions, counts and names are checked, and everything else is built before it is taken."""
    ema = started(kind)
    state = replaced(started(kind).state_dict(), path, value)
    before, weights = freeze(ema.state_dict()), freeze(ema.model.state_dict())

    with pytest.raises(ValueError, match=text) as raised:
        ema.load_state_dict(state)

    assert str(raised.value).endswith(END)
    assert str(raised.value).startswith("EMA: ")
    assert freeze(ema.state_dict()) == before
    assert freeze(ema.model.state_dict()) == weights
    ema.update()


def below(prefix: str) -> State:
    """Return the tensors of the network under other names."""
    return {prefix + name: value for name, value in network(torch.bfloat16).state_dict().items()}


PARAMETERS = list(network(torch.bfloat16).parameters())
DIFFUSERS = diffusers_state(PARAMETERS)
TORCH_EMA = {"decay": 0.995, "num_updates": 40, "shadow_params": PARAMETERS}
EMA_PYTORCH = {
    "initted": torch.tensor(True),
    "step": torch.tensor(130),
    **below("ema_model."),
}
TORCH = {"n_averaged": torch.tensor(3), **below("module.")}
LIGHTNING = {"state_dict": below(""), "averaging_state": {"n_averaged": torch.tensor(5)}}
UNKNOWN = "from modkit.EMA, nor from a supported library, nor are its names those of the model: it"
FOREIGN: list[tuple[State, str]] = [
    (TORCH | {"n_averaged": torch.tensor(-1)}, "state of torch .* n_averaged must be an int"),
    (TORCH | {"module.0.weight": ONES.T}, r"0.weight \(\(4, 6\) instead of"),
    (TORCH | {"module.more": ONES}, "1 unexpected: more"),
    (LIGHTNING | {"averaging_state": {}}, r"lightning has no averaging_state\['n_averaged'\]"),
    (EMA_PYTORCH | {"step": -3}, "state of ema_pytorch is invalid: step must be"),
    (EMA_PYTORCH | {"initted": ONES}, "initted of the state .* it is a tensor of dtype"),
    (DIFFUSERS | {"decay": 2}, "the decay of diffusers .*InverseGamma: decay must be .* got 2"),
    ({k: v for k, v in DIFFUSERS.items() if k != "decay"}, "state of diffusers has no decay"),
    (DIFFUSERS | {"shadow_params": [1.0] * 6}, r"shadow_params\[0\] must be a tensor .*got 1.0"),
    (DIFFUSERS | {"shadow_params": PARAMETERS[:-1]}, "5 tensors without names"),
    (DIFFUSERS | {"shadow_params": PARAMETERS[::-1]}, "missing|of another shape"),
    ({"0.weight": ONES}, "missing: 0.bias"),
    (below("") | {"epoch": 3}, f"^EMA: the state is neither {UNKNOWN}"),
]


@pytest.mark.filterwarnings("ignore:EMA. the state .weights. holds")
@for_each(
    ("state", "text"),
    FOREIGN,
    ids=[f"{number} {text}" for number, (_, text) in enumerate(FOREIGN)],
)
def test_a_broken_state_of_another_library_changes_nothing(state: State, text: str) -> None:
    """A broken state of another library, or broken plain weights, change nothing."""
    ema = started("plain")
    before = freeze(ema.state_dict())

    with pytest.raises(ValueError, match=text) as raised:
        ema.load_state_dict(state)

    assert str(raised.value).endswith(END)
    assert freeze(ema.state_dict()) == before


@for_each("value", [math.nan, math.inf])
@for_each(("kind", "path"), [("plain", WEIGHT), ("several", ("averages", 1, "tensors", "3.bias"))])
def test_averages_must_be_finite_where_weights_must(
    kind: str, path: tuple[Any, ...], value: float
) -> None:
    """With on_nonfinite "skip" or "raise" a state that is not finite is refused; "ignore" takes it."""
    state = copy.deepcopy(started(kind).state_dict())
    part: Any = state
    for key in path:
        part = part[key]
    part.view(-1)[-1] = value
    where = "".join(f"[{key!r}]" for key in path).replace("['averages']", "averages", 1)

    for choice in ("skip", "raise"):
        ema = modkit.EMA(network(torch.bfloat16), **KINDS[kind], on_nonfinite=choice)
        with pytest.raises(ValueError, match="the loaded averages must be finite") as raised:
            ema.load_state_dict(state)
        assert f"{where} contains inf or nan" in str(raised.value)
        assert f"on_nonfinite={choice!r}" in str(raised.value)
        assert ema.n_averaged == 0
    started(kind).load_state_dict(state)


def test_averages_that_have_not_started_may_hold_anything() -> None:
    """Before the first update the tensors of a state are not used."""
    ema = modkit.EMA(network(torch.bfloat16), on_nonfinite="skip")
    state = ema.state_dict()
    state["averages"][0]["tensors"] = {"0.weight": torch.full((6, 4), math.nan)}
    ema.load_state_dict(state)

    assert dict(ema.named_averages()) == {}


def without_empty_parts(part: Any) -> Any:
    """Return a part of a state as ``torch.distributed.checkpoint`` saves it."""
    if isinstance(part, dict):
        rest = {key: without_empty_parts(value) for key, value in part.items()}
        return {key: value for key, value in rest.items() if value not in ({}, [])}
    if isinstance(part, list):
        return [rest for rest in map(without_empty_parts, part) if rest != {}]
    return part


@for_each("norm", [nn.BatchNorm1d, nn.LayerNorm])
@for_each("options", [{}, {"decay": [0.5, 0.9]}])
@for_each("steps", [0, 2])
def test_empty_parts_may_be_missing(norm, options: State, steps: int) -> None:
    """Checkpoints of torch.distributed leave them out, and so do the files they are converted to."""
    ema, loaded = (modkit.EMA(nn.Sequential(nn.Linear(4, 6), norm(6)), **options) for _ in range(2))
    for _ in range(steps):
        ema.update()
    state = ema.state_dict()

    loaded.load_state_dict(without_empty_parts(state))

    assert freeze(loaded.state_dict()) == freeze(state)


# --- schedules of users --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mine(schedules.Schedule):
    """A schedule of a user."""

    rate: float = 0.5
    steps: tuple[int, ...] = ()

    def decay_at(self, n: int) -> float:
        """Return the decay of a step."""
        return self.rate


@pytest.mark.parametrize("make", [Mine, lambda: schedules.PerUpdate(Mine(steps=(1, 2)))])
def test_a_schedule_of_a_user_resumes(make: Callable[[], schedules.Schedule]) -> None:
    """An average goes on with the schedule that was passed, if it is equal to the saved one."""
    ema = modkit.EMA(network(), schedule=make())
    ema.update()
    resumed = modkit.EMA(ema.model, schedule=make())
    own = resumed.schedules[0]
    resumed.load_state_dict(ema.state_dict())
    for one in (ema, resumed):
        set_to(one.model, 2.0)
        one.update()

    assert resumed.schedules[0] is own
    assert freeze(resumed.state_dict()["averages"]) == freeze(ema.state_dict()["averages"])


@pytest.mark.parametrize("own", [Mine(0.25), schedules.Constant(0.5), lambda n: 0.5])
def test_another_schedule_than_that_of_a_user_is_refused(own: Any) -> None:
    """The error names the saved schedule and says what to pass."""
    ema = modkit.EMA(network(), schedule=Mine())
    ema.update()
    other = modkit.EMA(ema.model, schedule=own)

    with pytest.raises(ValueError, match=r"'name': 'Mine', 'rate': 0.5.*pass an equal one to EMA"):
        other.load_state_dict(ema.state_dict())


def test_a_schedule_of_modkit_replaces_a_function() -> None:
    """The state of a schedule that can be created again wins, with a warning."""
    ema = modkit.EMA(network(), schedule=schedules.PerUpdate(0.75))
    other = modkit.EMA(ema.model, schedule=lambda n: 0.5)
    with pytest.warns(UserWarning, match="the schedule is PerUpdate") as warned:
        other.load_state_dict(ema.state_dict())

    assert other.schedules == ema.schedules
    assert [one.filename for one in warned] == [__file__]


# --- plain averaged weights ----------------------------------------------------------------------------


@for_each("schedule", [0.5, Mine()])
def test_plain_weights_start_an_average(schedule: Any) -> None:
    """Averaged weights under the names of the model are an average of one model."""
    source = started("plain").averaged_model()
    model = network(torch.bfloat16)
    ema = modkit.EMA(model, schedule=schedule, update_after_step=3, update_every=2)
    ema.load_state_dict(source.state_dict(), step=4)
    averages = dict(ema.named_averages())

    assert (ema.n_averaged, ema.step) == (1, 4)
    for name, value in source.state_dict().items():
        assert torch.equal(averages[name], value.to(averages[name].dtype))
    ema.update()
    ema.update()
    assert ema.n_averaged == 2


def test_plain_weights_may_lack_buffers_and_have_other_names() -> None:
    """Buffers are optional, and wrappers in names are ignored."""
    model = network()
    ema = modkit.EMA(model, decay=0.5)
    ema.load_state_dict({f"_orig_mod.{k}": v for k, v in model.named_parameters()})

    assert ema.n_averaged == 1
    assert {k for k, _ in ema.named_averages()} == {k for k, _ in model.named_parameters()}


def test_tied_weights_under_their_second_name() -> None:
    """A file that stores a tied weight once may have chosen the other name."""
    model: Any = nn.Module()
    model.first, model.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model.second.weight = model.first.weight
    ema = modkit.EMA(model, decay=0.5)
    ema.load_state_dict({"second.weight": torch.full((2, 2), 3.0)})

    assert dict(ema.named_averages())["first.weight"].tolist() == [[3.0, 3.0]] * 2


def test_weights_of_excluded_parameters_are_ignored() -> None:
    """A complete set of weights starts an average of some of them."""
    ema = modkit.EMA(network(), decay=0.5, include="0.*", buffers="ignore")
    ema.load_state_dict(network().state_dict())

    assert {name for name, _ in ema.named_averages()} == {
        "0.weight",
        "0.bias",
        "1.num_batches_tracked",
    }


def test_messages_stay_short() -> None:
    """Long values are cut in error messages."""
    ema = started("plain")
    state = {**ema.state_dict(), "step": "x" * 10_000}

    with pytest.raises(ValueError, match=r"step must be an int .*x\.\.\.\. Nothing") as raised:
        ema.load_state_dict(state)
    assert len(str(raised.value)) < 300
    assert states.described(SimpleNamespace()) == "namespace()"


# --- each part of a state or a snapshot ----------------------------------------------------------


SQUARE = torch.ones(2, 2)
# As a file of a few bytes may hold them: computing over one would take all memory, or hours.
HUGE = torch.zeros(1).expand(10**12)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls its nested tensors a prototype
    NESTED = torch.nested.nested_tensor([SQUARE, SQUARE[:1]])
ODD = [
    *(
        SQUARE.to("meta"),
        SQUARE.long(),
        SQUARE.cfloat(),
        torch.eye(2).to_sparse(),
        SQUARE * math.nan,
    ),
    *(NESTED, SQUARE.to(torch.float8_e4m3fn)),
    *(torch.zeros(1).expand(10**6, 10**6), torch.zeros(1).expand(2, 2), torch.ones(0)),
]
VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, math.inf, math.nan, 10**400, 10**5000, 2**70, "a", b"a"),
    *([], {}, (), [1], {"w": 1}, {1: SQUARE}, {"weight": SQUARE, 5: 3}, object()),
    *(torch.ones(2), torch.ones(1), torch.ones((), device="meta"), HUGE, *ODD),
    *({"weight": tensor} for tensor in (HUGE, *ODD)),
]


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each part of a state."""
    yield path
    if isinstance(state, (dict, list)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from places(value, (*path, key))


def with_an_odd_part(state: Any) -> "st.SearchStrategy[Any]":
    """Return a strategy for the state with one part, at any depth, replaced or missing."""
    return st.builds(
        lambda path, value: replaced(state, path, value),
        st.sampled_from([*places(state)]),
        st.sampled_from([*VALUES, MISSING]),
    )


EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def net() -> nn.Module:
    """Return a small model with a buffer."""
    found = nn.Linear(2, 2, bias=False)
    found.register_buffer("count", torch.zeros(()))
    return found


def check_each(state: Any, load: Callable[[Any], Any], observed: Callable[[], Any]) -> None:
    """Check that a state with an odd part loads, or is a ValueError that changes nothing."""

    @EXAMPLES
    @given(with_an_odd_part(state))
    def check(odd: Any) -> None:
        before = freeze(observed())
        try:
            load(odd)
        except ValueError:
            assert freeze(observed()) == before
        else:
            load(state)

    check()


STATES: dict[str, Any] = {
    "diffusers": diffusers_state([SQUARE]) | {"optimization_step": 3, "update_after_step": 0},
    "torch_ema": {"shadow_params": [SQUARE], "num_updates": 3, "decay": 0.9},
    "lightning": {"averaging_state": {"n_averaged": 3}, "state_dict": net().state_dict()},
    "ema_pytorch": {
        "initted": torch.tensor(True),
        "step": torch.tensor(5),
        "ema_model.weight": SQUARE,
        "ema_model.count": torch.zeros(()),
    },
    "weights": {"weight": SQUARE, "count": torch.zeros(())},
}


@pytest.mark.filterwarnings("ignore:EMA")
@pytest.mark.parametrize("kind", ["decay", "warmup", "stochastic", "finite", "inside", *STATES])
def test_states_of_ema(kind: str) -> None:
    """EMA.load_state_dict() raises nothing but ValueError."""
    options: dict[str, Any] = {"decay": 0.9}
    if kind == "warmup":
        options = {"schedule": schedules.InverseGamma(power=0.6)}
    elif kind == "stochastic":
        options = {"decay": 0.9, "precision": "stochastic"}
    elif kind == "finite":
        options = {"decay": 0.9, "on_nonfinite": "skip"}
    ema = modkit.EMA(net(), **options)
    ema.update()
    state = STATES.get(kind) or ema.state_dict()
    if kind == "inside":
        state |= {"raw": {"weight": SQUARE}}
        state["averages"][0] |= {"statistics": {"count": torch.ones(())}}

    check_each(state, ema.load_state_dict, lambda: (ema.state_dict(), ema.model.state_dict()))


def test_states_of_post_hoc_ema(tmp_path: Path) -> None:
    """PostHocEMA.load_state_dict() raises nothing but ValueError."""
    averages = modkit.PostHocEMA(net(), tmp_path)
    averages.update()

    check_each(averages.state_dict(), averages.load_state_dict, averages.state_dict)


def test_snapshots(tmp_path: Path) -> None:
    """Reading snapshots raises nothing but FileError, which names the file."""
    path = tmp_path / "ema-0000000010-0.1.pt"
    content = {
        "step": 10,
        "sigma_rel": 0.1,
        "averages": {"weight": SQUARE},
        "buffers": {},
        "run": "1f",
    }

    @EXAMPLES
    @given(with_an_odd_part(content))
    def check(odd: Any) -> None:
        torch.save(odd, path)
        try:
            reconstruct(tmp_path, find_snapshots(tmp_path)[0].sigma_rel)
        except FileError as error:
            assert str(path) in str(error)

    check()


@for_each("exponent", range(2, 17))
@for_each("count", (2, 3, 5))
def test_averages_that_hardly_differ(exponent: int, count: int) -> None:
    """Their combination is as near as one of them, and amplifies no rounding, on any processor."""
    widths = dict.fromkeys(0.1 + index * 10**-exponent for index in range(count))

    fit = fit_power([(width, 10) for width in widths], 0.15, 10)

    assert fit.error <= fit_power([(0.1, 10)], 0.15, 10).error * (1 + 1e-9)
    # A coefficient of 1 / eps of float32 would replace the weights by their rounding.
    assert sum(map(abs, fit.coefficients)) < 1e6
    assert math.fsum(fit.coefficients) == pytest.approx(1, abs=1e-9)


@for_each("wanted", (0.03, 0.075, 0.12, 0.28))
def test_many_averages_that_hardly_differ(wanted: float) -> None:
    """Four widths and 200 steps have a combination that amplifies no rounding, and is near."""
    averages = [(width, 5 * step) for width in (0.05, 0.1, 0.15, 0.2) for step in range(1, 201)]

    fit = fit_power(averages, wanted, 1000)

    assert fit.error < 1e-2
    assert sum(map(abs, fit.coefficients)) < 1e3


def test_averages_of_much_earlier_steps() -> None:
    """Averages that share nothing with the requested one are refused, with both steps in the text."""
    with pytest.raises(ValueError, match="no average resembles one of step 1000000000: all are of"):
        fit_power([(0.01, 1), (0.05, 1)], 0.02, 10**9)
