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
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from modkit._messages import warn_user
from modkit.averaging import schedules as decays
from modkit.averaging.schedules import Schedule
from modkit.averaging.state import LoadedState, Part, constructing, invalid_state, stored_average
from modkit.averaging.tensors import canonical_names, canonical_paths


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
    """

    source: str
    averages: dict[str, Tensor]
    n_averaged: int | None = None
    step: int | None = None
    schedule: Schedule | None = None
    update_after_step: int | None = None


# The keys by which a state is recognised; it has others, too.
_MARKS: Final = {
    "diffusers": {"shadow_params", "optimization_step"},
    "torch_ema": {"shadow_params", "num_updates"},
    "lightning": {"averaging_state", "state_dict"},
    "ema_pytorch": {"initted", "step"},
}


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
    # Those of torch and timm are the state of a wrapper of the model.
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

    Names that a state lacks are those of ``model``. An unknown or invalid state is a ValueError.
    """
    source = recognise(state, model) or ""
    part = Part(source, state)
    match source:
        case "diffusers":
            # Its ``get_decay`` chooses one of two formulas, in the words of its options.
            names = ["decay", "min_decay", "inv_gamma", "power"]
            warmup = part["use_ema_warmup"].made(bool)
            kind = decays.InverseGamma if warmup else decays.CountWarmup
            return Converted(
                source,
                _in_order(part, model),
                step=part["optimization_step"].count(),
                schedule=_decay(part, kind, names if warmup else names[:2]),
                update_after_step=part["update_after_step"].count(),
            )

        case "torch_ema":
            # It copies when it is created, which is one call of ``EMA.update()`` more. Without a
            # count the decay is constant.
            updates = part["num_updates"]
            counts = updates.value is not None
            return Converted(
                source,
                _in_order(part, model),
                step=updates.count() + 1 if counts else None,
                schedule=_decay(part, decays.CountWarmup if counts else decays.Constant),
                update_after_step=0,
            )

        case "lightning":
            steps = part["global_step"].count() if "global_step" in state else None
            count = part["averaging_state"]["n_averaged"].count()
            return Converted(source, _below("", part["state_dict"]), count, steps)

        case "ema_pytorch":
            # Each call is a step, also those that ``update_after_step`` and ``update_every`` skip.
            calls = part["step"].count() if part["initted"].made(bool) else 0
            return Converted(source, _below("ema_model.", part), step=calls)

        case "torch" | "timm":
            models = part["n_averaged"].count() if source == "torch" else None
            return Converted(source, _below("module.", part), models)

        case "weights":
            return Converted(source, _below("", part))

        case _:
            raise invalid_state(_unknown(state, model))


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


def _decay(part: Part, kind: type[Schedule], names: Iterable[str] = ("decay",)) -> Schedule:
    """Return the schedule whose fields are these entries of the state."""
    values = {name: part[name].plain() for name in names}
    with constructing(f"the decay of {part.source}"):
        return kind(**values)


def _below(prefix: str, part: Part) -> dict[str, Tensor]:
    """Return the tensors whose names begin with the prefix, by their names in the model."""
    tensors = {
        str(key).removeprefix(prefix): value.detach()
        for key, value in part.made(dict).items()
        if isinstance(value, Tensor) and str(key).startswith(prefix)
    }
    names = canonical_names(tensors)
    return replace(part, value={names[key]: tensors[key] for key in tensors}).tensors()


def _in_order(part: Part, model: torch.nn.Module) -> dict[str, Tensor]:
    """Name the tensors of a list by the parameters of the model: all, or those that train."""
    tensors = [entry.tensor().detach() for entry in part["shadow_params"].each()]
    named = dict(model.named_parameters())
    trained = {name: value for name, value in named.items() if value.requires_grad}
    parameters = named if len(named) == len(tensors) else trained
    if len(parameters) != len(tensors):
        raise invalid_state(
            f"the state of {part.source} holds {len(tensors)} tensors without names, and the "
            f"model has {len(named)} parameters, {len(trained)} of which train"
        )

    names = canonical_names(named)
    return {names[name]: tensor for name, tensor in zip(parameters, tensors, strict=True)}


def read(
    state: State, model: torch.nn.Module, current: LoadedState, step: int | None = None
) -> LoadedState:
    """Return the state of an ``EMA`` that continues averages of another library, or plain weights.

    ``step`` is the number of calls of ``update()`` so far, if the user has given it.
    """
    converted = convert(state, model)
    every = current.update_every
    after = converted.update_after_step
    if after is None:
        after = current.update_after_step
    first = after + 1

    def count_at(calls: int) -> int:
        # One model of call ``first``, and one every ``every`` calls from there on.
        return max(0, 1 + (calls - first) // every)

    # The number of the user counts first, then the library's counter of calls, unless its count of
    # models says something else; then its count of models alone.
    if step is not None:
        calls = step
    elif converted.step is not None and converted.n_averaged in (None, count_at(converted.step)):
        calls = converted.step
    else:
        # Lightning saves both numbers, and its steps are not calls where a ``should_update()`` of
        # the user skips some.
        models = 1 if converted.n_averaged is None else converted.n_averaged
        calls = first + (models - 1) * every if models else 0

    count = count_at(calls)
    loaded = LoadedState(
        step=calls,
        # Until the first update there is no average: what the library holds is a copy of the
        # weights.
        start=first if count else None,
        n_averaged=count,
        update_every=every,
        update_after_step=after,
        schedules=[converted.schedule or schedule for schedule in current.schedules],
        averages=[stored_average(converted.averages)] * len(current.schedules),
        buffers=converted.averages,
        foreign=True,
        versions=Part(converted.source, state, "_metadata").made(_versions_in),
    )
    if step is None and converted.step is None and converted.n_averaged is None:
        _warn_of_no_counter(converted.source, loaded, current.n_averaged)
    return loaded


def _versions_in(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the versions of modules, if it is the dict that ``state_dict()`` of torch returned."""
    metadata = getattr(state.get("state_dict", state), "_metadata", None)
    paths = canonical_paths(metadata or ())
    return metadata and {paths[at]: e["version"] for at, e in metadata.items() if "version" in e}


def _warn_of_no_counter(source: str, loaded: LoadedState, n_averaged: int) -> None:
    """Warn if a state without a counter ends an average, or the number of updates matters."""
    after = loaded.update_after_step
    is_constant = not after and all(map(decays.is_constant, loaded.schedules))
    if is_constant and not n_averaged:
        return

    replaced = f" It replaces an average of {n_averaged} models." if n_averaged else ""
    warn_user(
        f"EMA: the state ({source}) holds no counter, so it is taken for that of the first update "
        f"(step={after + 1}), from which the schedule continues.{replaced} After more updates pass "
        "the number of calls of update(), as in load_state_dict(state, step=1000)."
    )
