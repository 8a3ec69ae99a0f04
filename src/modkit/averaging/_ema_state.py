"""What a checkpoint holds of an ``EMA``: reading it, and refusing what does not fit."""

import warnings
from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modkit.averaging import converters
from modkit.averaging._members import Members, check_match
from modkit.averaging._selection import Selection
from modkit.averaging.schedules import Schedule, from_config


VERSION = 1


@dataclass
class LoadedState:
    """The state of an ``EMA`` that has been checked: nothing about it is wrong."""

    step: int
    start: int | None
    n_averaged: int
    update_every: int
    update_after_step: int
    schedules: list[Schedule]
    averages: list[Mapping[str, Any]]
    buffers: Mapping[str, Tensor]
    raw: Mapping[str, Tensor]
    foreign: bool = False


def read(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    *,
    schedules: list[Schedule],
    update_every: int,
    update_after_step: int,
) -> LoadedState:
    """Read the state of an ``EMA``, or of what another library averages with.

    Raises:
        ValueError: It is neither, it is of a later version, or it holds another number of averages.
    """
    if converters.recognise(state) is not None:
        return _read_foreign(state, model, schedules, update_every, update_after_step)
    missing = {"version", "step", "averages", "schedules"} - state.keys()
    if missing:
        some = ", ".join(map(repr, list(state)[:5]))
        raise ValueError(f"EMA: this is no state of averages that is known: it begins with {some}")
    if state["version"] > VERSION:
        raise ValueError(f"EMA: the state has version {state['version']}, newer than {VERSION}")
    if len(state["schedules"]) != len(schedules):
        raise ValueError(
            f"EMA: the state holds {len(state['schedules'])} averages, and this object "
            f"{len(schedules)}"
        )
    return LoadedState(
        step=state["step"],
        start=state["start"],
        n_averaged=state["n_averaged"],
        update_every=_loaded("update_every", state["update_every"], update_every),
        update_after_step=_loaded(
            "update_after_step", state["update_after_step"], update_after_step
        ),
        schedules=[
            _loaded_schedule(config, own)
            for config, own in zip(state["schedules"], schedules, strict=True)
        ],
        averages=state["averages"],
        buffers=state["buffers"],
        raw=state.get("raw", {}),
    )


def with_empty_parts(state: dict[str, Any]) -> dict[str, Any]:
    """Put the empty dicts back into a state, which checkpoints that are flat leave out."""
    if not {"version", "step", "schedules"} <= state.keys():
        return state
    given = state.get("averages", [])
    count = len(state["schedules"])
    averages = given if len(given) == count else [{} for _ in range(count)]
    empty: dict[str, Any] = {"tensors": {}, "rests": {}, "generators": {}}
    whole = [{**empty, **average} for average in averages]
    for average in whole:
        if "plain" in average:
            average["plain"] = {**empty, **average["plain"]}
    return {"buffers": {}, **state, "averages": whole}


def _read_foreign(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    schedules: list[Schedule],
    update_every: int,
    update_after_step: int,
) -> LoadedState:
    found = converters.convert(state, model, update_after_step=update_after_step)
    count = 1 if found.n_averaged is None else found.n_averaged
    start = update_after_step + 1 if count else None
    average = {"tensors": found.averages, "rests": {}, "generators": {}}
    return LoadedState(
        step=update_after_step + 1 + (count - 1) * update_every if count else 0,
        start=start,
        n_averaged=count,
        update_every=update_every,
        update_after_step=update_after_step,
        schedules=[found.schedule or own for own in schedules],
        averages=[average] * len(schedules),
        buffers=found.averages,
        raw={},
        foreign=True,
    )


def _loaded(name: str, saved: int, own: int) -> int:
    if saved != own:
        warnings.warn(
            f"EMA: {name} is {saved} from here on, as in the loaded state, and not {own}",
            stacklevel=5,
        )
    return saved


def _loaded_schedule(config: Mapping[str, Any], own: Schedule) -> Schedule:
    if config == own.to_config():
        return own
    saved = from_config(config)
    if saved != own:
        warnings.warn(
            f"EMA: the schedule is {saved} from here on, as in the loaded state, and not {own}",
            stacklevel=5,
        )
    return saved


def matched(
    loaded: LoadedState, members: Members, selection: Selection
) -> tuple[dict[str, Tensor], set[str], list[dict[str, Tensor]]]:
    """Find what belongs to which tensor of the model; a lazy model takes all as it is.

    Returns:
        The tensors that are averaged, the names of the buffers that are copied, and the loaded
        tensors of each average.

    Raises:
        NameMismatchError: Names or shapes differ.
    """
    averaged: dict[str, Tensor] = dict(loaded.averages[0]["tensors"])
    copied = set(loaded.buffers)
    if not members.has_lazy():
        averaged, others = selection.split(members)
        copied = {member.name for member in others}
    rest = members.names() - averaged.keys()
    found = [
        _tensors_for(average, averaged, rest, foreign=loaded.foreign) for average in loaded.averages
    ]
    return averaged, copied, found


def _tensors_for(
    average: Mapping[str, Any],
    bound: Mapping[str, Tensor],
    others: AbstractSet[str],
    *,
    foreign: bool,
) -> dict[str, Tensor]:
    """Return the loaded tensors of one average, once they are known to be those of the model.

    Args:
        average: The state of the average.
        bound: The tensors of the model that are averaged.
        others: The other names of the model: further names of tied tensors, buffers that are not
            averaged, parameters that are excluded. Other libraries save those as well.
        foreign: Whether the state is that of another library.

    Raises:
        NameMismatchError: Names or shapes differ.
    """
    found = dict(average["tensors"])
    if foreign:
        found = {name: t for name, t in found.items() if name in bound or name not in others}
    check_match(
        "EMA: the state does not fit the model",
        {name: tensor.shape for name, tensor in bound.items()},
        {name: tensor.shape for name, tensor in found.items()},
    )
    return found
