"""The rows of weight averaging."""

from types import ModuleType
from typing import Any, Final

import torch
from torch.optim import swa_utils as torch_averages

import modkit
import modkit.nn
from modkit.cli._row_kinds import Against, Limit, Names, Row, Time
from modkit.optim import swa_utils


def averaged(model: Any, library: Any) -> Any:
    """Return an average of a model that has begun: the first update copies, and later ones average."""
    average = library.AveragedModel(model, multi_avg_fn=library.get_ema_multi_avg_fn(0.99))
    for _ in range(3):
        average.update_parameters(model)
    return average


def small_tensors(nn: ModuleType) -> Names:
    """Make an average of 512 tensors of at most 16 numbers: all the time goes into the loops."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(256)))
    library = swa_utils if nn is modkit.nn else torch_averages
    return {"m": model, "average": averaged(model, library)}


def parameters(count: int, size: int) -> modkit.nn.ParameterList:
    """Make a model that is nothing but parameters."""
    tensors = (torch.zeros(size) for _ in range(count))
    return modkit.nn.ParameterList(modkit.nn.Parameter(tensor) for tensor in tensors)


def large_tensors() -> Names:
    """Make averages of 16 million numbers: of a model in 64 tensors, and of one flat tensor."""
    model = parameters(64, 250_000)
    flat, average_of_flat = torch.zeros(16_000_000), torch.zeros(16_000_000)
    average = averaged(model, swa_utils)
    return {"m": model, "average": average, "flat": flat, "average_of_flat": average_of_flat}


def ema_of(count: int, size: int) -> Names:
    """Make an ``EMA`` that has begun."""
    model = parameters(count, size)
    ema = modkit.EMA(model)
    for _ in range(3):
        ema.update()
    return {"m": model, "ema": ema}


UPDATE: Final = "average.update_parameters(m)"

AVERAGING: Final[list[Row]] = [
    Time("AveragedModel, 512 small tensors", 0.15, UPDATE, small_tensors),
    Against(
        "AveragedModel, 16M numbers / lerp_() of one tensor",
        1.10,
        "average_of_flat.lerp_(flat, 0.01)",
        UPDATE,
        large_tensors,
    ),
    Limit("EMA.update(), 1,000 tiny tensors / 1 ms", 1e-3, "ema.update()", lambda: ema_of(1000, 1)),
    Limit(
        "EMA.applied() in and out, 40M numbers / 1 ms",
        1e-3,
        "with ema.applied(): pass",
        lambda: ema_of(160, 250_000),
    ),
]
