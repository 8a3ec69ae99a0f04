from typing import Any

import pytest
import torch

import modkit
from modkit.averaging.precision import CHUNK, DEVICE_CHUNK, gathered, kept_dtype, parts
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import (
    PRECISIONS,
    as_accelerator,
    averaged,
    layers,
    model_of,
    set_to,
    walk,
)


@for_each("precision", PRECISIONS)
@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_constant_does_not_drift(precision, dtype) -> None:
    """The average of constant weights is bitwise identical to them."""
    value = torch.linspace(-3, 3, 101).to(dtype)
    model = model_of(value, dtype)
    ema = modkit.EMA(model, decay=0.9999, precision=precision)
    for _ in range(300):
        ema.update()

    assert torch.equal(averaged(ema).to(dtype), value)


@for_each("size", [5, CHUNK // 2, CHUNK // 2 + 1])
@for_each("contiguous", [True, False])
def test_large_tensors_are_cast_in_parts(size: int, contiguous: bool) -> None:
    """The average of bfloat16 weights is that of the same weights in float32, whatever their size.

    Matrices of two rows: the last one has more elements than a part.
    """
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(2, size, generator=generator).bfloat16() for _ in range(3)]
    narrow, wide = model_of(steps[0], torch.bfloat16), model_of(steps[0], torch.float32)
    if not contiguous:
        narrow.weight.data = narrow.weight.data.t().contiguous().t()
    emas = [modkit.EMA(model, decay=0.9) for model in (narrow, wide)]
    for step in steps:
        for model, ema in zip((narrow, wide), emas, strict=True):
            set_to(model, step)
            ema.update()

    assert averaged(emas[0]).dtype == torch.float32
    assert torch.equal(averaged(emas[0]), averaged(emas[1]))


def test_random_rounding_depends_on_the_seed_alone() -> None:
    """Two averages with one seed are equal, others are not, and global randomness is left alone."""

    def run(seed: int) -> torch.Tensor:
        model = model_of(torch.ones(1000), torch.bfloat16)
        ema = modkit.EMA(model, decay=0.99, precision="stochastic", seed=seed)
        ema.update()
        set_to(model, 2.0)
        for _ in range(10):
            ema.update()
        return averaged(ema)

    state = torch.get_rng_state()
    first, again, other = run(1), run(1), run(2)

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


@for_each(
    ("dtype", "kept"),
    [
        (torch.bfloat16, ["bfloat16", "float32", "float64", "bfloat16"]),
        (torch.float32, ["float32", "float32", "float64", "float32"]),
        (torch.float64, ["float64", "float64", "float64", "float64"]),
        (torch.complex64, ["complex64", "complex64", "complex128", "complex64"]),
        (torch.float8_e5m2, ["float32", "float32", "float64", "float32"]),
        (torch.int32, ["int32"] * 4),
    ],
    ids=str,
)
def test_in_what_an_average_is_kept(dtype, kept: list[str]) -> None:
    """No precision keeps an average in less than the parameter has."""
    found = [str(kept_dtype(dtype, precision)) for precision in PRECISIONS]

    assert found == [f"torch.{name}" for name in kept]


@for_each(("device", "limit"), [("cpu", CHUNK), ("meta", DEVICE_CHUNK)])
def test_the_memory_of_temporaries_is_bounded(device: str, limit: int) -> None:
    """Small tensors are batched up to the limit, which is higher on a device, and a large one is cut."""
    tensors = [torch.empty(size, device=device) for size in (*[limit // 2] * 3, 2 * limit + 1)]
    sizes = [sum(map(torch.numel, batch)) for (batch,) in parts(tensors)]

    assert sorted(sizes) == [1, limit // 2, limit, limit, limit]


@for_each("size", [6, CHUNK, 2 * CHUNK])
def test_a_cast_on_an_accelerator_takes_few_kernels(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel has to be started by the host, so there is one part; and no more memory than that."""
    as_accelerator(monkeypatch)
    model = model_of(torch.zeros(size), torch.bfloat16)
    ema = modkit.EMA(model, decay=0.5)
    ema.update()
    with torch.profiler.profile(profile_memory=True) as profiled:
        ema.update()
    events = {event.key: event for event in profiled.key_averages()}

    assert events["aten::_foreach_lerp_"].count == 1
    assert events["aten::_foreach_copy_"].count == 1
    assert events["aten::empty"].self_cpu_memory_usage == 4 * size


@for_each("precision", PRECISIONS)
def test_many_tensors_on_an_accelerator(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gathered for kernels that take one tensor, and their averages are the same.

    Random numbers are others there, so the values for `stochastic` need no rounding.
    """

    def run() -> list[dict[str, Any]]:
        net = layers(torch.bfloat16)
        ema = modkit.EMA(net, decay=0.5, precision=precision)
        for step in range(4):
            if precision == "stochastic":
                set_to(net, 2.0**step)
            else:
                walk(net, step)
            ema.update()
        return ema.state_dict()["averages"]

    expected = run()
    as_accelerator(monkeypatch)
    assert freeze(run()[0]["tensors"]) == freeze(expected[0]["tensors"])


class Tagged(torch.Tensor):
    """A tensor that may have arithmetic of its own."""


def test_which_tensors_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several plain ones, on a device that has kernels for lists."""
    plain = [torch.ones(2), torch.zeros(3, 1)]
    tagged = [tensor.as_subclass(Tagged) for tensor in plain]
    assert gathered(plain)[0] is plain
    as_accelerator(monkeypatch)
    ((flat,),) = gathered(plain)

    assert flat.tolist() == [1, 1, 0, 0, 0]
    assert gathered(tagged)[0] is tagged
    assert gathered(plain, tagged) == [plain, tagged]
    assert gathered(plain[:1]) == [plain[:1]]


def test_random_numbers_for_xla_are_from_the_host() -> None:
    """XLA has no generators."""
    (average,) = modkit.EMA(model_of([1.0]), precision="stochastic")._engine.averages

    assert average.generator(torch.device("xla")).device.type == "cpu"
