"""Averages in the states of other libraries, and plain averaged weights.

The libraries need not be installed. Supported are torch (``AveragedModel``), timm (``ModelEmaV2``
and ``V3``), diffusers (``EMAModel``), ema-pytorch (``EMA``), torch_ema
(``ExponentialMovingAverage``), Lightning (``WeightAveraging``), CompVis (``LitEma``) and
checkpoints of mmengine (``EMAHook``).

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
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from modkit.averaging import schedules as decays
from modkit.averaging.schedules import Schedule
from modkit.averaging.state_checks import CheckedMapping, constructing, invalid_state
from modkit.averaging.tensors import canonical_names


State: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Converted:
    """Averages of another library, and what its state says about the updates so far.

    Libraries count different things. What the state does not hold is None.

    Attributes:
        source: The library, as :func:`recognise` returns it.
        averages: Averaged parameters, and buffers if the library saves them, by canonical name.
        n_averaged: Number of averaged models, the initial copy included.
        step: Number of calls of the update method, averaged or not.
        schedule: The decay.
        update_after_step: Number of calls before the first averaged model.
        rests: What rounding has lost of averages, by name, in states of earlier versions.
    """

    source: str
    averages: dict[str, Tensor]
    n_averaged: int | None = None
    step: int | None = None
    schedule: Schedule | None = None
    update_after_step: int | None = None
    rests: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def has_counter(self) -> bool:
        """True if the state holds how far the averaging has come."""
        return self.n_averaged is not None or self.step is not None


# The keys by which a state is recognised, the more specific ones first: most have other keys too.
_MARKS: Final = {
    "diffusers": {"shadow_params", "optimization_step"},
    "torch_ema": {"shadow_params", "num_updates"},
    "lightning": {"averaging_state", "state_dict"},
    "mmengine": {"ema_state_dict", "state_dict"},
    "LitEma": {"decay", "num_updates"},
}
# The counter beside the names of a copy of the model, by library; timm has none.
_COUNTERS: Final = {"torch": "n_averaged", "mmengine": "steps"}
# The child with error terms that ``AveragedModel`` of earlier versions has, under names with ``/``
# for a dot.
_ERROR_TERMS: Final = "compensation."
_SWAPPED: Final = (
    "this is 'ema_state_dict' of a checkpoint of mmengine, which holds the training weights: its "
    "hook swaps the two before it saves. Load the whole checkpoint, whose 'state_dict' is the "
    "average"
)


def recognise(state: State, model: torch.nn.Module | None = None) -> str | None:
    """Return which library a state is from, as in :class:`Converted`; None if it is unknown.

    Without the averaged model, plain ``"weights"`` are not recognised.
    """
    keys = state.keys()
    if not all(isinstance(cast("object", key), str) for key in keys):
        return None
    for source, marks in _MARKS.items():
        if marks <= keys:
            return source
    if {"initted", "step"} <= keys and any(key.startswith("ema_model.") for key in keys):
        return "ema_pytorch"

    # ``AveragedModel`` of earlier versions may have error terms beside the members of torch's.
    counted = [source for source, counter in _COUNTERS.items() if counter in keys]
    members = keys - _COUNTERS.values()
    members = {key for key in members if not key.startswith(_ERROR_TERMS)}
    if members and all(key.startswith("module.") for key in members):
        return counted[0] if counted else "timm"

    if model is not None and all(isinstance(value, Tensor) for value in state.values()):
        named = canonical_names(name for name, _ in model.named_parameters(remove_duplicate=False))
        if not set(canonical_names(keys).values()).isdisjoint(named.values()):
            return "weights"
    return None


def convert(state: State, model: torch.nn.Module) -> Converted:
    """Read the state of another library, or plain averaged weights. Tensors are not copied.

    Names that a state lacks are those of ``model``. An unknown or invalid state is a ValueError.
    """
    source = recognise(state, model) or ""
    checked = CheckedMapping(source, state)
    match source:
        case "diffusers":
            # Its ``get_decay`` chooses one of two formulas, in the words of its options.
            names = ["decay", "min_decay", "inv_gamma", "power"]
            warmup = checked.flag("use_ema_warmup")
            kind = decays.InverseGamma if warmup else decays.CountWarmup
            return Converted(
                source,
                _named_in_order(checked, model),
                step=checked.integer("optimization_step"),
                schedule=_decay(checked, kind, names if warmup else names[:2]),
                update_after_step=checked.integer("update_after_step"),
            )

        case "torch_ema" | "LitEma":
            # They copy when they are created, which is one call of ``EMA.update()`` more. Without
            # a count the decay is constant: torch_ema has None for it, and LitEma -1.
            has_count = checked.get("num_updates") is not None
            updates = checked.integer("num_updates", -1) if has_count else -1
            counts = updates >= 0
            return Converted(
                source,
                _named_in_order(checked, model),
                step=updates + 1 if counts else None,
                schedule=_decay(checked, decays.CountWarmup if counts else decays.Constant),
                update_after_step=0,
            )

        case "lightning":
            count = checked.inside("averaging_state").integer("n_averaged")
            steps = checked.integer("global_step") if "global_step" in state else None
            return Converted(source, _below("", checked.inside("state_dict")), count, steps)

        case "mmengine":
            return _of_mmengine(checked)

        case "ema_pytorch":
            # Each call is a step, also those that ``update_after_step`` and ``update_every`` skip.
            calls = checked.integer("step") if checked.flag("initted") else 0
            return Converted(source, _below("ema_model.", checked), step=calls)

        case "torch" | "timm":
            models = checked.integer("n_averaged") if source == "torch" else None
            terms = _below(_ERROR_TERMS, checked).items()
            rests = {key.replace("/", "."): term for key, term in terms}
            return Converted(source, _below("module.", checked), models, rests=rests)

        case "weights":
            return Converted(source, _below("", checked))

        case _:
            raise invalid_state(_unknown(state, model))


def _of_mmengine(checked: CheckedMapping) -> Converted:
    if "state_dict" not in checked.values:
        raise invalid_state(_SWAPPED)
    steps = checked.inside("ema_state_dict").integer("steps")
    return Converted("mmengine", _below("", checked.inside("state_dict")), step=steps)


def _unknown(state: State, model: torch.nn.Module) -> str:
    """Return what is wrong with an unknown state; wrappers hold the averages below a key."""
    begins_with = ", ".join(map(repr, list(state)[:5])) or "nothing"
    text = (
        "the state is neither from modkit.EMA, nor from a supported library, nor are its names "
        f"those of the model: it begins with {begins_with}"
    )
    for key, inner in state.items():
        if isinstance(inner, Mapping) and ("averages" in inner or recognise(inner, model)):
            return (
                f"{text}. The averages may be below a key: load state[{key!r}], with the number "
                "of calls of update() as step= if it has no counter"
            )
    return text


def _decay(
    checked: CheckedMapping, kind: type[Schedule], names: Iterable[str] = ("decay",)
) -> Schedule:
    """Return the schedule whose fields are these entries of the state."""
    values = {name: checked.get(name) for name in names}
    with constructing(f"the decay of {checked.source}"):
        return kind(**values)


def _below(prefix: str, checked: CheckedMapping) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by their names in the model."""
    tensors: dict[str, Tensor] = {}
    for key, value in checked.values.items():
        if not isinstance(key, str):
            checked.refuse(key, "a tensor under a name of type str")
        if key.startswith(prefix) and isinstance(value, Tensor):
            tensors[key.removeprefix(prefix)] = value.detach()

    names = canonical_names(tensors)
    renamed = {names[key]: value for key, value in tensors.items()}
    return CheckedMapping(checked.source, renamed).tensors()


def _named_in_order(checked: CheckedMapping, model: torch.nn.Module) -> dict[str, Tensor]:
    """Name tensors by the parameters of the model: all, or those that train.

    Lists have no names, and LitEma removes the dots from them.
    """
    named = dict(model.named_parameters())
    names = canonical_names(named)
    trained = {name: value for name, value in named.items() if value.requires_grad}
    if checked.source == "LitEma":
        plain_names = {names[name].replace(".", ""): names[name] for name in named}
        tensors = {key: value for key, value in checked.values.items() if key in plain_names}
        averages = CheckedMapping(checked.source, tensors).tensors()
        if len(plain_names) < len(named):
            raise invalid_state("without dots, as in LitEma, two names of the model are equal")
        return {plain_names[key]: tensor.detach() for key, tensor in averages.items()}

    tensors = checked.listed("shadow_params").tensors(int)
    parameters = named if len(named) == len(tensors) else trained
    if len(parameters) != len(tensors):
        raise invalid_state(
            f"the state of {checked.source} holds {len(tensors)} tensors without names, and the "
            f"model has {len(named)} parameters, {len(trained)} of which train"
        )
    # Shapes are all there is to compare an order by.
    for (name, parameter), tensor in zip(parameters.items(), tensors.values(), strict=True):
        if parameter.shape != tensor.shape:
            raise invalid_state(
                f"the state of {checked.source} has no names, and its order is not that of the "
                f"model: where {names[name]!r} has the shape {tuple(parameter.shape)} it has "
                f"{tuple(tensor.shape)}"
            )
    return {
        names[n]: tensor.detach() for n, tensor in zip(parameters, tensors.values(), strict=True)
    }
