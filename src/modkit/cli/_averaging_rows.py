"""The rows of weight averaging."""

from types import ModuleType
from typing import Any, Final

import torch
from torch.optim import swa_utils as torch_averages

import modkit
import modkit.nn
from modkit.cli._row_kinds import Against, Cold, Limit, Names, Row, Time
from modkit.optim import swa_utils


# GPT-2 small: 148 tensors, 124M elements.
_WIDTH: Final = 768
_BLOCK: Final = [
    *[(_WIDTH,)] * 4,
    *[(3 * _WIDTH, _WIDTH), (3 * _WIDTH,), (_WIDTH, _WIDTH), (_WIDTH,)],
    *[(4 * _WIDTH, _WIDTH), (4 * _WIDTH,), (_WIDTH, 4 * _WIDTH), (_WIDTH,)],
]
GPT2: Final = [(50257, _WIDTH), (1024, _WIDTH), *_BLOCK * 12, (_WIDTH,), (_WIDTH,)]


def averaged(model: Any, library: Any, **options: Any) -> Any:
    """Return an average that has copied the model, so that the next update averages."""
    rule = library.get_ema_multi_avg_fn(0.99)
    average = library.AveragedModel(model, multi_avg_fn=rule, **options)
    for _ in range(3):
        average.update_parameters(model)
    return average


def small_tensors(nn: ModuleType) -> Names:
    """Average 512 parameters of at most 16 elements, and the buffers of 64 BatchNorms."""
    layers = [nn.Linear(4, 4) for _ in range(192)] + [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(64)
    ]
    model = nn.Sequential(*layers)
    library = swa_utils if nn is modkit.nn else torch_averages
    return {"m": model, "library": library, "average": averaged(model, library)}


def parameters(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> modkit.nn.ParameterList:
    """Make a model that is nothing but parameters."""
    tensors = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    return modkit.nn.ParameterList(modkit.nn.Parameter(tensor) for tensor in tensors)


def ema_of(model: Any, *args: Any, **options: Any) -> Any:
    """Return an ``EMA`` that has begun."""
    ema = modkit.EMA(model, *args, **options)
    for _ in range(3):
        ema.update()
    return ema


def tiny() -> Names:
    """Average 1,000 parameters of 16 elements, once and with four decays."""
    model = parameters([(4, 4)] * 1000)
    return {"ema": ema_of(model), "four": ema_of(model, [0.9, 0.99, 0.999, 0.9999])}


def gpt2(dtype: torch.dtype, *, model_of: bool = False) -> Names:
    """Average a model of the size of GPT-2 small in float32, beside one flat tensor."""
    model = parameters(GPT2, dtype)
    size = sum(parameter.numel() for parameter in model)
    names: Names = {"m": model, "flat": torch.zeros(size), "average_of_flat": torch.zeros(size)}
    if model_of:
        names["average"] = averaged(model, swa_utils, precision="fp32")
    else:
        names["ema"] = ema_of(model)
    return names


def skipping() -> Names:
    """Average 16M elements, with and without a test for values that are not finite."""
    model = parameters([(1000, 1000)] * 16)
    return {"ema": ema_of(model), "skip": ema_of(model, on_nonfinite="skip")}


UPDATE: Final = "average.update_parameters(m)"
FLAT: Final = "average_of_flat.lerp_(flat, 0.01)"
SMALL: Final = "512 small tensors with BatchNorm"

AVERAGING: Final[list[Row]] = [
    Time(f"AveragedModel.update_parameters(), {SMALL}", 0.12, UPDATE, small_tensors),
    Cold(
        f"AveragedModel.update_parameters(), caches evicted, {SMALL}", 0.25, UPDATE, small_tensors
    ),
    Time(f"AveragedModel(model), {SMALL}", 1.05, "library.AveragedModel(m)", small_tensors),
    Limit("EMA.update(), 1,000 tiny tensors / 0.5 ms", 5e-4, "ema.update()", tiny),
    Against(
        "EMA.update(), four averages / one, 1,000 tiny tensors",
        1.3,
        "ema.update()",
        "four.update()",
        tiny,
    ),
    Against(
        "EMA.update(), 124M fp32 / lerp_() of one tensor",
        1.25,
        FLAT,
        "ema.update()",
        lambda: gpt2(torch.float32),
    ),
    Against(
        "EMA.update(), 124M bf16 in fp32 / fp32 lerp_() of one tensor",
        1.6,
        FLAT,
        "ema.update()",
        lambda: gpt2(torch.bfloat16),
    ),
    Against(
        "AveragedModel(precision='fp32'), 124M bf16 / fp32 lerp_() of one tensor",
        1.6,
        FLAT,
        UPDATE,
        lambda: gpt2(torch.bfloat16, model_of=True),
    ),
    Against(
        "EMA(on_nonfinite='skip').update() / without it, 16M elements",
        1.5,
        "ema.update()",
        "skip.update()",
        skipping,
    ),
    Limit(
        "EMA.applied() in and out, 1,000 tensors / 2.5 ms",
        2.5e-3,
        "with ema.applied(): pass",
        tiny,
    ),
]
