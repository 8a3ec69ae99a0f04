"""The options of an average: their kinds, and what is refused."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from modkit.averaging.schedules import Schedule, as_schedule


Decay: TypeAlias = float | Callable[[int], float]

DEFAULT_DECAY = 0.999


def checked_count(name: str, value: int, least: int) -> int:
    """Return a number of steps; raise where it is none."""
    if isinstance(cast("object", value), bool) or not isinstance(cast("object", value), int):
        raise TypeError(f"EMA: {name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"EMA: {name} must be {least} or more, got {value}")
    return value


def checked_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise if the value is not one of the choices."""
    if value not in choices:
        raise ValueError(f"EMA: {name} must be one of {', '.join(choices)}, got {value!r}")


def schedules_of(
    decay: float | Sequence[Decay], schedule: Decay | Sequence[Decay] | None
) -> list[Schedule]:
    """Return one schedule for each average that is asked for."""
    if schedule is not None and decay != DEFAULT_DECAY:
        raise ValueError(f"EMA: give decay or schedule, not both: got {decay!r} and {schedule!r}")
    chosen = decay if schedule is None else schedule
    several: Sequence[Decay] = chosen if isinstance(chosen, Sequence) else (chosen,)
    if not several:
        raise ValueError("EMA: decay must not be an empty list")
    return [as_schedule(one) for one in several]
