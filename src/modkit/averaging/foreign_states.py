"""Averages in the states of other libraries, which need not be installed, and plain averaged weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from modkit.averaging import schedules as decays
from modkit.averaging.names import canonical_names
from modkit.averaging.schedules import Schedule
from modkit.averaging.state_checks import KINDS, TENSOR, CheckedMapping, invalid_state


__all__ = ["Converted", "convert", "recognise"]

State: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Converted:
    """Averages of another library, and what its state says about the updates so far.

    Libraries count different things: ``n_averaged`` is the number of averaged models, the initial copy
    included; ``step`` is the number of calls of the update method, averaged or not. Each is None if
    the state does not hold it, and so is ``update_after_step``.
    """

    source: str
    averages: dict[str, Tensor]
    n_averaged: int | None = None
    step: int | None = None
    schedule: Schedule | None = None
    update_after_step: int | None = None

    @property
    def has_counter(self) -> bool:
        """True if the state tells how far the averaging has come."""
        return self.n_averaged is not None or self.step is not None


_MARKS: Final = {
    "diffusers": {"shadow_params", "optimization_step"},
    "torch_ema": {"shadow_params", "num_updates"},
    "lightning": {"averaging_state", "state_dict"},
}


def recognise(state: State, model: torch.nn.Module | None = None) -> str | None:
    """Return the library of a state, ``"weights"`` for plain weights of a model, or None."""
    keys = state.keys()
    if not all(isinstance(cast("object", key), str) for key in keys):
        return None
    for source, marks in _MARKS.items():
        if marks <= keys:
            return source
    if {"initted", "step"} <= keys and any(key.startswith("ema_model.") for key in keys):
        return "ema_pytorch"
    members = keys - {"n_averaged"}
    if members and all(key.startswith("module.") for key in members):
        return "torch" if "n_averaged" in keys else "timm"
    if model is not None and all(isinstance(value, Tensor) for value in state.values()):
        named = canonical_names(name for name, _ in model.named_parameters(remove_duplicate=False))
        if not set(canonical_names(keys).values()).isdisjoint(named.values()):
            return "weights"
    return None


def convert(state: State, model: torch.nn.Module) -> Converted:
    """Read the state of another library, or plain averaged weights. Tensors are not copied.

    Lists without names (diffusers, torch_ema) get the names of the model's parameters, in order. A
    state that is unknown or invalid, or does not fit the model, is a ValueError.
    """
    source = recognise(state, model)
    part = CheckedMapping(source or "", state)
    match source:
        case "diffusers":
            names = ["decay", "min_decay", "inv_gamma", "power"]
            step = part.integer("optimization_step")
            after = part.integer("update_after_step")
            part.require(("use_ema_warmup", *names))
            warmup = part.get("use_ema_warmup", "True or False")
            kind = decays.InverseGamma if warmup else decays.CountWarmup
            schedule = _decay(part, kind, names if warmup else names[:2])
            averages = _named_in_order(part, model)
            return Converted(
                source, averages, step=step, schedule=schedule, update_after_step=after
            )
        case "torch_ema":
            # It copies when it is created, which is one call of ``EMA.update()`` more.
            counts = state["num_updates"] is not None
            calls = part.integer("num_updates") + 1 if counts else None
            schedule = _decay(part, decays.CountWarmup if counts else decays.Constant, ["decay"])
            averages = _named_in_order(part, model)
            return Converted(source, averages, step=calls, schedule=schedule, update_after_step=0)
        case "lightning":
            count = part.inside("averaging_state").integer("n_averaged")
            steps = part.integer("global_step") if "global_step" in state else None
            return Converted(source, _below("", part.inside("state_dict")), count, steps)
        case "ema_pytorch":
            # Each call is a step, also those that ``update_after_step`` and ``update_every`` skip.
            calls = part.integer("step") if part.get("initted", "True or False") else 0
            return Converted(source, _below("ema_model.", part), step=calls)
        case "torch" | "timm":
            found = part.integer("n_averaged") if source == "torch" else None
            return Converted(source, _below("module.", part), found)
        case "weights":
            return Converted(source, _below("", part))
        case _:
            what = "the state is neither from modkit.EMA, nor from a supported library"
            some = ", ".join(map(repr, list(state)[:5])) or "nothing"
            raise invalid_state(
                f"{what}, nor are its names those of the model: it begins with {some}"
            )


def _decay(part: CheckedMapping, kind: type[Schedule], names: Iterable[str]) -> Schedule:
    part.require(names)
    try:
        return kind(**{name: part.values[name] for name in names})
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise invalid_state(
            f"the state of {part.source} is invalid: its decay gives {error}"
        ) from error


def _below(prefix: str, part: CheckedMapping) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by their names in the model."""
    for key in part.values:
        if not isinstance(key, str):
            part.refuse(key, "a tensor under a name of type str")
    tensors = {
        key.removeprefix(prefix): value.detach()
        for key, value in part.values.items()
        if str(key).startswith(prefix) and isinstance(value, Tensor)
    }
    names = canonical_names(tensors)
    return CheckedMapping(
        part.source, {names[key]: value for key, value in tensors.items()}
    ).tensors()


def _named_in_order(part: CheckedMapping, model: torch.nn.Module) -> dict[str, Tensor]:
    """Name a list of tensors by the parameters of the model: all, or those that train."""
    found = part.get("shadow_params", "a list")
    for index, tensor in enumerate(found):
        for kind in TENSOR:
            if not KINDS[kind](tensor):
                wanted = f"a list of tensors, which [{index}] is not: it must be {kind}"
                part.refuse("shadow_params", wanted)
    named = dict(model.named_parameters())
    names = canonical_names(named)
    trained = {name: value for name, value in named.items() if value.requires_grad}
    parameters = named if len(named) == len(found) else trained
    what = f"the state of {part.source}"
    if len(parameters) != len(found):
        counts = f"the model has {len(named)} parameters, {len(trained)} of which train"
        raise invalid_state(f"{what} holds {len(found)} tensors without names, and {counts}")
    for (name, value), tensor in zip(parameters.items(), found, strict=True):
        if value.shape != tensor.shape:
            order = f"{what} has no names, and its order is not that of the model"
            shapes = f"has the shape {tuple(value.shape)} it has {tuple(tensor.shape)}"
            raise invalid_state(f"{order}: where {names[name]!r} {shapes}")
    return {names[n]: tensor.detach() for n, tensor in zip(parameters, found, strict=True)}
