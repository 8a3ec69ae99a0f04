"""States of other libraries: counters and averages go on as they were there."""

import pytest
import torch
from torch import nn

import modkit
from modkit import schedules
from modkit.averaging.foreign_states import convert, recognise
from modkit.schedules import Constant, CountWarmup, InverseGamma
from tests.cases import for_each
from tests.unit.averaging import mid_run
from tests.unit.averaging.mid_run import DELAYS, check_each_switch
from tests.unit.averaging.recipes import averaged, diffusers_state, model_of, set_to


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(1)


PARAMETERS = {
    "head.weight": torch.tensor([[0.5, -0.5]]),
    "head.bias": torch.tensor([0.25]),
    "norm.weight": torch.tensor([1.5]),
    "norm.bias": torch.tensor([-1.0]),
}
BUFFERS = {
    "norm.running_mean": torch.tensor([0.125]),
    "norm.running_var": torch.tensor([2.0]),
    "norm.num_batches_tracked": torch.tensor(7),
}
MEMBERS = {**PARAMETERS, **BUFFERS}


def below(prefix):
    """Return the members under names with a prefix."""
    return {f"{prefix}{name}": value for name, value in MEMBERS.items()}


# States as the libraries write them, of the network above.
TORCH = {"n_averaged": torch.tensor(12), **below("module.")}
TIMM = below("module.")
EMA_PYTORCH = {
    "initted": torch.tensor(True),
    "step": torch.tensor(130),
    **{f"online_model.{name}": torch.zeros_like(value) for name, value in MEMBERS.items()},
    **below("ema_model."),
}
DIFFUSERS = diffusers_state(list(PARAMETERS.values()))
TORCH_EMA = {
    "decay": 0.995,
    "num_updates": 40,
    "shadow_params": list(PARAMETERS.values()),
    "collected_params": None,
}
LIGHTNING = {
    "epoch": 3,
    "state_dict": MEMBERS,
    "current_model_state": {name: torch.zeros_like(value) for name, value in MEMBERS.items()},
    "averaging_state": {"n_averaged": torch.tensor(5)},
}


def compiled(state):
    """Return the state under the names of a compiled model inside."""
    inside = {"module.": "module._orig_mod.", "ema_model.": "ema_model._orig_mod."}
    wrapped = {}
    for key, value in state.items():
        prefix = next((prefix for prefix in inside if key.startswith(prefix)), "")
        wrapped[inside.get(prefix, "") + key.removeprefix(prefix)] = value
    return wrapped


# Without its warm-up, diffusers counts up all the same; integers are taken for numbers.
COUNTING = DIFFUSERS | {"use_ema_warmup": False, "min_decay": 0, "decay": 0.99}
WITHOUT_COUNT = TORCH_EMA | {"num_updates": None}


@for_each(
    ("source", "state", "expected", "n_averaged", "step", "schedule"),
    [
        ("torch", TORCH, MEMBERS, 12, None, None),
        ("timm", TIMM, MEMBERS, None, None, None),
        ("ema_pytorch", EMA_PYTORCH, MEMBERS, None, 130, None),
        *(
            ("torch", compiled(TORCH), MEMBERS, 12, None, None),
            ("timm", compiled(TIMM), MEMBERS, None, None, None),
            ("ema_pytorch", compiled(EMA_PYTORCH), MEMBERS, None, 130, None),
        ),
        ("diffusers", DIFFUSERS, PARAMETERS, None, 120, InverseGamma(1.0, 0.75, 0.0, 0.9999)),
        ("diffusers", COUNTING, PARAMETERS, None, 120, CountWarmup(0.99)),
        ("torch_ema", TORCH_EMA, PARAMETERS, None, 41, CountWarmup(0.995)),
        ("torch_ema", WITHOUT_COUNT, PARAMETERS, None, None, Constant(0.995)),
        ("lightning", LIGHTNING, MEMBERS, 5, None, None),
        ("lightning", LIGHTNING | {"global_step": 50}, MEMBERS, 5, 50, None),
    ],
)
def test_states(source, state, expected, n_averaged, step, schedule):
    """Each state is recognised, and gives the averages by name, the counts and the decay it tells."""
    converted = convert(state, Net())

    assert recognise(state) == converted.source == source
    assert converted.averages.keys() == expected.keys()
    assert all(torch.equal(converted.averages[name], expected[name]) for name in expected)
    assert (converted.n_averaged, converted.step) == (n_averaged, step)
    assert converted.schedule == schedule


@for_each(
    "state",
    [{}, {"model": MEMBERS, "epoch": 3}, {"step": 3, "n_averaged": 3}, {"other": torch.ones(1)}],
    ids=["empty", "checkpoint", "counter", "other"],
)
def test_unknown_states(state):
    """A state of something else is not taken for an average."""
    assert recognise(state) is None
    with pytest.raises(ValueError, match="nor from a supported library"):
        convert(state, Net())


@for_each(
    ("state", "text"),
    [
        ({"module": MEMBERS, "updates": 7}, r"load state\['module'\], with the number of calls"),
        ({"params": MEMBERS, "decay": 0.999}, r"load state\['params'\]"),
        ({"epoch": 3, "model": {}, "ema": TORCH}, r"load state\['ema'\]"),
        ({"state": MEMBERS}, r"load state\['state'\]"),
        ({"net": 1, "ema": modkit.EMA(Net()).state_dict()}, r"load state\['ema'\]"),
        ({"state_dict": MEMBERS, "ema_state_dict": {}}, r"load state\['state_dict'\]"),
        ({**TORCH_EMA, "decay": 7.0}, "the decay of torch_ema .* got 7.0"),
        (EMA_PYTORCH | {"ema_model.head.bias": torch.ones(2)}, r"head.bias \(\(2,\) instead of"),
        ({"step": 3, "initted": True}, "5 missing|4 missing"),
    ],
)
def test_wrappers_and_broken_states_are_named(state, text):
    """RT-DETR, OpenFold, d2go and mmengine keep the averages below a key."""
    ema = modkit.EMA(Net())
    with pytest.raises(ValueError, match=text):
        ema.load_state_dict(state)

    assert ema.n_averaged == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_error_terms_of_earlier_versions_are_added(dtype):
    """The value of an average is the sum, which an average in float32 holds."""
    model = nn.Linear(2, 3, dtype=dtype)
    ema = modkit.EMA(model, 0.9)
    ema.update()
    weight, bias = (torch.full(shape, 1.0, dtype=dtype) for shape in ((3, 2), (3,)))
    error = torch.full((3,), 2.0**-12, dtype=dtype)
    state = ema.state_dict()
    state["averages"][0].update(tensors={"weight": weight, "bias": bias}, rests={"bias": error})
    ema.load_state_dict(state)
    averages = dict(ema.named_averages())

    assert averages["weight"].eq(1).all()
    assert averages["bias"].eq(1 + 2.0**-12).all()
    assert bias.eq(1).all()


def test_plain_weights():
    """The state of a model is averaged weights, if the model is known."""
    converted = convert(MEMBERS, Net())

    assert recognise(MEMBERS) is None
    assert recognise(MEMBERS, Net()) == converted.source == "weights"
    assert converted.averages.keys() == MEMBERS.keys()
    assert all(torch.equal(converted.averages[name], MEMBERS[name]) for name in MEMBERS)
    assert (converted.n_averaged, converted.step, converted.schedule) == (None, None, None)


def test_lists_of_trained_parameters():
    """A list that is shorter has the names of the parameters that train."""
    model = Net()
    model.head.weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)

    state = DIFFUSERS | {"shadow_params": [PARAMETERS["head.bias"], PARAMETERS["norm.weight"]]}

    assert convert(state, model).averages.keys() == {"head.bias", "norm.weight"}


def test_tied_parameters_in_lists():
    """A parameter with two names is listed once, under its first name."""
    model = Net()
    model.other = model.head

    assert convert(DIFFUSERS, model).averages.keys() == PARAMETERS.keys()


@for_each("delay", DELAYS)
@for_each("kind", [mid_run.EmaPytorch, mid_run.Lightning])
def test_a_switch_with_both_delays(kind, delay):
    """Before, at and after the start, on and between updates, every state continues."""
    check_each_switch(lambda model: kind(model, *delay))


@for_each("after", [0, 20])
@for_each("kind", [mid_run.Diffusers, mid_run.Timm])
def test_a_switch_with_a_delayed_start(kind, after):
    """Each call updates; timm saves no counter, so the user passes it."""
    check_each_switch(lambda model: kind(model, after))


def test_a_switch_of_torch_ema():
    """It copies the weights when it is created, which is an update of modkit."""
    check_each_switch(mid_run.TorchEma)


def test_the_options_of_a_state_replace_those_of_the_ema():
    """The delay of diffusers is in its state, and a state of torch_ema has begun."""
    late = mid_run.Diffusers(mid_run.network(), after=5)
    late.update()
    ema = modkit.EMA(late.model, schedule=schedules.CountWarmup(0.95))
    ema.load_state_dict(late.state_dict())
    begun = modkit.EMA(late.model, schedule=schedules.CountWarmup(0.95), update_after_step=7)
    begun.load_state_dict(mid_run.TorchEma(late.model).state_dict())

    assert (ema.step, ema.n_averaged, ema.update_after_step) == (1, 0, 5)
    assert (begun.step, begun.n_averaged, begun.update_after_step) == (1, 1, 0)


def test_steps_of_lightning_that_are_not_updates():
    """With a `should_update()` of the user, the number of models counts, and not that of the steps."""
    theirs = mid_run.Lightning(mid_run.network())
    theirs.calls, theirs.averaged = 900, 9
    ema = modkit.EMA(theirs.model, schedule=schedules.Equal())
    ema.load_state_dict(theirs.state_dict())

    assert (ema.step, ema.n_averaged) == (9, 9)


CHANGING = [
    {"schedule": schedules.InverseGamma()},
    {"schedule": schedules.PerUpdate(schedules.Equal())},
    {"schedule": lambda n: 0.5},
    {"schedule": [0.5, schedules.CountWarmup()]},
    {"decay": 0.5, "update_after_step": 3},
]
CONSTANT = [
    {"decay": 0.5},
    {"schedule": [schedules.Constant(0.93), schedules.PerUpdate(0.75)], "update_every": 3},
]
STATES = {"timm": {"module.weight": torch.ones(2)}, "weights": {"weight": torch.ones(2)}}


@for_each(
    ("state", "holds"),
    [
        (STATES["timm"], r"the state \(timm\) holds"),
        (STATES["weights"], r"the state \(weights\) holds"),
    ],
)
@for_each("options", CHANGING)
def test_a_state_without_a_counter_warns(state, holds, options):
    """Where the count matters, the warning says what to pass, and the count is passed without one."""
    model = model_of(torch.zeros(2))
    ema, counted = (modkit.EMA(model, **options) for _ in range(2))

    message = rf"EMA: {holds} no counter.*load_state_dict\(state, step="
    with pytest.warns(UserWarning, match=message) as warned:
        ema.load_state_dict(state)
    counted.load_state_dict(state, step=1000)

    assert [one.filename for one in warned] == [__file__]
    assert (ema.step, ema.n_averaged) == (ema.update_after_step + 1, 1)
    assert (counted.step, counted.n_averaged) == (1000, 1000 - counted.update_after_step)


@for_each("state", list(STATES.values()), ids=list(STATES))
@for_each("options", [*CHANGING, *CONSTANT])
@for_each("face", ["EMA", "EMACallback"])
def test_a_state_without_a_counter_that_replaces_an_average_warns(state, options, face):
    """The wrong entry of a checkpoint would restart an average in silence; `step=` says it is meant."""
    averages = getattr(modkit, face)(model_of(torch.zeros(2)), **options)
    ema = averages.ema if face == "EMACallback" else averages
    for _ in range(20):
        ema.update()

    message = rf"holds? no counter.*replaces an average of {ema.n_averaged} models"
    with pytest.warns(UserWarning, match=message) as warned:
        averages.load_state_dict(state)
    assert len(warned) == 1
    averages.load_state_dict(state, step=20)


@for_each("state", list(STATES.values()), ids=list(STATES))
@for_each("options", CONSTANT)
def test_a_constant_decay_needs_no_counter(state, options):
    """Nothing depends on the count, so there is no warning."""
    ema = modkit.EMA(model_of(torch.zeros(2)), **options)
    ema.load_state_dict(state)

    assert ema.n_averaged == 1


@for_each(
    ("step", "n_averaged"), [(0, 0), (100, 0), (101, 1), (110, 1), (111, 2), (120, 2), (1000, 90)]
)
def test_a_given_step(step, n_averaged):
    """The number of models follows from it, with the delays of the EMA."""
    model = model_of(torch.full((2,), 5.0))
    options = {"update_after_step": 100, "update_every": 10}
    ema = modkit.EMA(model, schedule=schedules.Equal(), **options)
    ema.load_state_dict(STATES["timm"], step=step)

    assert (ema.step, ema.n_averaged) == (step, n_averaged)
    assert len(dict(ema.named_averages())) == min(n_averaged, 1)


def test_a_given_step_replaces_the_counter_of_the_state():
    """The state of torch's AveragedModel does not tell how many calls `update_every` has skipped."""
    ema = modkit.EMA(model_of(torch.zeros(2)), 0.5, update_every=10)
    state = {"n_averaged": torch.tensor(5), "module.weight": torch.ones(2)}
    ema.load_state_dict(state)
    assert (ema.step, ema.n_averaged) == (41, 5)
    ema.load_state_dict(state, step=48)

    assert (ema.step, ema.n_averaged) == (48, 5)
    set_to(ema.model, 3.0)
    ema.update()
    ema.update()
    assert averaged(ema).tolist() == [1.0, 1.0]
    ema.update()
    assert averaged(ema)[0].item() == pytest.approx(3.0 + (1.0 - 3.0) * 0.5**10)


def test_the_callback_passes_the_step():
    """It loads states of other libraries as the EMA does."""
    model = model_of(torch.zeros(2))
    callback = modkit.EMACallback(model, schedule=schedules.Equal())
    callback.load_state_dict(STATES["timm"], step=20)

    assert (callback.ema.step, callback.ema.n_averaged) == (20, 20)
