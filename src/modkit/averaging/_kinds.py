"""Which kind of average a schedule needs."""

import torch

from modkit.averaging._average import Average
from modkit.averaging._bias_correction import CorrectedAverage
from modkit.averaging._nonfinite import OnNonfinite
from modkit.averaging._precision import Precision
from modkit.averaging._window import WindowAverage
from modkit.averaging.schedules import BEMA, Schedule, Window


def average_for(
    schedule: Schedule,
    precision: Precision,
    device: torch.device | None,
    seed: int,
    on_nonfinite: OnNonfinite,
) -> Average:
    """Return what keeps the average of a schedule."""
    if isinstance(schedule, BEMA):
        return CorrectedAverage(schedule, precision, device, seed)
    if isinstance(schedule, Window):
        if on_nonfinite == "skip":
            # Which copies to count would have to be known, and that means to wait for the device.
            raise ValueError(f"EMA: on_nonfinite='skip' is not for {schedule}; 'raise' is")
        return WindowAverage(schedule.window, precision, device, seed)
    return Average(precision, device, seed)
