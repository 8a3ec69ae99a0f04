import pytest
import torch
from torch import nn

import modkit
from modkit.averaging.foreign_states import convert
from modkit.schedules import InverseGamma, PerUpdate
from tests.integration.averaging_peers.peers import (
    Diffusers,
    EmaPytorch,
    Timm,
    Torch,
    TorchEma,
    timm_model_ema,
)


def network():
    """Return a small network with buffers, and a function that takes one step with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()

    return model, step


def test_torch():
    """The state of torch's AveragedModel has all members and the number of models."""
    model, step = network()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for _ in range(5):
        step()
        average.update_parameters(model)

    converted = convert(average.state_dict(), model)

    members = average.module.state_dict()
    assert (converted.source, converted.n_averaged) == ("torch", 5)
    assert converted.averages.keys() == members.keys()
    assert all(torch.equal(converted.averages[name], members[name]) for name in members)


def test_timm():
    """The state of timm's ModelEmaV3 has all members, and no count."""
    try:
        module = timm_model_ema()
    except ModuleNotFoundError:
        pytest.skip("could not import 'timm'")
    model, step = network()
    average = module.ModelEmaV3(model, decay=0.9)
    for _ in range(5):
        step()
        average.update(model)

    converted = convert(average.state_dict(), model)

    members = average.module.state_dict()
    assert (converted.source, converted.has_counter) == ("timm", False)
    assert all(torch.equal(converted.averages[name], members[name]) for name in members)


@pytest.mark.parametrize("use_ema_warmup", [False, True])
def test_diffusers(use_ema_warmup):
    """The state of EMAModel has the parameters, and its next decay is that of the schedule."""
    diffusers = pytest.importorskip("diffusers.training_utils")
    model, step = network()
    average = diffusers.EMAModel(
        model.parameters(),
        decay=0.9,
        update_after_step=2,
        use_ema_warmup=use_ema_warmup,
        inv_gamma=2.0,
        power=0.7,
    )
    for _ in range(7):
        step()
        average.step(model.parameters())

    converted = convert(average.state_dict(), model)

    names = [name for name, _ in model.named_parameters()]
    assert [*converted.averages] == names
    for name, shadow in zip(names, average.shadow_params, strict=True):
        assert torch.equal(converted.averages[name], shadow)
    assert (converted.step, converted.update_after_step) == (7, 2)
    for ahead in range(20):
        expected = average.get_decay(average.optimization_step + 1 + ahead)
        since_the_copy = converted.step - converted.update_after_step + ahead
        assert converted.schedule(since_the_copy) == pytest.approx(expected, abs=1e-12)


def test_ema_pytorch():
    """The state of ema-pytorch's EMA has all members, and its next decay is that of the schedule."""
    ema_pytorch = pytest.importorskip("ema_pytorch")
    model, step = network()
    average = ema_pytorch.EMA(model, beta=0.99, update_after_step=3, update_every=1)
    for _ in range(9):
        step()
        average.update()

    converted = convert(average.state_dict(), model)

    members = average.ema_model.state_dict()
    assert converted.source == "ema_pytorch"
    assert all(torch.equal(converted.averages[name], members[name]) for name in members)
    average.step += 1  # as the next update() does before it asks for the decay
    epoch = int(average.step) - 3 - 1
    assert converted.step == 9 == epoch + 3
    assert average.get_current_decay() == pytest.approx(1 - (1 + epoch) ** (-2 / 3), abs=1e-6)


def test_a_reference_to_the_average_follows_as_in_ema_pytorch():
    """`ema.module`, kept from before the first update, holds what `ema_model` does."""
    ema_pytorch = pytest.importorskip("ema_pytorch")
    model, step = network()
    theirs = ema_pytorch.EMA(model, beta=0.9, min_value=0.9, update_after_step=0, update_every=1)
    ours = modkit.EMA(model, 0.9, buffers="average")
    references = theirs.ema_model, ours.module
    for _ in range(5):
        step()
        theirs.update()
        ours.update()
        expected, found = (one.state_dict() for one in references)

        # It leaves integers alone.
        floating = {name: one for name, one in expected.items() if one.is_floating_point()}
        torch.testing.assert_close({name: found[name] for name in floating}, floating)


EMA_PYTORCH_OPTIONS = [
    {},
    {"beta": 0.99, "power": 0.75, "inv_gamma": 2.0},
    {"beta": 0.9, "min_value": 0.5, "update_after_step": 0, "update_every": 1},
    {"beta": 0.9, "update_after_step": 12, "update_every": 4},
]


@pytest.mark.parametrize("options", EMA_PYTORCH_OPTIONS, ids=str)
def test_ema_pytorch_for_a_whole_run(options):
    """With PerUpdate an EMA is that of ema-pytorch, with its defaults and others."""
    ema_pytorch = pytest.importorskip("ema_pytorch")
    model, step = network()
    # It computes decays in the default dtype.
    torch.set_default_dtype(torch.float64)
    try:
        model.double()
        theirs = ema_pytorch.EMA(model, **options)
        schedule = InverseGamma(
            inv_gamma=theirs.inv_gamma,
            power=theirs.power,
            min_decay=theirs.min_value,
            decay=theirs.beta,
        )
        ours = modkit.EMA(
            model,
            schedule=PerUpdate(schedule),
            update_after_step=theirs.update_after_step,
            update_every=theirs.update_every,
            buffers="average",
        )
        for _ in range(2101):
            step()
            theirs.update()
            ours.update()
    finally:
        torch.set_default_dtype(torch.float32)

    members = theirs.ema_model.state_dict()
    averages = dict(ours.named_averages())
    assert averages.keys() == members.keys()
    for name in theirs.parameter_names | theirs.buffer_names:
        torch.testing.assert_close(averages[name], members[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("use_num_updates", [False, True])
def test_torch_ema(use_num_updates):
    """The state of torch_ema has the parameters, and its next decay is that of the schedule."""
    torch_ema = pytest.importorskip("torch_ema")
    model, step = network()
    average = torch_ema.ExponentialMovingAverage(
        model.parameters(), decay=0.4, use_num_updates=use_num_updates
    )
    for _ in range(3):
        step()
        average.update()

    converted = convert(average.state_dict(), model)

    before = [shadow.clone() for shadow in average.shadow_params]
    step()
    average.update()
    decay = converted.schedule(converted.step or 1)
    for kept, value, after in zip(before, model.parameters(), average.shadow_params, strict=True):
        torch.testing.assert_close(decay * kept + (1 - decay) * value.detach(), after)


GOING_ON = {
    "torch": (Torch, {"decay": 0.9}),
    "timm": (Timm, {"decay": 0.9}),
    "ema-pytorch": (EmaPytorch, {"schedule": InverseGamma(decay=0.9)}),
    "diffusers": (Diffusers, {}),
    "torch_ema": (TorchEma, {}),
}


@pytest.mark.parametrize("library", GOING_ON)
@pytest.mark.filterwarnings("ignore:EMA. the schedule is:UserWarning")
def test_going_on(library):
    """An EMA that has loaded the state of another library averages on as that library does."""
    make, options = GOING_ON[library]
    model, step = network()
    try:
        theirs = make(model, decay=0.9)
    except ModuleNotFoundError as error:
        pytest.skip(f"could not import {error.name or error}")
    for _ in range(7):
        step()
        theirs.update()
    ours = modkit.EMA(model, **options, buffers="ignore")

    ours.load_state_dict(theirs.state_dict())
    for _ in range(5):
        step()
        theirs.update()
        ours.update()

    values = theirs.values()
    averages = dict(ours.named_averages())
    for name, _ in model.named_parameters():
        torch.testing.assert_close(averages[name], values[name], rtol=1e-5, atol=1e-6)


class Configured(nn.Sequential):
    """A network that is made from its configuration, as transformers has them."""

    def __init__(self, config):
        super().__init__(nn.Linear(config, 4), nn.Tanh(), nn.Linear(4, 1))
        self.config = config
