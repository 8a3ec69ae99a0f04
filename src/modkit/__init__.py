"""modkit: weight averages, checkpoints and fast inference for PyTorch, and torch.nn with fixes."""

import importlib
from typing import TYPE_CHECKING, Any

from modkit._namespace import publish_all as _publish_all


__version__ = "0.1.0"

# Type checkers do not run __getattr__ below, which imports these at run time.
if TYPE_CHECKING:
    from modkit import (
        distributed as distributed,
        errors as errors,
        files as files,
        jit as jit,
        migrations as migrations,
        models as models,
        nn as nn,
        optim as optim,
        posthoc as posthoc,
        schedules as schedules,
    )
    from modkit._fast_inference import fast_inference as fast_inference
    from modkit.averaging.callback import EMACallback as EMACallback
    from modkit.averaging.checkpoints import average_checkpoints as average_checkpoints
    from modkit.averaging.ema import EMA as EMA
    from modkit.averaging.posthoc import PostHocEMA as PostHocEMA
    from modkit.files.checkpoints import (
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from modkit.nn._load_matching import Matched as Matched, load_matching as load_matching
    from modkit.nn._load_state_dict import load_state_dict as load_state_dict

# Imported on first access, so that a program waits only for what it uses: the help of the command
# line needs no torch.
_HOMES = {
    "EMA": "averaging.ema",
    "EMACallback": "averaging.callback",
    "Matched": "nn._load_matching",
    "PostHocEMA": "averaging.posthoc",
    "average_checkpoints": "averaging.checkpoints",
    "fast_inference": "_fast_inference",
    "load_checkpoint": "files.checkpoints",
    "load_matching": "nn._load_matching",
    "load_state_dict": "nn._load_state_dict",
    "save_checkpoint": "files.checkpoints",
}

__all__ = [
    "EMA",
    "EMACallback",
    "Matched",
    "PostHocEMA",
    "average_checkpoints",
    "distributed",
    "errors",
    "fast_inference",
    "files",
    "jit",
    "load_checkpoint",
    "load_matching",
    "load_state_dict",
    "migrations",
    "models",
    "nn",
    "optim",
    "posthoc",
    "save_checkpoint",
    "schedules",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first access."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, name)
    module = importlib.import_module(f"{__name__}.{home}")
    value = module if home == name else getattr(module, name)
    if name in ("EMA", "EMACallback"):
        # A handler of a signal may save: a first import there could be interrupted half way.
        importlib.import_module(f"{__name__}.files.checkpoints")
    globals()[name] = value
    return value


_publish_all(globals())
