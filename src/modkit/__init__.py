"""modkit: a thin, typed facade over PyTorch."""

from modkit import schedules as schedules
from modkit.averaging.callback import EMACallback as EMACallback
from modkit.averaging.checkpoints import average_checkpoints as average_checkpoints
from modkit.averaging.ema import EMA as EMA
from modkit.averaging.posthoc import PostHocEMA as PostHocEMA
from modkit.averaging.ranges import average_range as average_range
from modkit.checkpoints import (
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
)
from modkit.nn._adopt import adopt as adopt, release as release
from modkit.nn._fast_attributes import fast_attributes as fast_attributes


__all__ = [
    "EMA",
    "EMACallback",
    "PostHocEMA",
    "adopt",
    "average_checkpoints",
    "average_range",
    "fast_attributes",
    "load_checkpoint",
    "release",
    "save_checkpoint",
    "schedules",
]
