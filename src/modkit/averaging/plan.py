"""How averages follow a model: its tensors and theirs, grouped for the kernels, and their steps.

A plan is made once and reused until something changes. ``EMA`` and ``AveragedModel`` differ in
where the averages live: in tensors of their own, or in the parameters of a copy of the model.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar, override

from modkit.averaging import precision
from modkit.averaging.averages import Average, Tensors
from modkit.averaging.copies import Copies
from modkit.averaging.groups import Group, grouped
from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.options import Options
from modkit.averaging.rules import Count, Rule, copy
from modkit.averaging.sharding import meshes_of, true_everywhere
from modkit.averaging.watch import Watch


class Plan:
    """One model's tensors with their averages, grouped; valid until ``watch`` notices a change.

    It does not keep the model alive.

    Args:
        options: The options of the averages, of which ``owner`` and ``on_nonfinite`` are used.
        averages: The averages, which all have the names of ``currents``.
        currents: The tensors of the model that are averaged, by name.
        copies: The tensors that are copied.
        models: The models whose tensors end the plan if they are replaced.
        more: Further tensors that end the plan if their metadata change.
        alone: Whether each tensor is stepped by itself, in the order of ``currents``.
        buffers: Whether all buffers end the plan if they are replaced; else those that are
            averaged.
        frozen: Parameters that end the plan if they begin to require gradients.
    """

    def __init__(
        self,
        options: Options,
        averages: Sequence[Average],
        currents: Tensors,
        copies: Copies,
        models: Sequence[NamedTensors],
        *,
        more: Iterable[Tensor] = (),
        alone: bool = False,
        buffers: bool = False,
        frozen: Iterable[Tensor] = (),
    ) -> None:
        self._options = options
        self._currents = currents
        self._copies = copies
        self._groups: list[Group] = grouped(averages, currents, alone=alone)
        self._meshes = meshes_of(currents.values())
        members = [member for model in models for member in model.buffers.values()]
        self.watch: Watch = Watch(
            models,
            [*currents.values(), *more],
            buffers=buffers,
            members=[member for member in members if member.name in currents],
            frozen=frozen,
        )

    def step(self, rule: Rule, count: Count) -> bool | Tensor:
        """Take one step of all averages, and bring the copies up to date.

        Args:
            rule: How the averages move. At 0 they are copies, whatever the rule.
            count: Number of models averaged so far. Below 0 nothing moves, as in torch.

        Returns:
            Whether the values were averaged: a flag in device memory where reading it is a host
            sync.

        Raises:
            RuntimeError: If a value is not finite, with ``on_nonfinite="raise"``.
        """
        finite: bool | Tensor = True
        is_first = not isinstance(count, Tensor) and count == 0
        if self._options.on_nonfinite == "raise":
            precision.check_finite(self._options.owner, self._currents)
        elif self._options.on_nonfinite == "skip" and is_first and not self._starts_finite():
            return False

        if self._copies.watch.changed():
            self._copies.plan()
        if self._options.on_nonfinite == "skip" and not is_first:
            finite = self._all_finite()

        on_device = isinstance(count, Tensor) or isinstance(finite, Tensor)
        with torch.no_grad():
            if finite is not False and (on_device or count >= 0):
                for group in self._groups:
                    if on_device:
                        rule.step_on_device(group, count, finite)
                    elif is_first:
                        copy(group)
                    else:
                        rule.step(group, count)
            for copy_list, targets, sources in self._copies.lists:
                copy_list(targets, sources)
        return finite

    def _starts_finite(self) -> bool:
        """Return True if all values are finite, for the first step.

        It is the only flag of a device that is read on the host: whether there is an average
        decides what reading, saving and swapping do.
        """
        return precision.first_nonfinite(self._currents) is None

    def _all_finite(self) -> bool | Tensor:
        """Return whether all values are finite on all ranks, without a host sync.

        Returns:
            A bool if the values are in host memory, a tensor of one bool if they are on a device.
        """
        tensors = [tensor for group in self._groups for tensor in group.currents]
        flag = true_everywhere(precision.all_finite(tensors), self._meshes)
        return bool(flag) if flag.device.type in precision.HOST_DEVICES else flag


class Watched(Protocol):
    """A value that is valid until something changes."""

    watch: Watch


ValueT = TypeVar("ValueT", bound=Watched)


# Values are cached for so many models, averages and modes: a training loop may take two averages
# in turn, and evaluate in another mode than it trains in.
_MOST_ENTRIES: Final = 4


@dataclass(frozen=True)
class _Entry(Generic[ValueT]):
    """A cached value, with what it is for."""

    model: weakref.ref[torch.nn.Module]
    key: object
    facts: object
    value: ValueT


class Cache(Generic[ValueT]):
    """Values cached for the latest models, without keeping those alive. Copies are empty.

    A value may hold the tensors and the children of its model, but not the model itself: it is
    dropped with the model.
    """

    def __init__(self) -> None:
        # Replaced in one assignment, so that no interrupt leaves a value with another one's model.
        self._entries: tuple[_Entry[ValueT], ...] = ()

    def get(
        self, model: torch.nn.Module, key: object, facts: object, make: Callable[[], ValueT]
    ) -> ValueT:
        """Return the cached value, made anew if the facts, or what it watches, have changed.

        Args:
            model: The model that the value belongs to.
            key: Which of the values for this model, compared by ``==``.
            facts: What else the value depends on, compared by ``==``.
            make: Makes the value.
        """
        # The guards of torch compare the modes, too.
        key = (key, torch.is_inference_mode_enabled(), torch.is_autocast_enabled())
        key = (*key, torch.is_autocast_enabled("cpu"))
        others: list[_Entry[ValueT]] = []
        for entry in self._entries:
            if entry.model() is not model or entry.key != key:
                others.append(entry)
            elif entry.facts == facts and not entry.value.watch.changed():
                return entry.value

        # After an error in ``make`` there is no value: the old one is out of date.
        self._entries = tuple(others)
        value = make()
        # A method as the callback would make a cycle, which keeps the averages until collected.
        reference = weakref.ref(model, partial(_forget, weakref.ref(self)))
        entry = _Entry(reference, key, facts, value)
        self._entries = (entry, *others[: _MOST_ENTRIES - 1])
        return value

    def clear(self) -> None:
        """Drop all values."""
        self._entries = ()

    @override
    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def _forget(cache: weakref.ref[Cache[Any]], model: weakref.ref[torch.nn.Module]) -> None:
    # No global name: as the interpreter exits, those of this module may be None before the model
    # dies.
    owner = cache()
    if owner is not None:
        owner._entries = (*(entry for entry in owner._entries if entry.model is not model),)
