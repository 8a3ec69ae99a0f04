import copy
import io
from typing import Any

import pytest
import torch

import modkit
from modkit._errors import NameMismatchError
from modkit.schedules import Constant, Equal
from tests.unit.averaging.recipes import model_of, network, set_to, train


def run(steps: int, **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train; return the state of the average and the parameters of the model after each step."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = modkit.EMA(net, **options)
    states, models = [], []
    for step in range(steps):
        train(net, optimizer, step, step + 1)
        ema.update()
        states.append(copy.deepcopy(ema.state_dict()))
        models.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return states, models


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 11), (30, 39), (0, 39)])
def test_it_is_the_mean_of_the_models_between(first: int, last: int) -> None:
    """The mean of a range equals that of its models to a millionth."""
    states, models = run(40, schedule=Equal())
    means = modkit.average_range(states[first], states[last])

    for name in models[0]:
        expected = torch.stack([each[name] for each in models[first + 1 : last + 1]]).mean(0)
        torch.testing.assert_close(means[name], expected, rtol=1e-5, atol=1e-6)


def test_every_second_model_counts_with_update_every() -> None:
    """The models that were averaged are those of the range that an update has seen."""
    states, models = run(21, schedule=Equal(), update_every=2)
    means = modkit.average_range(states[4], states[20])

    for name in models[0]:
        expected = torch.stack([each[name] for each in models[6:21:2]]).mean(0)
        torch.testing.assert_close(means[name], expected, rtol=1e-5, atol=1e-6)


def test_the_model_takes_the_result() -> None:
    """The names are those of the model, and the buffers are those of the end."""
    states, _ = run(6, schedule=[Constant(0.9), Equal()])
    net = network()
    keys = net.load_state_dict(modkit.average_range(states[1], states[5]))

    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert net[1].num_batches_tracked.item() == 6


def test_states_can_come_from_files() -> None:
    """What `torch.save` has written, read with nothing run, does as well."""
    states, _ = run(4, schedule=Equal())
    loaded = []
    for state in states[1], states[3]:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded.append(torch.load(file, weights_only=True))
    expected = modkit.average_range(states[1], states[3])
    found = modkit.average_range(*loaded)

    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_states_stay_as_they_are() -> None:
    """Nothing is written into the averages that are read."""
    states, _ = run(4, schedule=Equal())
    before = copy.deepcopy(states)
    modkit.average_range(states[0], states[3])

    for state, old in zip(states, before, strict=True):
        (tensors,), (kept,) = ([one["tensors"] for one in s["averages"]] for s in (state, old))
        assert all(torch.equal(tensors[name], kept[name]) for name in kept)


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        (torch.bfloat16, "fp32", 1e-5),
        (torch.bfloat16, "fp64", 1e-13),
        (torch.bfloat16, "compensated", 2e-3),
        (torch.float16, "compensated", 5e-5),
        (torch.float32, "compensated", 1e-6),
        (torch.float32, "fp64", 1e-13),
    ],
    ids=str,
)
def test_what_an_average_keeps_beside_itself_counts(
    dtype: torch.dtype, precision: str, tolerance: float
) -> None:
    """Late in a run, the mean of a short range is as right as the precision of the averages."""
    generator = torch.Generator().manual_seed(0)
    model = model_of(torch.zeros(1000), dtype)
    ema = modkit.EMA(model, schedule=Equal(), precision=precision)
    seen, states = [], []
    for step in range(200):
        set_to(model, torch.randn(1000, generator=generator).add_(1.0))
        ema.update()
        seen.append(model.weight.detach().double())
        if step in {189, 199}:
            states.append(copy.deepcopy(ema.state_dict()))
    mean = modkit.average_range(*states)["weight"]

    assert mean.dtype == (torch.float64 if precision == "fp64" else torch.float32)
    expected = torch.stack(seen[190:]).mean(0)
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", ["same", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_averages_that_are_rounded_to_16_bits_are_refused(
    dtype: torch.dtype, precision: str
) -> None:
    """The error names the tensor and its dtype: most of such a mean would be rounding."""
    model = model_of([1.0], dtype)
    ema = modkit.EMA(model, schedule=Equal(), precision=precision)
    ema.update()
    earlier = copy.deepcopy(ema.state_dict())
    ema.update()
    with pytest.raises(ValueError, match=rf"'weight' is kept in {dtype}"):
        modkit.average_range(earlier, ema.state_dict())


def test_other_averages_are_refused() -> None:
    """An exponential average says nothing about a range."""
    states, _ = run(3, decay=0.9)
    with pytest.raises(ValueError, match="earlier state is not of an EMA with schedule=Equal"):
        modkit.average_range(states[0], states[2])


@pytest.mark.parametrize(("first", "last"), [(2, 2), (2, 1)])
def test_a_range_that_does_not_grow_is_refused(first: int, last: int) -> None:
    """The error names the counters of both."""
    states, _ = run(3, schedule=Equal())
    with pytest.raises(ValueError, match=rf"\(1, 1, {first + 1}\) and \(1, 1, {last + 1}\)"):
        modkit.average_range(states[first], states[last])


def test_another_run_is_refused() -> None:
    """States whose counting began at different steps are not of one run."""
    first, _ = run(3, schedule=Equal())
    second, _ = run(6, schedule=Equal(), update_after_step=1)
    with pytest.raises(ValueError, match="of the same run"):
        modkit.average_range(first[1], second[5])


def test_another_model_is_refused() -> None:
    """The names that differ are listed."""
    states, _ = run(2, schedule=Equal())
    model = model_of(1.0)
    ema = modkit.EMA(model, schedule=Equal())
    for value in range(3):
        set_to(model, float(value))
        ema.update()
    with pytest.raises(NameMismatchError, match="weight"):
        modkit.average_range(ema.state_dict(), states[1])
