"""Averages that other libraries have saved, under the names and in the counts of modkit.

Known are the states of ``torch.optim.swa_utils.AveragedModel``, of timm's ``ModelEmaV3`` (and V2), of
``EMAModel`` in diffusers, ``EMA`` in ema-pytorch, ``ExponentialMovingAverage`` in torch_ema, and the
checkpoints of Lightning's ``WeightAveraging``. None of these libraries is needed to read them.

Example:
    >>> model = torch.nn.Linear(2, 1)
    >>> average = torch.optim.swa_utils.AveragedModel(model)
    >>> average.update_parameters(model)
    >>> converted = convert(average.state_dict(), model)
    >>> converted.source, converted.n_averaged, sorted(converted.averages)
    ('torch', 1, ['bias', 'weight'])
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modkit.averaging.named_tensors import canonical_names
from modkit.averaging.schedules import Constant, CountWarmup, InverseGamma, Schedule


__all__ = ["Converted", "convert", "recognise"]

State: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Converted:
    """What the state of another library says.

    Args:
        source: Whose state it is: ``"torch"``, ``"timm"``, ``"diffusers"``, ``"ema_pytorch"``,
            ``"torch_ema"`` or ``"lightning"``.
        averages: Averaged parameters, and buffers where the library keeps them, by their name in the
            model.
        n_averaged: How many models are in the average, the first copy included, which is how torch
            counts; the next decay is that of step ``n = n_averaged`` of a schedule. ``None`` where the
            state does not tell (timm).
        schedule: The decay, where the state tells it (diffusers, torch_ema).
    """

    source: str
    averages: dict[str, Tensor]
    n_averaged: int | None
    schedule: Schedule | None = None


def recognise(state: State) -> str | None:
    """Return which library has saved this state, or None for one that is not known.

    Example:
        >>> recognise({"n_averaged": torch.tensor(3), "module.weight": torch.zeros(1)})
        'torch'
        >>> recognise({"weight": torch.zeros(1)}) is None
        True
    """
    keys = state.keys()
    if {"shadow_params", "optimization_step"} <= keys:
        return "diffusers"
    if {"shadow_params", "num_updates"} <= keys:
        return "torch_ema"
    if {"averaging_state", "state_dict"} <= keys:
        return "lightning"
    if {"initted", "step"} <= keys and any(key.startswith("ema_model.") for key in keys):
        return "ema_pytorch"
    members = [key for key in keys if key != "n_averaged"]
    if members and all(key.startswith("module.") for key in members):
        return "torch" if "n_averaged" in keys else "timm"
    return None


def convert(state: State, model: torch.nn.Module, *, update_after_step: int = 0) -> Converted:
    """Read the state of another library.

    Args:
        state: What its ``state_dict()`` returned, or the checkpoint in the case of Lightning.
        model: The model that was averaged, or one like it. States that hold a list without names
            (diffusers, torch_ema) get the names of its parameters, in order.
        update_after_step: What ema-pytorch was told under this name, which its state does not say.

    Returns:
        The averages by name, and what the state tells about counts and decays. The tensors are those of
        the state, not copies.

    Raises:
        ValueError: No library that is known saves states like this one, or a list does not fit the
            parameters of the model.
    """
    source = recognise(state)
    if source is None:
        some = ", ".join(map(repr, list(state)[:5]))
        raise ValueError(f"no averages of a library that is known: the state begins with {some}")
    return _READERS[source](state, model, update_after_step)


def from_averaged_model(state: State, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read torch's counter, and the members below ``module.``."""
    averages = members_below("module.", state)
    return Converted("torch", averages, int(state["n_averaged"]))


def from_lightning(state: State, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read a checkpoint in which the average stands in the place of the model."""
    averages = members_below("", state["state_dict"])
    return Converted("lightning", averages, int(state["averaging_state"]["n_averaged"]))


def from_timm(state: State, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read the members below ``module.``; there is nothing else."""
    return Converted("timm", members_below("module.", state), None)


def from_ema_pytorch(state: State, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read the members below ``ema_model.`` and the number of calls, the first of which copies."""
    counted = max(int(state["step"]) - update_after_step, 1)
    averages = members_below("ema_model.", state)
    return Converted("ema_pytorch", averages, counted if bool(state["initted"]) else 0)


def from_diffusers(state: State, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read a list of parameters; its first step copies, and each up to ``update_after_step`` too."""
    steps = int(state["optimization_step"])
    counted = max(steps - int(state["update_after_step"]), min(steps, 1))
    limits = {"min_decay": state["min_decay"], "decay": state["decay"]}
    schedule: Schedule
    if state["use_ema_warmup"]:
        schedule = InverseGamma(state["inv_gamma"], state["power"], **limits)
    else:
        schedule = CountWarmup(**limits)
    averages = named_in_order(state["shadow_params"], model, "diffusers")
    return Converted("diffusers", averages, counted, schedule)


def from_torch_ema(state: State, model: torch.nn.Module, update_after_step: int) -> Converted:
    """Read a list of parameters that was copied when it was made, before the first step."""
    averages = named_in_order(state["shadow_params"], model, "torch_ema")
    if state["num_updates"] is None:
        return Converted("torch_ema", averages, None, Constant(state["decay"]))
    counted = int(state["num_updates"]) + 1
    return Converted("torch_ema", averages, counted, CountWarmup(state["decay"]))


_READERS: dict[str, Callable[[State, torch.nn.Module, int], Converted]] = {
    "diffusers": from_diffusers,
    "ema_pytorch": from_ema_pytorch,
    "lightning": from_lightning,
    "timm": from_timm,
    "torch": from_averaged_model,
    "torch_ema": from_torch_ema,
}


def members_below(prefix: str, state: State) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by what the model itself calls them."""
    found = {
        key.removeprefix(prefix): value
        for key, value in state.items()
        if key.startswith(prefix) and isinstance(value, Tensor)
    }
    names = canonical_names(found)
    return {names[key]: value for key, value in found.items()}


def named_in_order(
    tensors: Iterable[Tensor], model: torch.nn.Module, source: str
) -> dict[str, Tensor]:
    """Give a list of tensors the names of the model's parameters, all of them or those that train."""
    found = list(tensors)
    named = dict(model.named_parameters())
    names = canonical_names(named)
    parameters = [(names[name], value) for name, value in named.items()]
    if len(parameters) != len(found):
        parameters = [(name, value) for name, value in parameters if value.requires_grad]
    if len(parameters) != len(found):
        raise ValueError(
            f"the state of {source} holds {len(found)} tensors without names, and the model has "
            f"{len(named)} parameters, {len(parameters)} of which train"
        )
    for (name, value), tensor in zip(parameters, found, strict=True):
        if value.shape != tensor.shape:
            raise ValueError(
                f"the state of {source} has no names, and its order is not that of the model: where "
                f"{name!r} has the shape {tuple(value.shape)} it has {tuple(tensor.shape)}"
            )
    return {name: tensor.detach() for (name, _), tensor in zip(parameters, found, strict=True)}
