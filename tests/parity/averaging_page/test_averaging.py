import inspect
import math

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import tensors
from tests.parity.averaging.rules import RULES, training_states
from tests.parity.averaging_page.nets import (
    averaged_of,
    build,
    every_subject,
    fractions,
    inputs,
    values,
)


every_rule = for_each("rule", RULES)


# --- the class and its parameters ------------------------------------------------------------------


def test_signature_of_the_page(impl: Implementation) -> None:
    """The parameters are model, device, avg_fn, multi_avg_fn and use_buffers, with these defaults."""
    found = list(inspect.signature(impl.AveragedModel).parameters.values())[:5]

    assert [(p.name, p.default) for p in found] == [
        ("model", inspect.Parameter.empty),
        ("device", None),
        ("avg_fn", None),
        ("multi_avg_fn", None),
        ("use_buffers", False),
    ]


@every_subject
def test_it_is_a_module(impl: Implementation, subject: str) -> None:
    """An averaged model is a Module, whose one child `module` is the copy."""
    _, averaged = averaged_of(impl, subject)

    assert isinstance(averaged, impl.nn.Module)
    assert [name for name, _ in averaged.named_children()] == ["module"]


@every_subject
def test_it_creates_a_copy_of_the_provided_module(impl: Implementation, subject: str) -> None:
    """The copy has the class, text, modes and values of the model, and tensors of its own."""
    model = build(impl, subject).eval()
    averaged = impl.AveragedModel(model)
    own = {t.data_ptr() for t in tensors(averaged)}

    assert type(averaged.module) is type(model)
    assert freeze(averaged.module) == freeze(model)
    assert own.isdisjoint(t.data_ptr() for t in tensors(model))
    assert not averaged.module.training


@every_subject
def test_training_the_model_leaves_the_copy(impl: Implementation, subject: str) -> None:
    """Between updates the copy does not follow the model."""
    model, averaged = averaged_of(impl, subject)
    before = freeze(averaged)
    list(training_states(model, 1))

    assert freeze(averaged) == before


@every_subject
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("form", ["position", "keyword", "object"])
def test_the_averaged_model_is_stored_on_the_device(
    impl: Implementation, subject: str, device: str, form: str
) -> None:
    """With a device all tensors of the average are stored there; the model stays where it is."""
    model = build(impl, subject)
    averaged = {
        "position": lambda: impl.AveragedModel(model, device),
        "keyword": lambda: impl.AveragedModel(model, device=device),
        "object": lambda: impl.AveragedModel(model, device=torch.device(device)),
    }[form]()

    assert {t.device.type for t in tensors(averaged)} == {device}
    assert averaged.n_averaged.device.type == device
    assert {t.device.type for t in tensors(model)} == {"cpu"}


@every_subject
def test_the_device_is_optional(impl: Implementation, subject: str) -> None:
    """Without a device each tensor of the copy is where the model's is."""
    model = build(impl, subject)
    model.add_module("part", impl.nn.Linear(1, 1, device="meta"))
    averaged = impl.AveragedModel(model)
    pairs = zip(tensors(averaged.module), tensors(model), strict=True)

    assert all(own.device == other.device for own, other in pairs)


@pytest.mark.parametrize("device", ["cpu", None])
def test_an_average_on_a_device_follows_a_model_elsewhere(
    impl: Implementation, device: str | None
) -> None:
    """A model in another dtype and a default device elsewhere do not change the average's place."""
    model = build(impl, "layer")
    averaged = impl.AveragedModel(model, device)
    with torch.device("meta"):
        averaged.update_parameters(model)
        averaged.update_parameters(model)

    assert {t.device.type for t in averaged.parameters()} == {"cpu"}
    assert torch.equal(averaged.module.weight, model.weight)


# --- running averages ------------------------------------------------------------------------------


@every_subject
def test_the_default_is_an_equally_weighted_average(impl: Implementation, subject: str) -> None:
    """Without an averaging function the parameters are the mean over all updates (SWA)."""
    model = build(impl, subject)
    averaged = impl.AveragedModel(model)
    history = []
    for _ in training_states(model, 7):
        averaged.update_parameters(model)
        history.append(values(model.parameters()))

    for found, *states in zip(averaged.parameters(), *history, strict=True):
        torch.testing.assert_close(found.detach(), torch.stack(states).mean(0))
    assert averaged.n_averaged == 7


@every_subject
@pytest.mark.parametrize("form", ["get_ema_avg_fn", "get_ema_multi_avg_fn"])
def test_exponential_weights_instead_of_equal_weights(
    impl: Implementation, subject: str, form: str
) -> None:
    """An EMA weighs the model of k updates ago by (1 - decay) * decay**k, and the first by decay**k."""
    model = build(impl, subject)
    argument = "multi_avg_fn" if "multi" in form else "avg_fn"
    averaged = impl.AveragedModel(model, **{argument: getattr(impl, form)(0.75)})
    history = []
    for _ in training_states(model, 5):
        averaged.update_parameters(model)
        history.append(values(model.parameters()))
    weights = [0.75**4, *(0.25 * 0.75 ** (4 - k) for k in range(1, 5))]

    assert math.isclose(sum(weights), 1)
    for found, *states in zip(averaged.parameters(), *history, strict=True):
        expected = sum(w * state for w, state in zip(weights, states, strict=True))
        torch.testing.assert_close(found.detach(), expected)


@every_subject
@every_rule
def test_averages_are_bitwise_identical(subject: str, rule: str) -> None:
    """Every rule is bitwise identical on both for each subject."""

    def scenario(impl: Implementation) -> object:
        return averaged_of(impl, subject, 5, **RULES[rule](impl))[1]

    assert same(scenario)[0] == "returned"


@every_subject
@every_rule
def test_the_first_update_copies(impl: Implementation, subject: str, rule: str) -> None:
    """When n_averaged is 0, the parameters of the model are copied, whatever the function."""
    model = build(impl, subject)
    averaged = impl.AveragedModel(model, **RULES[rule](impl))
    before = averaged.n_averaged.item()
    list(training_states(model, 1))
    averaged.update_parameters(model)
    pairs = zip(averaged.parameters(), model.parameters(), strict=True)

    assert before == 0
    assert averaged.n_averaged == 1
    assert all(torch.equal(own, other) for own, other in pairs)


@every_subject
def test_every_subsequent_update_uses_the_function(impl: Implementation, subject: str) -> None:
    """The first call does not use avg_fn; each later one uses it once per parameter."""
    calls = []
    model = build(impl, subject)

    def function(averaged, current, count):
        calls.append(int(count))
        return averaged

    averaged = impl.AveragedModel(model, avg_fn=function)
    parameters = len(list(model.parameters()))
    for _ in training_states(model, 3):
        averaged.update_parameters(model)

    assert calls == [1] * parameters + [2] * parameters


@every_subject
def test_update_parameters_updates_in_place(impl: Implementation, subject: str) -> None:
    """It returns None, keeps the Parameter objects of the average and leaves the model alone."""
    model, averaged = averaged_of(impl, subject)
    objects, before = [id(p) for p in averaged.parameters()], freeze(model)

    assert averaged.update_parameters(model) is None
    assert [id(p) for p in averaged.parameters()] == objects
    assert freeze(model) == before


@every_subject
def test_forward_is_that_of_the_copy(impl: Implementation, subject: str) -> None:
    """`forward` and a call run the copy with the same arguments."""
    _, averaged = averaged_of(impl, subject)
    averaged.eval()
    expected = averaged.module(inputs())

    assert torch.equal(averaged(inputs()), expected)
    assert torch.equal(averaged.forward(inputs()), expected)


# --- averaging functions ---------------------------------------------------------------------------


@every_subject
def test_what_avg_fn_takes_in(impl: Implementation, subject: str) -> None:
    """avg_fn gets the averaged value, the model's value and the number of models averaged."""
    seen = []
    model = build(impl, subject)

    def function(averaged, current, count):
        seen.append((averaged.clone(), current.clone(), int(count)))
        return averaged + current

    averaged = impl.AveragedModel(model, avg_fn=function)
    states = training_states(model, 2)
    next(states)
    averaged.update_parameters(model)
    first = values(model.parameters())
    next(states)
    averaged.update_parameters(model)
    second = values(model.parameters())

    for (own, current, count), old, new in zip(seen, first, second, strict=True):
        assert torch.equal(own, old)
        assert torch.equal(current, new)
        assert count == 1
    for found, old, new in zip(averaged.parameters(), first, second, strict=True):
        assert torch.equal(found, old + new)


@every_subject
def test_what_multi_avg_fn_takes_in(impl: Implementation, subject: str) -> None:
    """multi_avg_fn gets both values as lists, and updates the averaged ones in place."""
    seen = []
    model = build(impl, subject)

    def function(averaged, current, count):
        seen.append((type(averaged), type(current), len(averaged), len(current), int(count)))
        for own, other in zip(averaged, current, strict=True):
            own.copy_(2 * other)

    averaged = impl.AveragedModel(model, multi_avg_fn=function)
    for _ in training_states(model, 2):
        averaged.update_parameters(model)
    parameters = len(list(model.parameters()))

    assert seen == [(list, list, parameters, parameters, 1)]
    for own, other in zip(averaged.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, 2 * other)


def test_only_one_averaging_function_is_used() -> None:
    """The page gives both None as default; torch 2.13 refuses both together, and so does modkit."""

    def scenario(impl: Implementation) -> object:
        one, many = impl.get_ema_avg_fn(0.9), impl.get_ema_multi_avg_fn(0.9)
        return impl.AveragedModel(build(impl, "layer"), avg_fn=one, multi_avg_fn=many)

    assert same(scenario)[:2] == ("raised", "AssertionError")


@every_subject
@every_rule
def test_the_functions_are_not_saved_in_the_state_dict(
    impl: Implementation, subject: str, rule: str
) -> None:
    """The state holds tensors only; an average that loads it keeps its own function."""
    model, averaged = averaged_of(impl, subject, **RULES[rule](impl))
    state = averaged.state_dict()
    other = impl.AveragedModel(model, avg_fn=max)
    other.load_state_dict(state)

    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert list(state) == ["n_averaged", *(f"module.{name}" for name in model.state_dict())]
    assert (other.avg_fn, other.multi_avg_fn) == (max, None)


# --- use_buffers -----------------------------------------------------------------------------------


def without_integers(model):
    """Take the integer buffers out of a model; torch would average them."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and not buffer.is_floating_point():
                module._buffers[name] = None
    return model


WITH_BUFFERS = for_each("subject", ["user", "norm", "sequential"])


@WITH_BUFFERS
def test_use_buffers_averages_parameters_and_buffers(impl: Implementation, subject: str) -> None:
    """With use_buffers=True, both are the mean over all updates."""
    model = without_integers(build(impl, subject))
    averaged = impl.AveragedModel(model, use_buffers=True)
    history = []
    for _ in training_states(model, 4):
        averaged.update_parameters(model)
        history.append(values(tensors(model)))

    for found, *states in zip(tensors(averaged.module), *history, strict=True):
        torch.testing.assert_close(found.detach(), torch.stack(states).mean(0))


@WITH_BUFFERS
def test_buffers_are_not_averaged_by_default(impl: Implementation, subject: str) -> None:
    """With use_buffers=False, all buffers are those of the model of the last update."""
    model, averaged = averaged_of(impl, subject, 4)
    pairs = zip(averaged.module.buffers(), model.buffers(), strict=True)

    assert averaged.use_buffers is False
    assert all(torch.equal(own, other) for own, other in pairs)


@WITH_BUFFERS
@every_rule
def test_averaged_buffers_are_bitwise_identical(subject: str, rule: str) -> None:
    """With use_buffers=True, every rule is bitwise identical in parameters and buffers on both."""

    def scenario(impl: Implementation) -> object:
        model = without_integers(build(impl, subject))
        averaged = impl.AveragedModel(model, use_buffers=True, **RULES[rule](impl))
        for _ in training_states(model, 4):
            averaged.update_parameters(model)
        return averaged, list(tensors(averaged))

    assert same(scenario)[0] == "returned"


@for_each("subject", ["norm", "sequential"])
@for_each("way", ["update_bn", "use_buffers"])
def test_two_ways_to_the_statistics_of_batch_norm(
    impl: Implementation, subject: str, way: str
) -> None:
    """`update_bn` computes them from data after training; use_buffers averages them during it."""
    model = build(impl, subject)
    if way == "use_buffers":
        without_integers(model)
    averaged = impl.AveragedModel(model, use_buffers=way == "use_buffers")
    history = []
    for number in range(3):
        model(inputs() * (number + 1))
        averaged.update_parameters(model)
        history.append({name: buffer.clone() for name, buffer in fractions(model).items()})
    last = {name: buffer.clone() for name, buffer in fractions(averaged.module).items()}
    if way == "update_bn":
        assert all(torch.equal(last[name], history[-1][name]) for name in last)
        impl.update_bn([inputs(8)], averaged)
        found = fractions(averaged.module)
        assert not any(torch.equal(found[name], last[name]) for name in last)
        return

    for name, buffer in last.items():
        expected = torch.stack([state[name] for state in history]).mean(0)
        torch.testing.assert_close(buffer, expected)


# --- n_averaged ------------------------------------------------------------------------------------


@every_subject
def test_n_averaged_counts_the_models(impl: Implementation, subject: str) -> None:
    """It is an int64 buffer, 0 at first, that each update increments by one."""
    model = build(impl, subject)
    averaged = impl.AveragedModel(model)
    found = []
    for _ in training_states(model, 3):
        found.append(averaged.n_averaged.item())
        averaged.update_parameters(model)

    assert [*found, averaged.n_averaged.item()] == [0, 1, 2, 3]
    assert averaged.n_averaged.dtype == torch.int64
    assert "n_averaged" in dict(averaged.named_buffers(recurse=False))


@every_subject
@every_rule
def test_n_averaged_zero_starts_anew(impl: Implementation, subject: str, rule: str) -> None:
    """If n_averaged is 0 again, the next update copies the parameters."""
    model, averaged = averaged_of(impl, subject, 3, **RULES[rule](impl))
    averaged.n_averaged.zero_()
    list(training_states(model, 1))
    averaged.update_parameters(model)
    pairs = zip(averaged.parameters(), model.parameters(), strict=True)

    assert averaged.n_averaged == 1
    assert all(torch.equal(own, other) for own, other in pairs)
