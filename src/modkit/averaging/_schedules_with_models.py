"""The schedules of averages that need more than themselves: copies of models that were seen."""

from dataclasses import dataclass

from typing_extensions import override

from modkit.averaging._schedule import Schedule


@dataclass(frozen=True)
class Window(Schedule):
    """The plain mean of the latest models that ``EMA`` has seen: LAWA, https://arxiv.org/abs/2209.14981.

    Args:
        window: How many models, 1 or more; a copy of the weights is kept of each. The decay that
            this schedule tells is what the others weigh beside the latest of them.

    Example:
        >>> [Window(3).over(n, 1) for n in (0, 1, 100)]
        [0.0, 0.5, 0.6666666666666667]
    """

    window: int

    @override
    def decay_at(self, n: int) -> float:
        return self.decay_over(n, 1)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return 1 - 1 / min(n // k + 1, self.window)


@dataclass(frozen=True)
class BEMA(Schedule):
    """An average without its lag: BEMA, https://arxiv.org/abs/2508.00180.

    A part of the way that the weights have come since the first update is added to their average:
    ``average + (lag + multiplier * n) ** -bias_power * (model - first)``. In an update at step ``n``,
    the average moves by ``(lag + multiplier * n) ** -ema_power`` of the way to the model, however many
    steps it stands for: the paper has one update in 400 steps. For its results, call
    ``EMA.update()`` once before training, so that the first weights are the initial ones.
    ``update_after_step=a`` beside it is ``update_after=a`` of trl if the lag is
    ``lag + multiplier * a``, since trl goes on counting from the beginning of training.

    Args:
        ema_power: How fast the average slows down; 0 keeps the latest model.
        bias_power: How fast the correction fades; 0 never.
        lag: An age that the average has from the beginning.
        multiplier: How much older each step makes it.
        min_ema_multiplier: The least part of the way that an update moves by.

    Example:
        >>> [round(BEMA().over(n, 400), 3) for n in (400, 4000)]
        [0.951, 0.984]
    """

    ema_power: float = 0.5
    bias_power: float = 0.2
    lag: float = 10.0
    multiplier: float = 1.0
    min_ema_multiplier: float = 0.0

    @override
    def decay_at(self, n: int) -> float:
        part = float((self.lag + self.multiplier * n) ** -self.ema_power)
        return 1 - min(max(part, self.min_ema_multiplier), 1.0)

    @override
    def decay_over(self, n: int, k: int) -> float:
        return self.decay_at(n)

    def correction(self, n: int) -> float:
        """Return which part of the way since the first update is added at step ``n``; 0 at the first."""
        return float((self.lag + self.multiplier * n) ** -self.bias_power) if n > 0 else 0.0
