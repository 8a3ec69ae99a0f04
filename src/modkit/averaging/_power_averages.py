"""Several power averages of one model, updated together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modkit.averaging._average import Average
from modkit.averaging._members import Members, canonical_names, check_match
from modkit.averaging._precision import is_averaged
from modkit.averaging.schedules import Power


class PowerAverages:
    """Power averages of the parameters of a model, by name, in float32 or wider.

    The step ``t`` counts calls of :meth:`update`, from 1. At a step that ``update_every`` divides, each average
    takes the decay of all steps since the last one; the first one copies. So an average weighs the model
    of each update by the integral of its profile over the steps that the update stands for, which
    is what the coefficients of post-hoc EMA assume.

    Args:
        model: The model; its parameters are looked up again when it has changed.
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
        self.averages: list[Average] = []
        self._members: Members | None = None

    @torch.no_grad()
    def update(self) -> None:
        """Count a step, and update the averages if it is one at which that is done."""
        step = self.step + 1
        if step % self.update_every == 0:
            if self._members is None or self._members.changed():
                self._look_up()
            for average, schedule in zip(self.averages, self.schedules, strict=True):
                average.step(1 - schedule.over(step - 1, self.update_every))
        self.step = step

    def _look_up(self) -> None:
        """Find the parameters of the model, and raise where they are not those of the averages."""
        members = Members(self.model)
        current = averaged_parameters(members)
        if self.averages:
            check_match("the average", shapes(self.averages[0].tensors), shapes(current))
        averages = self.averages or self._started(current)
        for average in averages:
            average.bind(current)
        self.averages, self._members = averages, members

    def _started(self, current: Mapping[str, Tensor]) -> list[Average]:
        """Return new averages, in which nothing has been written yet."""
        averages = [Average("fp32", None, 0) for _ in self.schedules]
        for average in averages:
            average.start(current)
        return averages

    def state_dict(self) -> dict[str, Any]:
        """Return the step, what the averages are, and the averages."""
        return {
            "step": self.step,
            "update_every": self.update_every,
            "sigma_rels": list(self.sigma_rels),
            "averages": [dict(average.tensors) for average in self.averages],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, or raise and leave everything as it was."""
        own = self.state_dict()
        for key in ("sigma_rels", "update_every"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the state is of averages with {key}={state[key]!r}, not {own[key]!r}"
                )
        current = averaged_parameters(Members(self.model))
        for saved in state["averages"]:
            check_match("the state of the average", shapes(saved), shapes(current))
        averages = self._started(current) if state["averages"] else []
        for average, saved in zip(averages, state["averages"], strict=True):
            for name, tensor in average.tensors.items():
                tensor.copy_(saved[name])
        self.averages, self._members = averages, None
        self.step = int(state["step"])


def averaged_parameters(members: Members) -> dict[str, Tensor]:
    """Return the parameters that have a mean, by name; tied ones once."""
    found = {name: member.tensor for name, member in members.parameters.items()}
    return {name: tensor for name, tensor in found.items() if is_averaged(tensor)}


def other_members(model: torch.nn.Module, members: Members) -> dict[str, Tensor]:
    """Return what else a checkpoint of the model has: buffers, and parameters of integers."""
    saved = set(canonical_names(model.state_dict(keep_vars=True)).values())
    found = {**members.parameters, **members.buffers}
    averaged = averaged_parameters(members)
    return {
        name: member.current()
        for name, member in found.items()
        if name in saved and name not in averaged
    }


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shape of each tensor."""
    return {name: tensor.shape for name, tensor in tensors.items()}
