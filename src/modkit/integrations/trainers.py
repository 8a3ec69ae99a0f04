"""What the callbacks for trainers share, which get their model later than their options."""

from typing import Any, Final

import torch

from modkit.averaging.callback import BlocksOfEvaluation, EMAOptions, Evaluation, average_of
from modkit.averaging.ema import EMA
from modkit.averaging.options import Options, check_index, checked_count
from modkit.averaging.schedules import Decays, schedules_of
from modkit.averaging.swap import any_swapped


MSG_NO_AVERAGES: Final = (
    "EMACallback: the checkpoint holds no averages, so averaging starts anew from its weights"
)


def check_options(decay: Decays, index: int, options: EMAOptions) -> None:
    """Check options before there is a model, with whose names globs are compared later."""
    rest: dict[str, Any] = {**options}
    schedules = schedules_of(decay, rest.pop("schedule", None))
    checked_count("update_after_step", rest.pop("update_after_step", 0), 0)
    checked_count("update_every", rest.pop("update_every", 1), 1)
    device = rest.pop("device", None)
    Options(**rest, device=None if device is None else torch.device(device))
    check_index(index, len(schedules))


class OfTrainer(BlocksOfEvaluation[Any]):
    """Base of the callbacks for trainers."""

    ema: EMA[Any] | None

    def __init__(
        self,
        decay: Decays,
        options: EMAOptions,
        *,
        index: int,
        swap_to_average_at_end: bool,
    ) -> None:
        check_options(decay, index, options)
        self.ema = None
        self.index = index
        self.swap_to_average_at_end = swap_to_average_at_end
        self._decay = decay
        self._options = options
        self._evaluation = Evaluation()

    def _averages_for(self, model: torch.nn.Module) -> EMA[Any]:
        return average_of(model, self._decay, self._options)

    def _check_outside(self, model: torch.nn.Module, call: str) -> None:
        """Check that training does not start where the model may hold the average."""
        if self._evaluation.in_block or any_swapped(model):
            raise RuntimeError(
                f"EMACallback: {call} was called inside evaluating() or applied(), where the model "
                f"may hold the averaged weights. Call {call} outside of the block."
            )
