"""Averages of random models are bitwise identical to torch's, and several at once to single ones."""

import random
from typing import Any

import torch
from torch import nn

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.unit.averaging.recipes import PRECISIONS


SHAPES = [(), (1,), (3,), (3, 3), (2, 1, 3), (0, 2), (33, 40), (1025,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def random_model(seed: int, dtypes: list[torch.dtype], *, integers: bool) -> nn.Module:
    """Return layers with parameters of random shapes and dtypes, some tied, and buffers."""
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential()
    for _ in range(chosen.randint(3, 9)):
        layer = nn.Module()
        dtype, shape = chosen.choice(dtypes), chosen.choice(SHAPES)
        for number in range(chosen.randint(0, 6)):
            values = torch.randn(shape).to(dtype)
            layer.register_parameter(f"p{number}", nn.Parameter(values))
            if chosen.random() < 0.2:
                dtype, shape = chosen.choice(dtypes), chosen.choice(SHAPES)
        layer.register_buffer("floating", torch.randn(shape), persistent=chosen.random() < 0.7)
        if chosen.random() < 0.3:
            layer.register_buffer("count", torch.tensor(chosen.randint(0, 9)))
        if integers and chosen.random() < 0.3:
            layer.number = nn.Parameter(torch.arange(4), requires_grad=False)
        model.append(layer)
        if chosen.random() < 0.2:
            model.append(layer)
    model.append(nn.BatchNorm1d(3))
    return model


def walk(model: nn.Module, step: int) -> None:
    """Give all tensors random values."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 5)


def rules(impl: Any) -> dict[str, dict[str, Any]]:
    """Return the averaging functions of a library."""
    return {
        "default": {},
        "ema": {"avg_fn": impl.get_ema_avg_fn(0.9)},
        "swa": {"avg_fn": impl.get_swa_avg_fn()},
        "multi ema": {"multi_avg_fn": impl.get_ema_multi_avg_fn(0.9)},
        "multi swa": {"multi_avg_fn": impl.get_swa_multi_avg_fn()},
    }


@for_each("seed", range(12))
@for_each("use_buffers", [False, True])
@for_each("rule", list(rules(torch.optim.swa_utils)))
def test_averaged_model_has_the_bits_of_torch(rule: str, use_buffers: bool, seed: int) -> None:
    """After each of ten updates the states are bitwise identical."""
    # Torch averages integer buffers, which multiplies by a fraction only in some rules.
    integers = rule == "default" and not use_buffers
    model = random_model(seed, DTYPES, integers=integers)
    if use_buffers:
        model.apply(without_counts)
    both = [
        impl.AveragedModel(model, **rules(impl)[rule], use_buffers=use_buffers)
        for impl in (modkit.optim.swa_utils, torch.optim.swa_utils)
    ]
    for step in range(10):
        walk(model, step)
        for average in both:
            average.update_parameters(model)
        ours, theirs = (average.state_dict() for average in both)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            assert ours[name].equal(tensor), name


def without_counts(module: nn.Module) -> None:
    """Drop integer buffers, which modkit copies and torch averages."""
    for name in ("count", "num_batches_tracked"):
        if name in module._buffers:
            setattr(module, name, None)


@for_each("seed", range(6))
@for_each("precision", PRECISIONS)
@for_each("policy", ["ignore", "skip"])
def test_several_averages_have_the_bits_of_one(policy: Any, precision: Any, seed: int) -> None:
    """Four averages of a model at once are those of four EMAs, after each step."""
    model = random_model(seed, DTYPES, integers=True)
    decays = [0.9, schedules.Equal(), schedules.CountWarmup(0.999), 0.5]
    options = {"precision": precision, "on_nonfinite": policy, "buffers": "average", "seed": seed}
    together = modkit.EMA(model, schedule=decays, **options)
    alone = [modkit.EMA(model, schedule=decay, **options) for decay in decays]
    for step in range(8):
        walk(model, step)
        together.update()
        for one in alone:
            one.update()
        for index, one in enumerate(alone):
            expected = dict(one.named_averages())
            for name, tensor in together.named_averages(index):
                assert tensor.equal(expected[name]), name
