"""Which calls of ``optimizer.step()`` are training steps, for averages with attached optimizers."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from functools import partial
from typing import Any, Final, TypeAlias, cast

import torch
from torch.optim import Optimizer
from typing_extensions import Self, override

from modkit._messages import warn_user
from modkit._upstream import (
    RemovableHandle,
    is_allocating_state,
    never_compiled,
    runs_step_hooks,
    step_hooks,
    steps_in_progress,
)
from modkit.averaging.sharding import local_shard
from modkit.averaging.swap import versions_of


_Parameters: TypeAlias = Callable[[], Iterable[torch.Tensor]]

_CALL_UPDATE: Final = "call update() after each step of the wrapper instead."


def check_optimizer(owner: str, optimizer: Any) -> Optimizer:
    """Return the optimizer; raise TypeError unless its steps run the hooks of one."""
    # Lightning's wrappers share their table of hooks with the optimizer inside, which runs them.
    is_optimizer = isinstance(optimizer, Optimizer)
    inner = getattr(optimizer, "optimizer", None)
    stepping = optimizer if is_optimizer and runs_step_hooks(optimizer) else inner
    hooks = step_hooks(optimizer) if is_optimizer else None
    if hooks is None or hooks is not step_hooks(stepping):
        raise TypeError(
            f"{owner}: {type(optimizer).__name__} is not a torch.optim.Optimizer, or does not run "
            "the hooks of one, so its steps cannot be tracked. If it wraps the optimizer that "
            "takes the steps, attach that, before accelerate's prepare() or as "
            "attach(optimizer.optimizer). Call update() after each step otherwise."
        )
    return cast("Optimizer", optimizer)


def _trained_by(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def trains_any(optimizer: Optimizer, ids: AbstractSet[int]) -> bool:
    """Return True if an optimizer has a parameter of these, given by their ``id``."""
    return not ids.isdisjoint(_trained_by(optimizer))


class OptimizerSteps:
    """Attached optimizers, and those that have stepped in this training step.

    A training step ends when each optimizer has stepped, or when one steps again. These calls of
    ``step()`` are not steps of their own:

    - one inside another step of the same optimizer, such as ``super().step()`` in a subclass;
    - one that raises;
    - the one by which ``torch.distributed.checkpoint`` allocates the state of an optimizer.

    Attributes:
        versions: Versions of parameters when the averages were last updated by an optimizer's step.
    """

    def __init__(self) -> None:
        # Weak, because the hooks of an optimizer hold these averages.
        self._optimizers: list[weakref.ref[Optimizer]] = []
        # The ids of the parameters of each optimizer, when they were last compared.
        self._trained: dict[int, list[int]] = {}
        self._stepped: set[int] = set()
        # Steps that have begun since the last that counted; more than one may be nested ones.
        self._begun = 0
        self._handles: list[RemovableHandle] = []
        self.versions: list[int] | None = None
        self._first: list[torch.Tensor] = []
        self._has_warned = False

    @override
    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        # Optimizers are not copied.
        return type(self), ()

    def attach(
        self,
        owner: str,
        optimizers: Sequence[Optimizer],
        averaged: _Parameters,
        refuse: Callable[[], None],
        update: Callable[[], None],
    ) -> None:
        """Update after each training step of the optimizers, if all of them can be attached."""
        if not optimizers:
            raise ValueError(f"{owner} needs an optimizer")

        averaged_ids = set(map(id, averaged()))
        for index, optimizer in enumerate(optimizers):
            check_optimizer(owner, optimizer)
            kind = type(optimizer).__name__
            if optimizer in (*self.optimizers.values(), *optimizers[:index]):
                raise ValueError(f"{owner}: {kind} is attached already, or given twice")

            if not trains_any(optimizer, averaged_ids):
                raise ValueError(
                    f"{owner}: {kind} has no averaged parameter of the model. Attach the optimizer "
                    "that trains it, after the model is where it is trained; if a wrapper trains "
                    f"copies of the parameters, as DeepSpeed does, {_CALL_UPDATE}"
                )

        for index, optimizer in enumerate(optimizers, len(self._optimizers)):
            before = partial(self._before, refuse, update, index)
            after = partial(self._after, averaged, update, index)
            self._handles.append(optimizer.register_step_pre_hook(before))
            self._handles.append(optimizer.register_step_post_hook(after))
            self._optimizers.append(weakref.ref(optimizer))
            self._trained[index] = _trained_by(optimizer)

    @never_compiled
    def _before(
        self, refuse: Callable[[], None], update: Callable[[], None], index: int, *call: Any
    ) -> None:
        refuse()
        self._begun += 1
        self.versions = None
        # If only some optimizers have stepped when one steps again, the training step is over.
        if index in self._stepped and self._counts(*call):
            self._stepped.clear()
            update()

    @never_compiled
    def _after(
        self, averaged: _Parameters, update: Callable[[], None], index: int, *call: Any
    ) -> None:
        if not self._counts(*call):
            return
        self._begun = 0
        self._stepped.add(index)
        if self._stepped >= self.optimizers.keys():
            self._stepped.clear()
            self._check_trained(averaged)
            update()
            # Any optimizer that steps writes to the first parameters of groups, also one that is
            # not attached. Groups that are added later have other versions.
            groups = [group for one in self.optimizers.values() for group in one.param_groups]
            self._first = [group["params"][0] for group in groups if group["params"]]
            self.versions = self._versions_now()

    def _counts(self, optimizer: Optimizer, _: object, keywords: Mapping[str, Any]) -> bool:
        """Return True unless a step is a part of another one, or does not train.

        ``torch.distributed.checkpoint`` calls ``step(closure=None)`` with zero gradients and a
        learning rate of 0, so that there is a state to load into.
        """
        # The stack takes as long to read as a small update.
        stepping = steps_in_progress() if self._begun > 1 else []
        # A wrapper and the optimizer inside are two objects with one table of hooks.
        table = step_hooks(optimizer)
        if sum(step_hooks(other) is table for other in stepping) > 1:
            return False
        return not (keywords.get("closure", ...) is None and is_allocating_state())

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The attached optimizers that are still there, by their indices."""
        alive = ((index, reference()) for index, reference in enumerate(self._optimizers))
        return {index: optimizer for index, optimizer in alive if optimizer is not None}

    def _check_trained(self, averaged: _Parameters) -> None:
        """Raise RuntimeError if others have taken the place of averaged parameters in an optimizer.

        A wrapper may have put them there, such as master weights in float32, which it copies to the
        model after this step: the averages would lag one step behind.
        """
        for index, optimizer in self.optimizers.items():
            now = _trained_by(optimizer)
            if now == self._trained[index]:
                continue
            if not trains_any(optimizer, set(map(id, averaged()))):
                raise RuntimeError(
                    f"EMA: {type(optimizer).__name__} no longer holds averaged parameters: since "
                    "attach(), others have taken their place, such as the master weights of "
                    "DeepSpeed, from which the model is written after this step. The step "
                    f"was taken and not averaged. Call detach(), and {_CALL_UPDATE}"
                )
            self._trained[index] = now

    def detach(self) -> None:
        """Forget the optimizers, and a training step that has begun."""
        while self._handles:
            self._handles.pop().remove()
        self._optimizers = []
        self._trained = {}
        self.restart()

    def restart(self) -> None:
        """Forget a training step that has begun, as in a run that is resumed."""
        self._stepped = set()
        self.versions = None

    def warn_if_updated(self) -> None:
        """Warn once if an attached optimizer has already updated the averages for this step."""
        if self._has_warned or self.versions is None or self.versions != self._versions_now():
            return
        self._has_warned = True
        warn_user(
            "EMA.update() was called for a step by which an attached optimizer has already "
            "updated the averages, so the step counts twice. Call either attach() or update(); "
            "detach() ends the updates by optimizers."
        )

    def writes(self) -> int:
        """Return how often parameters were written to since an attached optimizer's last step."""
        return max(map(int.__sub__, self._versions_now(), self.versions or ()), default=0)

    def _versions_now(self) -> list[int]:
        # A write to a sharded tensor does not count for its local shard, nor the other way round.
        return versions_of([*self._first, *map(local_shard, self._first)])
