"""The mean over a part of training, from the means at its two ends."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modkit.averaging._members import check_match
from modkit.averaging._precision import NARROW, is_averaged
from modkit.averaging.schedules import Equal


__all__ = ["average_range"]


@torch.no_grad()
def average_range(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the mean of the models between two checkpoints of one run, without those models.

    An equal average of ``b`` models is what an equal average of the first ``a`` of them lacks, and
    that: ``(b * later - a * earlier) / (b - a)``. So an ``EMA`` with
    :class:`~modkit.schedules.Equal`, saved now and then, gives the mean of any range afterwards.

    Source: icefall, which averages so at the end of its recipes
    (https://github.com/k2-fsa/icefall, ``average_checkpoints_with_averaged_model``).

    Args:
        earlier: ``EMA.state_dict()`` at the beginning of the range, of an ``EMA`` that has an equal
            average; its models are left out.
        later: The same at the end.

    Returns:
        The means by name, computed in float64, in the dtype of the later average, or in float32 where
        that was compensated in 16 bits; buffers are those of the end. ``load_state_dict`` of the
        model takes them. Their error is that of the averages times ``b / (b - a)``: for a short range
        late in a long run, average with ``precision="compensated"`` or ``"fp64"``.

    Raises:
        ValueError: A state has no equal average, or one in 16 bits alone, whose rounding would be most
            of the result; or the second one is not a later one of the run.
        NameMismatchError: The states do not have the same names and shapes.

    Example:
        >>> import copy, torch, modkit
        >>> model = modkit.nn.Linear(1, 1, bias=False)
        >>> ema = modkit.EMA(model, schedule=modkit.schedules.Equal())
        >>> states = []
        >>> for value in 8.0, 1.0, 2.0, 6.0:
        ...     _ = modkit.nn.init.constant_(model.weight, value)
        ...     ema.update()
        ...     states.append(copy.deepcopy(ema.state_dict()))
        >>> modkit.average_range(states[0], states[-1])
        {'weight': tensor([[3.]])}
    """
    start, end = _equal_average(earlier, "earlier"), _equal_average(later, "later")
    check_match(
        "average_range: the two states are not of one model",
        {name: tensor.shape for name, tensor in end["tensors"].items()},
        {name: tensor.shape for name, tensor in start["tensors"].items()},
    )
    _refuse_rounded(start, end)
    first, last = int(earlier["n_averaged"]), int(later["n_averaged"])
    alike = all(earlier[key] == later[key] for key in ("start", "update_every"))
    if not alike or not 0 < first < last:
        raise ValueError(
            "average_range: the later state must be of the same run with more models: "
            f"start, update_every and n_averaged are {_counters(earlier)} and {_counters(later)}"
        )
    means = {name: _mean_between(name, start, first, end, last) for name in end["tensors"]}
    return {**means, **{name: buffer.clone() for name, buffer in later["buffers"].items()}}


def _equal_average(state: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    """Return the first equal average of a state."""
    configs = state.get("schedules", [])
    for config, average in zip(configs, state.get("averages", []), strict=False):
        if config == Equal().to_config():
            found: Mapping[str, Any] = average
            return found
    raise ValueError(
        f"average_range: the {which} state is not of an EMA with schedule=Equal(): its schedules "
        f"are {configs!r}"
    )


def _refuse_rounded(*averages: Mapping[str, Any]) -> None:
    for average in averages:
        for name, tensor in average["tensors"].items():
            if tensor.dtype in NARROW and name not in average["rests"]:
                raise ValueError(
                    f"average_range: the average of {name!r} is kept in {tensor.dtype}, and little of "
                    "the difference of two such averages is right; any precision but 'same' and "
                    "'stochastic' will do"
                )


def _counters(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(state[key] for key in ("start", "update_every", "n_averaged"))


def _mean_between(
    name: str, start: Mapping[str, Any], first: int, end: Mapping[str, Any], last: int
) -> Tensor:
    tensor: Tensor = end["tensors"][name]
    if not is_averaged(tensor):
        return tensor.clone()
    left_out = _wide(start, name).to(tensor.device).mul_(first)
    mean = _wide(end, name).mul_(last).sub_(left_out).div_(last - first)
    return mean.to(torch.float32 if tensor.dtype in NARROW else tensor.dtype)


def _wide(average: Mapping[str, Any], name: str) -> Tensor:
    """Return a copy of an average in float64, with the second number of a compensated one."""
    tensor: Tensor = average["tensors"][name]
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float64), copy=True)
    return wide.add_(average["rests"][name]) if name in average["rests"] else wide
