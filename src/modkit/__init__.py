"""modkit: a thin, typed facade over PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from modkit import nn as nn, schedules as schedules
from modkit.averaging.callback import EMACallback as EMACallback
from modkit.averaging.checkpoints import average_checkpoints as average_checkpoints
from modkit.averaging.ema import EMA as EMA
from modkit.averaging.posthoc import PostHocEMA as PostHocEMA
from modkit.averaging.ranges import average_range as average_range
from modkit.checkpoints import (
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
)
from modkit.nn._load_state_dict import load_state_dict as load_state_dict


if TYPE_CHECKING:
    from modkit import distributed as distributed, jit as jit, models as models, optim as optim

__all__ = [
    "EMA",
    "EMACallback",
    "PostHocEMA",
    "average_checkpoints",
    "average_range",
    "distributed",
    "jit",
    "load_checkpoint",
    "load_state_dict",
    "models",
    "nn",
    "optim",
    "save_checkpoint",
    "schedules",
]

# Imported when they are asked for: most programs need none of them.
_LATER = frozenset({"distributed", "jit", "models", "optim"})


def __getattr__(name: str) -> Any:
    """Import a subpackage that is read as an attribute, as ``torch`` has its own."""
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what is there, and what would be imported."""
    return sorted({*globals(), *_LATER})
