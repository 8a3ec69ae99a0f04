"""Updates of ``EMA``: which tensors are averaged, by which decay, and how models are matched."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit.schedules import (
    Constant,
    CountWarmup,
    Equal,
    InverseGamma,
    PerUpdate,
    Power,
)
from tests.cases import for_each
from tests.unit.averaging.recipes import (
    averaged,
    model_of,
    network,
    set_to,
)


# --- matching --------------------------------------------------------------------------------------


@for_each("outer", ["ema", "model"])
@for_each("include", [None, "*weight"])
@for_each("count", [1, 6])
def test_one_common_prefix_does_not_change_names(outer: str, include, count: int) -> None:
    """A wrapper that holds the network under a name of its own can take its place, in every method."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)), nn.BatchNorm1d(2))
    wrapper = nn.ModuleDict({"net": net})
    tracked, other = (wrapper, net) if outer == "ema" else (net, wrapper)
    ema, plain = (modkit.EMA(tracked, 0.5, include=include) for _ in range(2))
    for value in 1.0, 3.0:
        set_to(net, value)
        ema.update(other)
        plain.update()
    with ema.applied(other):
        inside = net[0].weight.clone()
    before = net[0].weight.clone()
    ema.copy_to(other)

    averages = dict(plain.named_averages())
    assert all(one.equal(averages[name]) for name, one in ema.named_averages())
    assert inside.eq(2.0).all()
    assert before.eq(3.0).all()
    assert net[0].weight.eq(2.0).all()


@for_each("decays", [0.5, [0.5, 0.9]])
def test_a_first_update_may_run_out_of_memory(decays) -> None:
    """Nothing has changed then: the next update is the first one, also of a model made smaller."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    ema = modkit.EMA(model, decays)
    made: list[Tensor] = []

    def empty_like(*args, **kwargs):
        if len(made) == 4:
            raise torch.OutOfMemoryError("out of memory")
        made.append(torch.zeros_like(*args, **kwargs))
        return made[-1]

    for smaller in (False, True):
        made.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty_like", empty_like)
            with pytest.raises(torch.OutOfMemoryError):
                ema.update()
        assert (ema.step, ema.n_averaged, dict(ema.named_averages())) == (0, 0, {})
        if smaller:
            model[1] = nn.Linear(40, 20)

    ema.update()

    assert (ema.step, ema.n_averaged) == (1, 1)
    for index in range(len(ema.schedules)):
        averages = dict(ema.named_averages(index))
        assert averages.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(averages[name], p) for name, p in model.named_parameters())


def test_include_and_exclude() -> None:
    """Globs and functions choose parameters; the others stay as the model has them."""
    net = network()
    globs = modkit.EMA(net, include=["0.*", "3.*"], exclude="*.bias", buffers="ignore")
    chosen = modkit.EMA(net, include=lambda name: name == "1.weight", buffers="ignore")
    globs.update()
    chosen.update()

    assert [n for n, _ in globs.named_averages()] == [
        "0.weight",
        "3.weight",
        "1.num_batches_tracked",
    ]
    assert [n for n, _ in chosen.named_averages()] == ["1.weight", "1.num_batches_tracked"]


# --- buffers ---------------------------------------------------------------------------------------


def test_copied_buffers_are_no_aliases_and_may_change_shape() -> None:
    """A cache that grows is followed, and writing to it afterwards does not reach the copy."""
    model = model_of(0.0)
    model.register_buffer("cache", torch.zeros(1))
    ema = modkit.EMA(model)
    ema.update()
    model.cache = torch.ones(3)
    ema.update()
    model.cache.fill_(7.0)

    assert torch.equal(averaged(ema, "cache"), torch.ones(3))


# --- odd tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_gradients(mode) -> None:
    """Models that are built, and updates that are made, in inference mode average like others."""
    with mode():
        model = model_of(1.0)
        ema = modkit.EMA(model, decay=0.5)
        ema.update()
    with torch.no_grad() if not model.weight.is_inference() else torch.inference_mode():
        model.weight.fill_(2.0)
        ema.update()
    ema.update()

    assert averaged(ema).item() == 1.75
    assert not averaged(ema).requires_grad
    assert not averaged(ema).is_inference()


# --- the decay of the latest step ----------------------------------------------------------------


SCHEDULES: list[Any] = [
    Constant(0.9),
    CountWarmup(0.999),
    Equal(),
    InverseGamma(power=0.75),
    Power(sigma_rel=0.1),
    PerUpdate(CountWarmup(0.99)),
    lambda n: n / (n + 2),
]


def values(count: int) -> list[float]:
    """Return values for the only parameter of a model."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).double().tolist()


@for_each("schedule", SCHEDULES)
@for_each("every", [1, 3])
@for_each("after", [0, 4])
def test_it_is_the_decay_by_which_the_latest_step_averaged(
    schedule: Any, every: int, after: int
) -> None:
    """The average before and after a step, and the parameter, tell it in float64."""
    model = model_of(0.0, torch.float64)
    options: dict[str, Any] = {"update_every": every, "update_after_step": after}
    ema = modkit.EMA(model, schedule=schedule, precision="fp64", **options)
    assert ema.decay == 0.0
    before: Tensor | None = None
    decay = 0.0
    for value in values(30):
        count = ema.n_averaged
        set_to(model, value)
        ema.update()
        latest = ema.decay
        if ema.n_averaged == count:
            # Not due: still that of the step before.
            assert latest == decay
            continue
        if before is None:
            assert latest == 0.0
        else:
            mixed = latest * before + (1 - latest) * value
            torch.testing.assert_close(averaged(ema), mixed, rtol=1e-12, atol=1e-12)
        decay = latest
        before = averaged(ema).clone()

    assert 0 < ema.decay < 1


def test_it_is_a_plain_number_of_the_first_average() -> None:
    """Several averages have the decay of the first one."""
    ema = modkit.EMA(network(), [0.5, 0.9])
    ema.update()
    ema.update()

    assert (type(ema.decay), ema.decay) == (float, 0.5)


def test_a_skipped_step_has_no_decay() -> None:
    """On CPU a step that was skipped leaves the decay of the one before."""
    model = model_of(1.0)
    ema = modkit.EMA(model, schedule=Equal(), on_nonfinite="skip")
    seen = []
    for value in (1.0, 2.0, torch.nan, 3.0):
        set_to(model, value)
        ema.update()
        seen.append(ema.decay)

    assert seen == [0.0, 1 / 2, 1 / 2, 2 / 3]


def test_it_cannot_be_set_but_its_schedule_can() -> None:
    """A schedule that is assigned counts from the next update on."""
    model = model_of(1.0, torch.float64)
    ema = modkit.EMA(model, 0.5)
    ema.update()
    with pytest.raises(AttributeError):
        ema.decay = 0.75
    ema.schedules[0] = Constant(0.75)
    set_to(model, 2.0)
    ema.update()

    assert ema.decay == 0.75
    assert averaged(ema).item() == 1.25
