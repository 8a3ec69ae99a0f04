"""modkit: a thin, typed facade over PyTorch."""

from modkit import schedules as schedules
from modkit.nn._adopt import adopt as adopt, release as release
from modkit.nn._fast_attributes import fast_attributes as fast_attributes


__all__ = ["adopt", "fast_attributes", "release", "schedules"]
