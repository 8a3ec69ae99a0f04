"""The cases of torch_ema's tests/test_ema.py and tests/test_state_dict.py: 42."""

import copy

import pytest
import torch
from torch import nn

from tests.integration.averaging_peers.torch_ema_names import OnModkit, OnTorchEma


pytestmark = pytest.mark.filterwarnings("ignore:EMA. the schedule is:UserWarning")

on_both = pytest.mark.parametrize("make", [OnTorchEma, OnModkit])
explicit_or_not = pytest.mark.parametrize("explicit_params", [True, False])
counting_or_not = pytest.mark.parametrize("use_num_updates", [True, False])
all_decays = pytest.mark.parametrize("decay", [0.995, 0.9, 0.0, 1.0])


def filled(value, dtype=None):
    """Return a layer without bias whose weights all have one value."""
    model = nn.Linear(10, 2, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


@on_both
@explicit_or_not
@counting_or_not
@pytest.mark.parametrize("decay", [0.995, 0.9])
def test_val_error(make, decay, use_num_updates, explicit_params):
    """The average has a lower validation loss than the weights, which come back unchanged."""
    torch.manual_seed(0)
    train, validation = ((torch.rand((100, 10)), torch.rand(100).round().long()) for _ in range(2))
    model = nn.Linear(10, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ema = make(model, decay, use_num_updates=use_num_updates)
    source = (model,) if explicit_params else ()

    def loss(data):
        return nn.functional.cross_entropy(model(data[0]), data[1])

    for _ in range(20):
        optimizer.zero_grad()
        loss(train).backward()
        optimizer.step()
        ema.update(*source)

    before = loss(validation)
    ema.store(*source)
    ema.copy_to(*source)
    averaged = loss(validation)
    ema.restore(*source)
    after = loss(validation)

    assert averaged < before
    assert torch.equal(after, before)


@on_both
@explicit_or_not
@counting_or_not
@all_decays
def test_store_restore(make, decay, use_num_updates, explicit_params):
    """Stored weights come back, also if nothing was copied into the model between."""
    model = nn.Linear(10, 2)
    ema = make(model, decay, use_num_updates=use_num_updates)
    source = (model,) if explicit_params else ()
    before = model.weight.detach().clone()

    ema.store(*source)
    nn.init.uniform_(model.weight, 0.0, 1.0)
    ema.restore(*source)

    assert torch.equal(model.weight, before)


@on_both
@explicit_or_not
@all_decays
def test_update(make, decay, explicit_params):
    """One update moves the average by `1 - decay` from 0 to 1, and leaves the model as it is."""
    model = filled(0.0)
    ema = make(model, decay, use_num_updates=False)
    source = (model,) if explicit_params else ()
    nn.init.ones_(model.weight)

    ema.update(*source)
    after_update = model.weight.detach().clone()
    ema.copy_to(*source)

    assert torch.equal(after_update, torch.ones(2, 10))
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 10), 1 - decay))


@on_both
def test_explicit_params(make):
    """An update takes the weights of another model, and copies into the averaged one."""
    model, other = nn.Linear(10, 2), nn.Linear(10, 2)
    nn.init.zeros_(model.weight)
    ema = make(model, 0.9)
    nn.init.ones_(other.weight)

    ema.update(other)
    ema.copy_to()

    # The decay of the first counted update is (1 + 1) / (10 + 1).
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 10), 9 / 11))


class SomeFrozen(nn.Module):
    """One trainable parameter, and one that does not require gradients."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.randn(3))
        self.y = nn.Parameter(torch.randn(3), requires_grad=False)


@on_both
def test_some_untrainable(make):
    """A model with a frozen parameter is updated, stored and overwritten by its average."""
    model = SomeFrozen()
    frozen = model.y.clone()
    ema = make(model, 0.9)
    ema.update()
    with torch.no_grad():
        model.x.mul_(1.1)
    trained = model.x.detach().clone()

    ema.update()
    ema.store()
    ema.copy_to()

    assert torch.equal(model.y, frozen)
    assert not torch.equal(model.x, trained)
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False]


@on_both
def test_to(make):
    """`to` casts the averages; stored weights come back exactly as the model has them."""
    model = nn.Linear(11, 3)
    ema = make(model, 0.9)
    assert ema.shadow_params[0].dtype == torch.get_default_dtype()

    ema.to(dtype=torch.float16)
    assert ema.shadow_params[0].dtype == torch.float16
    for dtype in (torch.get_default_dtype(), torch.float16):
        model.to(dtype)
        before = model.weight.detach().clone()
        ema.store(model)
        ema.to(dtype=torch.float64)
        nn.init.ones_(model.weight)
        ema.restore(model)
        assert model.weight.dtype == dtype
        assert torch.equal(model.weight, before)
    assert ema.shadow_params[0].dtype == torch.float64


@on_both
@explicit_or_not
@counting_or_not
def test_state_dict(make, use_num_updates, explicit_params):
    """A state carries the averages and the decay into another object, and back.

    The original case has the parameter `use_num_updates` too, and does not use it.
    """
    decay = 0.995
    model, other = filled(0.0), nn.Linear(10, 2, bias=False)
    ema, loaded = make(model, decay, use_num_updates=False), make(other, 0.0, use_num_updates=False)
    source = (other,) if explicit_params else ()

    loaded.load_state_dict(copy.deepcopy(ema.state_dict()))
    assert loaded.decay == decay
    assert torch.equal(loaded.shadow_params[0], ema.shadow_params[0])

    nn.init.ones_(other.weight)
    loaded.update(*source)
    assert torch.equal(other.weight, torch.ones(2, 10))

    ema.load_state_dict(loaded.state_dict())
    ema.copy_to()
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 10), 1 - decay))


@on_both
def test_state_dict_types(make):
    """A float16 model takes the averages of a float32 model, and keeps its dtype."""
    model, half = nn.Linear(10, 2, bias=False), nn.Linear(10, 2, bias=False).half()
    averages = [make(one, 0.9) for one in (model, half)]
    for ema in averages:
        ema.update()

    averages[1].load_state_dict(averages[0].state_dict())
    for ema in averages:
        ema.copy_to()

    assert (model.weight.dtype, half.weight.dtype) == (torch.get_default_dtype(), torch.float16)
    torch.testing.assert_close(model.weight.half(), half.weight)


@on_both
def test_bad_state_dict1(make):
    """A state of another shape is refused before the model is changed.

    torch_ema refuses it in `copy_to`, modkit already in `load_state_dict`.
    """
    model = nn.Linear(10, 2, bias=False)
    before = model.weight.detach().clone()
    ema = make(model, 0.9)
    of_another_shape = make(nn.Linear(7, 3, bias=False), 0.9).state_dict()

    def load_and_copy():
        ema.load_state_dict(of_another_shape)
        ema.copy_to()

    with pytest.raises((RuntimeError, ValueError)):
        load_and_copy()
    assert torch.equal(model.weight, before)


@on_both
def test_bad_state_dict2(make):
    """A state of fewer parameters is a ValueError."""
    ema = make(nn.Linear(10, 2), 0.9)
    shorter = make(nn.Linear(10, 2, bias=False), 0.9).state_dict()

    with pytest.raises(ValueError):
        ema.load_state_dict(shorter)
