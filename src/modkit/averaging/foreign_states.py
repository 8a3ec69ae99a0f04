"""Averages in the states of other libraries, and plain averaged weights.

The libraries need not be installed. Supported are torch (``AveragedModel``), timm (``ModelEmaV2``
and ``V3``), diffusers (``EMAModel``), ema-pytorch (``EMA``), torch_ema
(``ExponentialMovingAverage``) and Lightning (``WeightAveraging``).

Example:
    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> average = torch.optim.swa_utils.AveragedModel(model)
    >>> average.update_parameters(model)
    >>> converted = convert(average.state_dict(), model)
    >>> converted.source, converted.n_averaged, sorted(converted.averages)
    ('torch', 1, ['bias', 'weight'])
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from modkit.averaging import schedules as decays
from modkit.averaging.names import canonical_names
from modkit.averaging.schedules import Schedule
from modkit.averaging.state_checks import COPY, CheckedMapping, invalid_state


State: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Converted:
    """Averages of another library, and what its state says about the updates so far.

    Libraries count different things. What the state does not hold is None.

    Attributes:
        source: ``"torch"``, ``"timm"``, ``"diffusers"``, ``"ema_pytorch"``, ``"torch_ema"``,
            ``"lightning"``, or ``"weights"`` for plain weights.
        averages: Averaged parameters, and buffers if the library saves them, by canonical name.
        n_averaged: Number of averaged models, the initial copy included.
        step: Number of calls of the update method, averaged or not.
        schedule: The decay.
        update_after_step: Number of calls before the first averaged model.
    """

    source: str
    averages: dict[str, Tensor]
    n_averaged: int | None = None
    step: int | None = None
    schedule: Schedule | None = None
    update_after_step: int | None = None

    @property
    def has_counter(self) -> bool:
        """True if the state holds how far the averaging has come."""
        return self.n_averaged is not None or self.step is not None


# The keys by which the state of a library is recognised.
_MARKS: Final = {
    "diffusers": {"shadow_params", "optimization_step"},
    "torch_ema": {"shadow_params", "num_updates"},
    "lightning": {"averaging_state", "state_dict"},
}


# The child with error terms that ``AveragedModel`` of earlier versions has, under names with ``/``
# for a dot.
_ERROR_TERMS: Final = "compensation."


def recognise(state: State, model: torch.nn.Module | None = None) -> str | None:
    """Return which library a state is from.

    Args:
        state: The state.
        model: The averaged model, without which plain weights are not recognised.

    Returns:
        The source as in :class:`Converted`, or None if it is unknown.
    """
    # In the order of how specific the marks are: most states have other keys as well.
    keys = state.keys()
    if not all(isinstance(cast("object", key), str) for key in keys):
        return None
    for source, marks in _MARKS.items():
        if marks <= keys:
            return source
    if {"initted", "step"} <= keys and any(key.startswith("ema_model.") for key in keys):
        return "ema_pytorch"

    # ``AveragedModel`` of earlier versions may have error terms beside the members of torch's.
    members = {key for key in keys if key != "n_averaged" and not key.startswith(_ERROR_TERMS)}
    if members and all(key.startswith("module.") for key in members):
        # timm's state is that of its copy of the model, without a counter.
        return "torch" if "n_averaged" in keys else "timm"

    if model is not None and all(isinstance(value, Tensor) for value in state.values()):
        named = canonical_names(name for name, _ in model.named_parameters(remove_duplicate=False))
        if not set(canonical_names(keys).values()).isdisjoint(named.values()):
            return "weights"
    return None


def convert(state: State, model: torch.nn.Module) -> Converted:
    """Read the state of another library, or plain averaged weights. Tensors are not copied.

    Args:
        state: The state.
        model: The averaged model. Lists without names (diffusers, torch_ema) get the names of its
            parameters, in order.

    Returns:
        The averages and what the state says about them.

    Raises:
        ValueError: If the state is unknown or invalid, or a list does not fit the model.
    """  # noqa: DOC501 - invalid_state() makes a ValueError
    source = recognise(state, model)
    checked = CheckedMapping(source or "", state)
    match source:
        case "diffusers":
            # Its ``get_decay`` chooses one of two formulas, in the words of its options.
            names = ["decay", "min_decay", "inv_gamma", "power"]
            step = checked.integer("optimization_step")
            after = checked.integer("update_after_step")
            checked.require(("use_ema_warmup", *names))
            warmup = checked.get("use_ema_warmup", "True or False")
            kind = decays.InverseGamma if warmup else decays.CountWarmup
            schedule = _decay(checked, kind, names if warmup else names[:2])
            averages = _named_in_order(checked, model)
            return Converted(
                source, averages, step=step, schedule=schedule, update_after_step=after
            )

        case "torch_ema":
            # It copies when it is created, which is one call of ``EMA.update()`` more.
            counts = state["num_updates"] is not None
            calls = checked.integer("num_updates") + 1 if counts else None
            schedule = _decay(checked, decays.CountWarmup if counts else decays.Constant, ["decay"])
            averages = _named_in_order(checked, model)
            return Converted(source, averages, step=calls, schedule=schedule, update_after_step=0)

        case "lightning":
            count = checked.inside("averaging_state").integer("n_averaged")
            steps = checked.integer("global_step") if "global_step" in state else None
            return Converted(source, _below("", checked.inside("state_dict")), count, steps)

        case "ema_pytorch":
            # Each call is a step, also those that ``update_after_step`` and ``update_every`` skip.
            calls = checked.integer("step") if checked.get("initted", "True or False") else 0
            return Converted(source, _below("ema_model.", checked), step=calls)

        case "torch" | "timm":
            models = checked.integer("n_averaged") if source == "torch" else None
            terms = _below(_ERROR_TERMS, checked).items()
            errors = {key.replace("/", "."): term for key, term in terms}
            return Converted(source, added(_below("module.", checked), errors, source), models)

        case "weights":
            return Converted(source, _below("", checked))

        case _:
            begins_with = ", ".join(map(repr, list(state)[:5])) or "nothing"
            raise invalid_state(
                "the state is neither from modkit.EMA, nor from a supported library, nor are its "
                f"names those of the model: it begins with {begins_with}"
            )


def added(
    averages: dict[str, Tensor], errors: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Return averages with the error terms that earlier versions kept beside them."""
    sums = dict(averages)
    for name, error in errors.items():
        average = averages.get(name)
        if average is None or average.shape != error.shape:
            raise invalid_state(
                f"the error term {name!r} of {source} does not belong to an average"
            )
        # More bits than both have, so that the sum loses nothing.
        wide = torch.promote_types(average.dtype, torch.float64)
        sums[name] = average.to(wide).add(error)
    return sums


def _decay(checked: CheckedMapping, kind: type[Schedule], names: Iterable[str]) -> Schedule:
    """Return the schedule whose fields are these entries of the state."""
    checked.require(names)
    try:
        return kind(**{name: checked.values[name] for name in names})
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise invalid_state(
            f"the state of {checked.source} is invalid: its decay gives {error}"
        ) from error


def _below(prefix: str, checked: CheckedMapping) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by their names in the model."""
    checked.check_names()
    tensors: dict[str, Tensor] = {}
    for key, value in checked.values.items():
        if key.startswith(prefix) and isinstance(value, Tensor):
            tensors[key.removeprefix(prefix)] = value.detach()

    names = canonical_names(tensors)
    renamed = {names[key]: value for key, value in tensors.items()}
    return CheckedMapping(checked.source, renamed).tensors(COPY)


def _named_in_order(checked: CheckedMapping, model: torch.nn.Module) -> dict[str, Tensor]:
    """Name a list of tensors by the parameters of the model: all, or those that train."""
    entries = checked.listed("shadow_params")
    tensors = [entries.tensor(index).detach() for index in entries.values]

    named = dict(model.named_parameters())
    names = canonical_names(named)
    trained = {name: value for name, value in named.items() if value.requires_grad}
    parameters = named if len(named) == len(tensors) else trained

    if len(parameters) != len(tensors):
        raise invalid_state(
            f"the state of {checked.source} holds {len(tensors)} tensors without names, and the "
            f"model has {len(named)} parameters, {len(trained)} of which train"
        )
    # Shapes are all there is to compare an order by.
    for (name, parameter), tensor in zip(parameters.items(), tensors, strict=True):
        if parameter.shape != tensor.shape:
            raise invalid_state(
                f"the state of {checked.source} has no names, and its order is not that of the "
                f"model: where {names[name]!r} has the shape {tuple(parameter.shape)} it has "
                f"{tuple(tensor.shape)}"
            )
    return {names[name]: tensor for name, tensor in zip(parameters, tensors, strict=True)}
