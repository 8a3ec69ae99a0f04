"""Which calls of ``optimizer.step()`` are training steps, for averages with attached optimizers."""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import Self, override

from modkit._upstream import (
    RemovableHandle,
    is_allocating_state,
    runs_step_hooks,
    step_hooks,
    steps_in_progress,
)
from modkit.averaging.precision import HOST_DEVICES
from modkit.averaging.sharding import local_shard


def check_optimizer(owner: str, optimizer: Any) -> Optimizer:
    """Return the optimizer; raise TypeError if its steps run no hooks."""
    what = f"{owner}: {type(optimizer).__name__}"
    inner = getattr(optimizer, "optimizer", None)
    remedy = "Call update() after each step instead."
    if isinstance(inner, Optimizer):
        remedy = (
            "It wraps the optimizer that takes the steps: attach that one, before accelerate's "
            "prepare() or as attach(optimizer.optimizer)."
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{what} is not a torch.optim.Optimizer, so its steps cannot be tracked. {remedy}"
        )
    # The wrappers of Lightning share their table of hooks with the optimizer inside, which runs
    # them.
    stepping = optimizer if runs_step_hooks(optimizer) else inner
    if step_hooks(optimizer) is None or step_hooks(optimizer) is not step_hooks(stepping):
        raise TypeError(
            f"{what} does not run the hooks of torch.optim.Optimizer, so its steps cannot be "
            f"tracked. {remedy}"
        )
    return optimizer


class _Calls(threading.local):
    count = 0


class OptimizerSteps:
    """Attached optimizers, and the indices of those that have stepped in this training step.

    A training step ends when each optimizer has stepped, or when one steps again. These calls of
    ``step()`` are not steps of their own:

    - one inside another step of the same optimizer, such as ``super().step()`` in a subclass;
    - one that raises;
    - the one by which ``torch.distributed.checkpoint`` allocates the state of an optimizer;
    - one of a fused optimizer that skips it, where the flag of the ``GradScaler`` is in host
      memory.
    """

    def __init__(self, stepped: Iterable[int] = ()) -> None:
        self.optimizers: list[Optimizer] = []
        self.stepped: set[int] = set(stepped)
        self._handles: list[RemovableHandle] = []
        self._versions: list[int] | None = None
        self._has_warned = False
        # Optimizers may step in backward, which runs in a thread for each device.
        self._lock = threading.Lock()
        self._calls = _Calls()

    @override
    def __reduce__(self) -> tuple[type[Self], tuple[set[int]]]:
        # Optimizers are not copied.
        return type(self), (set(self.stepped),)

    def check(
        self, owner: str, optimizers: Sequence[Optimizer], averaged: Iterable[torch.Tensor]
    ) -> None:
        """Raise TypeError or ValueError for optimizers that cannot be attached for these parameters."""
        if not optimizers:
            raise ValueError(f"{owner} needs an optimizer")
        trained = set(map(id, averaged))
        for place, one in enumerate(optimizers):
            check_optimizer(owner, one)
            what = f"{owner}: {type(one).__name__}"
            if any(one is other for other in (*self.optimizers, *optimizers[:place])):
                raise ValueError(f"{what} is attached already, or given twice")
            groups = one.param_groups
            if trained.isdisjoint(id(each) for group in groups for each in group["params"]):
                raise ValueError(
                    f"{what} has no averaged parameter of the model. Attach the optimizer that "
                    "trains it, after the model is where it is trained."
                )

    def attach(
        self,
        optimizers: Sequence[Optimizer],
        before: Callable[..., None],
        after: Callable[..., None],
    ) -> None:
        """Call functions before and after each step of the optimizers, with the index as well."""
        for index, one in enumerate(optimizers, len(self.optimizers)):
            self._handles.append(one.register_step_pre_hook(partial(before, index)))
            self._handles.append(one.register_step_post_hook(partial(after, index)))
        self.optimizers += optimizers

    def detach(self) -> None:
        """Forget the optimizers, and a training step that has begun."""
        for handle in self._handles:
            handle.remove()
        self.optimizers, self._handles, self.stepped = [], [], set()
        self._versions = None

    def state_dict(self) -> dict[str, list[int]]:
        """Return which optimizers have stepped; empty between training steps."""
        return {"stepped": sorted(self.stepped)} if self.stepped else {}

    def load(self, stepped: Iterable[int]) -> None:
        """Go on after these steps of a training step."""
        self.stepped = set(stepped)
        self._versions = None

    def _in_progress(self, index: int, calls: int) -> list[int]:
        """Return the indices of the optimizers that are stepping in this thread, innermost first.

        ``calls`` is how many steps have begun and not ended. After a step that raised it is too
        high, because torch runs no post hook then. Only the stack has the truth, and reading it
        takes as long as a small update.
        """
        if calls <= 1:
            return [index]
        indices = {id(step_hooks(one)): place for place, one in enumerate(self.optimizers)}
        tables = [id(step_hooks(one)) for one in steps_in_progress()]
        return [indices[table] for table in tables if table in indices] or [index]

    def _is_complete(self) -> bool:
        return self.stepped.issuperset(range(len(self.optimizers)))

    def _counts(self, index: int, optimizer: Optimizer, keywords: Mapping[str, Any]) -> bool:
        """Return True unless a step is skipped or serves another purpose than to train."""
        if index >= len(self.optimizers):
            # A copied optimizer may have copied the hooks, and with them these averages.
            return False
        # A GradScaler sets the flag of a fused optimizer, whose kernel then does nothing.
        flag = getattr(optimizer, "found_inf", None)
        if isinstance(flag, torch.Tensor) and flag.device.type in HOST_DEVICES and flag.any():
            return False
        is_without_closure = "closure" in keywords and keywords["closure"] is None
        return not (is_without_closure and is_allocating_state())

    def begin(
        self, index: int, optimizer: Optimizer, arguments: object, keywords: Mapping[str, Any]
    ) -> bool:
        """Return True if a training step is over because this optimizer steps again."""
        self._versions = None
        stepping = self._in_progress(index, self._calls.count + 1)
        self._calls.count = len(stepping)
        if (
            len(stepping) > 1
            or index not in self.stepped
            or not self._counts(index, optimizer, keywords)
        ):
            return False
        with self._lock:
            # A loaded state may be of a run with more optimizers.
            is_unfinished = not self._is_complete()
            self.stepped.clear()
        return is_unfinished

    def end(
        self, index: int, optimizer: Optimizer, arguments: object, keywords: Mapping[str, Any]
    ) -> bool:
        """Record the step; return True if the training step is over."""
        outer = self._in_progress(index, self._calls.count)[1:]
        self._calls.count = len(outer)
        if index in outer or not self._counts(index, optimizer, keywords):
            return False
        with self._lock:
            self.stepped.add(index)
            # The optimizer around it decides.
            if outer or not self._is_complete():
                return False
            self.stepped.clear()
        return True

    def note_update(self) -> None:
        """Note that the averages contain the present parameters."""
        self._versions = self._versions_now()

    def warn_if_updated(self) -> None:
        """Warn once if the averages contain the present parameters because an optimizer has stepped."""
        if self._has_warned or self._versions is None or self._versions != self._versions_now():
            return
        self._has_warned = True
        text = (
            "EMA.update() was called for a step by which an attached optimizer has already updated"
        )
        advice = "Call either attach() or update(); detach() ends the updates by optimizers."
        warnings.warn(f"{text} the averages, so the step counts twice. {advice}", stacklevel=3)

    def _versions_now(self) -> list[int]:
        # Any optimizer that steps writes to the first parameters, also one that is not attached.
        groups = [group["params"][:1] for one in self.optimizers for group in one.param_groups]
        first = [local_shard(parameter) for group in groups for parameter in group]
        return [0 if one.is_inference() else one._version for one in first]
