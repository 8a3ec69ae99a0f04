"""Several power averages of one model, updated together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modkit.averaging._update import ema_
from modkit.averaging.converters import canonical_name
from modkit.averaging.schedules import Power


class PowerAverages:
    """Power averages of the parameters of a model, by name, in float32 or wider.

    The step ``t`` counts calls of :meth:`update`, from 1. At a step that ``update_every`` divides, each average
    takes the decay of all steps since the last one; the first one copies. So an average weighs the model
    of each update by the integral of its profile over the steps that the update stands for, which
    is what the coefficients of post-hoc EMA assume.

    Args:
        model: The model; its parameters are read by name at every update.
        sigma_rels: The relative width of each average, below 0.2886.
        update_every: At which steps the averages are updated.
    """

    def __init__(
        self, model: torch.nn.Module, sigma_rels: Sequence[float], update_every: int = 1
    ) -> None:
        self.model = model
        self.sigma_rels = [float(sigma_rel) for sigma_rel in sigma_rels]
        self.schedules = [Power(sigma_rel=sigma_rel) for sigma_rel in self.sigma_rels]
        self.update_every = update_every
        self.step = 0
        self.averages: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def update(self) -> None:
        """Count a step, and update the averages if it is one at which that is done."""
        step = self.step + 1
        if step % self.update_every == 0:
            current = averaged_parameters(self.model)
            if not self.averages:
                self.averages = [
                    {n: widened(p) for n, p in current.items()} for _ in self.schedules
                ]
            check_names(self.averages[0], current)
            for averages, schedule in zip(self.averages, self.schedules, strict=True):
                mix(averages, current, schedule.over(step - 1, self.update_every))
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the step, what the averages are, and the averages."""
        return {
            "step": self.step,
            "update_every": self.update_every,
            "sigma_rels": list(self.sigma_rels),
            "averages": [dict(averages) for averages in self.averages],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, or raise and leave everything as it was."""
        own = self.state_dict()
        for key in ("sigma_rels", "update_every"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the state is of averages with {key}={state[key]!r}, not {own[key]!r}"
                )
        current = averaged_parameters(self.model)
        for saved in state["averages"]:
            check_names(saved, current)
        self.averages = [
            {name: widened(saved[name]).to(value.device) for name, value in current.items()}
            for saved in state["averages"]
        ]
        self.step = int(state["step"])


def averaged_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters that have a mean, by name; tied ones once."""
    return {
        canonical_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    }


def other_members(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return what else a checkpoint of the model has: buffers, and parameters of integers."""
    averaged = {id(parameter) for parameter in averaged_parameters(model).values()}
    return {
        canonical_name(name): value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and id(value) not in averaged
    }


def widened(tensor: Tensor) -> Tensor:
    """Return a copy in a dtype in which a small change of a mean is not rounded away."""
    if tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize:
        return tensor.detach().to(torch.float32)
    return tensor.detach().clone()


def mix(averages: dict[str, Tensor], current: Mapping[str, Tensor], decay: float) -> None:
    """Take one step of an average, all tensors of a device and dtype at a time."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for name, average in averages.items():
        targets, values = groups.setdefault((average.device, average.dtype), ([], []))
        targets.append(average)
        values.append(current[name].to(average.device, average.dtype))
    for targets, values in groups.values():
        ema_(targets, values, decay)


def check_names(averages: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    """Raise unless the model has parameters of just these names and shapes."""
    shapes = {name: tuple(value.shape) for name, value in averages.items()}
    found = {name: tuple(value.shape) for name, value in current.items()}
    if shapes == found:
        return
    wrong = sorted(name for name in shapes.keys() | found if shapes.get(name) != found.get(name))
    raise ValueError(
        f"the parameters are not those of the average: {len(wrong)} of them differ, the first is "
        f"{wrong[0]!r} with shape {found.get(wrong[0])} instead of {shapes.get(wrong[0])}"
    )
