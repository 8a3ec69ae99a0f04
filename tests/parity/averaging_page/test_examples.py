import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import one_weight, set_weight, tensors
from tests.parity.averaging.rules import training_states
from tests.parity.averaging_page.nets import build, every_subject, inputs
from tests.parity.averaging_page.test_averaging import without_integers


def without_dropout(model):
    """Let all elements pass."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def parts(impl: Implementation, subject: str):
    """Return what the example starts with: loader, optimizer, model and loss function.

    Without dropout: torch's `update_bn` runs it, modkit's does not.
    """
    model = without_dropout(build(impl, subject))
    data = torch.randn(16, 3, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        shape = model(data).shape
    targets = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(data, targets), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return loader, optimizer, model, torch.nn.functional.mse_loss


def swa_example(impl: Implementation, subject: str):
    """Run the first example as printed: 300 epochs, averaging after the 161st."""
    loader, optimizer, model, loss_fn = parts(impl, subject)
    swa_model = impl.AveragedModel(model)
    scheduler = CosineAnnealingLR(optimizer, T_max=300)
    swa_start = 160
    swa_scheduler = impl.SWALR(optimizer, swa_lr=0.05)
    rates = []
    for i in range(300):
        for batch, target in loader:
            optimizer.zero_grad()
            loss_fn(model(batch), target).backward()
            optimizer.step()
        if i > swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    # Update bn statistics for the swa_model at the end
    impl.update_bn(loader, swa_model)
    return swa_model, rates


@pytest.mark.parametrize("subject", ["user", "sequential", "layer"])
def test_the_swa_example_is_bitwise_identical(subject: str) -> None:
    """The example of 300 epochs gives the same average, statistics and rates on both."""

    def scenario(impl: Implementation) -> object:
        swa_model, rates = swa_example(impl, subject)
        return swa_model, rates, swa_model.n_averaged.item(), swa_model.eval()(inputs())

    kind, value = same(scenario)

    assert kind == "returned"
    assert value[1][2] == ("int", "139")


def test_the_swa_example_averages_the_last_epochs(impl: Implementation) -> None:
    """The 139 epochs after the 161st are averaged, at the constant rate of SWALR."""
    swa_model, rates = swa_example(impl, "layer")

    assert swa_model.n_averaged == 139
    assert rates[-1] == rates[200] == pytest.approx(0.05)
    assert rates[0] > rates[160]


def test_the_ema_example_as_printed(impl: Implementation) -> None:
    """The page passes the function in the place of the device: a TypeError in torch as well."""
    model = build(impl, "sequential")
    with pytest.raises(TypeError):
        impl.AveragedModel(model, impl.get_ema_multi_avg_fn(0.9), use_buffers=True)


@every_subject
def test_the_ema_example_by_keyword(impl: Implementation, subject: str) -> None:
    """It computes exponential moving averages of the weights and buffers."""
    model = without_integers(build(impl, subject))
    ema_model = impl.AveragedModel(
        model, multi_avg_fn=impl.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    expected = None
    for _ in training_states(model, 5):
        ema_model.update_parameters(model)
        current = [t.detach().double() for t in tensors(model)]
        expected = (
            current
            if expected is None
            else [0.9 * e + 0.1 * c for e, c in zip(expected, current, strict=True)]
        )

    for found, value in zip(tensors(ema_model.module), expected, strict=True):
        torch.testing.assert_close(found.detach().double(), value, rtol=1e-5, atol=1e-6)


@every_subject
def test_custom_averaging_functions(impl: Implementation, subject: str) -> None:
    """A function of the user's, for tensors or for lists, takes the place of the default."""
    model = build(impl, subject)

    def largest(averaged, current, count):
        return torch.maximum(averaged, current)

    def largest_of_lists(averaged, current, count):
        for own, other in zip(averaged, current, strict=True):
            own.copy_(largest(own, other, count))

    one = impl.AveragedModel(model, avg_fn=largest)
    many = impl.AveragedModel(model, multi_avg_fn=largest_of_lists)
    history = []
    for _ in training_states(model, 3):
        history.append([p.detach().clone() for p in model.parameters()])
        one.update_parameters(model)
        many.update_parameters(model)

    for own, other, *states in zip(one.parameters(), many.parameters(), *history, strict=True):
        assert torch.equal(own, torch.stack(states).amax(0))
        assert torch.equal(other, own)


# --- the functions that the page names -------------------------------------------------------------

FACTORIES = {
    "get_swa_avg_fn": ({}, 2.0),
    "get_swa_multi_avg_fn": ({}, 2.0),
    "get_ema_avg_fn": ({"decay": 0.75}, 2.0),
    "get_ema_multi_avg_fn": ({"decay": 0.75}, 2.0),
}


@for_each("name", FACTORIES)
def test_factories_make_averaging_functions(impl: Implementation, name: str) -> None:
    """Each of the four makes a function for its argument: the 4th model weighs a quarter here."""
    options, expected = FACTORIES[name]
    argument = "multi_avg_fn" if "multi" in name else "avg_fn"
    model = one_weight(impl, 0.0)
    averaged = impl.AveragedModel(model, **{argument: getattr(impl, name)(**options)})
    for value in 0.0, 0.0, 0.0, 8.0:
        averaged.update_parameters(set_weight(model, value))

    assert averaged.module.weight.item() == expected


@pytest.mark.parametrize("name", [name for name in FACTORIES if "ema" in name])
def test_the_decay_is_a_fraction(name: str) -> None:
    """A decay outside of [0, 1] raises torch's ValueError; the default is 0.999."""
    for decay in -0.1, 1.1:
        assert same(lambda impl, d=decay: getattr(impl, name)(d))[:2] == ("raised", "ValueError")

    def scenario(impl: Implementation) -> object:
        argument = "multi_avg_fn" if "multi" in name else "avg_fn"
        averaged = impl.AveragedModel(one_weight(impl), **{argument: getattr(impl, name)()})
        for value in 0.0, 1.0:
            averaged.update_parameters(one_weight(impl, value))
        return averaged

    assert same(scenario)[0] == "returned"


@for_each("subject", ["user", "norm", "sequential"])
@for_each("batches", ["tensors", "pairs"])
def test_update_bn_updates_the_activation_statistics(subject: str, batches: str) -> None:
    """It passes the data through the averaged model, and gives torch's statistics and modes."""

    def scenario(impl: Implementation) -> object:
        model = build(impl, subject)
        averaged = without_dropout(impl.AveragedModel(model))
        averaged.update_parameters(model)
        loader = [inputs(), 3 * inputs() + 1]
        if batches == "pairs":
            loader = [(batch, batch.sum(1)) for batch in loader]
        impl.update_bn(loader, averaged)
        return averaged, [module.training for module in averaged.modules()]

    assert same(scenario)[0] == "returned"


def test_update_bn_leaves_the_parameters(impl: Implementation) -> None:
    """Only the statistics change: parameters and n_averaged keep their bits."""
    model = build(impl, "sequential")
    averaged = impl.AveragedModel(model)
    averaged.update_parameters(model)
    before = freeze(list(averaged.parameters()))
    mean = averaged.module[1].running_mean.clone()
    impl.update_bn([inputs()], averaged)

    assert freeze(list(averaged.parameters())) == before
    assert averaged.n_averaged == 1
    assert not torch.equal(averaged.module[1].running_mean, mean)


def test_update_bn_is_for_models_with_batch_norm(impl: Implementation) -> None:
    """An averaged model without such a layer is not called."""
    averaged = impl.AveragedModel(build(impl, "layer"))
    calls = []
    averaged.register_forward_pre_hook(lambda *_: calls.append(1))
    impl.update_bn([inputs()], averaged)

    assert calls == []


def test_swalr_takes_over_the_rate(impl: Implementation) -> None:
    """SWALR(optimizer, swa_lr=0.05) anneals the rate to 0.05 in ten steps of a cosine, and keeps it."""
    model = build(impl, "layer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scheduler = impl.SWALR(optimizer, swa_lr=0.05)
    rates = []
    for _ in range(12):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    assert rates[4] == pytest.approx(0.15)
    assert rates[9:] == pytest.approx([0.05] * 3)
    assert sorted(rates, reverse=True) == pytest.approx(rates)
