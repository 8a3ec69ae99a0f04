import pytest
import torch
from torch import nn

from modkit.averaging.foreign_states import convert, recognise
from modkit.schedules import Constant, CountWarmup, InverseGamma
from tests.cases import for_each
from tests.unit.averaging.recipes import diffusers_state


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
CONSTANT = TORCH_EMA | {"num_updates": None}


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
        ("torch_ema", CONSTANT, PARAMETERS, None, None, Constant(0.995)),
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
    assert converted.has_counter == (n_averaged is not None or step is not None)
    assert converted.schedule == schedule


@for_each(
    "state",
    [{}, {"model": MEMBERS, "epoch": 3}, {"step": 3, "initted": True}, {"other": torch.ones(1)}],
    ids=["empty", "checkpoint", "counter", "other"],
)
def test_unknown_states(state):
    """A state of something else is not taken for an average."""
    assert recognise(state) is None
    with pytest.raises(ValueError, match="nor from a supported library"):
        convert(state, Net())


def test_plain_weights():
    """The state of a model is averaged weights, if the model is known."""
    converted = convert(MEMBERS, Net())

    assert recognise(MEMBERS) is None
    assert recognise(MEMBERS, Net()) == converted.source == "weights"
    assert converted.averages.keys() == MEMBERS.keys()
    assert all(torch.equal(converted.averages[name], MEMBERS[name]) for name in MEMBERS)
    assert (converted.has_counter, converted.schedule) == (False, None)


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
