"""The averages of one model's tensors, and the copies of what has no average."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modkit.averaging import state as _state
from modkit.averaging._average import Average
from modkit.averaging._members import Member, Members, check_match
from modkit.averaging._nonfinite import OnNonfinite, all_finite, first_nonfinite
from modkit.averaging._offload import Staging, Worker, events_on
from modkit.averaging._selection import Selection
from modkit.averaging._sharded import is_sharded, local_shard, meshes_of, reshard, true_everywhere
from modkit.averaging._swap import Pair, pairs_for


class Tracked:
    """Averages that follow the tensors of a model by name.

    Args:
        model: The model.
        averages: The averages of it, all of the same tensors.
        selection: Which tensors are averaged, and which are copied.
        device: Where the copies are kept; ``None`` for where the tensors are.
        on_nonfinite: What to do with values that are not finite.
        asynchronous: Whether the steps are taken in a thread, on copies in host memory.

    Attributes:
        begun: Whether there has been a step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        averages: Sequence[Average],
        selection: Selection,
        device: torch.device | None,
        on_nonfinite: OnNonfinite,
        *,
        asynchronous: bool,
    ) -> None:
        self.model = model
        self.selection = selection
        self.begun = False
        self._averages = list(averages)
        self._copies: dict[str, Tensor] = {}
        self.device = device
        self._on_nonfinite: OnNonfinite = on_nonfinite
        self._worker = Worker() if asynchronous else None
        self._staging: Staging | None = None
        self._members: Members | None = None
        self._bound: Mapping[str, Tensor] = {}
        self._shards: Mapping[str, Tensor] = {}
        self._meshes: list[Any] = []
        self._averaged_buffers: list[Member] = []
        self._copied: list[Member] = []

    def flush(self) -> None:
        """Wait for the step that the thread is taking, if there is one."""
        if self._worker is not None:
            self._worker.flush()

    # Averaging.

    def bind(self) -> None:
        """Find the model's tensors, unless they are those of the previous step.

        Raises:
            NameMismatchError: They are not those that are averaged. Nothing has been changed.
            RuntimeError: One has no shape yet, or is not finite where that is to be raised.
        """
        if not self._is_bound():
            self._bind()
        if self._on_nonfinite == "raise":
            bad = self._first_nonfinite()
            if bad is not None:
                raise RuntimeError(f"EMA: {bad} is not finite. Nothing has been changed.")

    def _is_bound(self) -> bool:
        members = self._members
        return (
            members is not None
            and not members.changed()
            and all(member.current() is member.tensor for member in self._averaged_buffers)
        )

    def _bind(self) -> None:
        self.flush()
        members = Members(self.model)
        if members.has_lazy():
            raise RuntimeError(
                "EMA: a parameter is uninitialized; call the model once before update()"
            )
        bound, copied = self.selection.split(members)
        shards = {name: local_shard(tensor) for name, tensor in bound.items()}
        if self._worker is not None and self._on_nonfinite == "skip":
            _check_whole(bound)
        if self.begun or self._averages[0].tensors:
            expected = {name: t.shape for name, t in self._averages[0].tensors.items()}
            found = {name: tensor.shape for name, tensor in bound.items()}
            check_match("EMA: the model is not the one that is averaged", expected, found)
        else:
            for average in self._averages:
                average.start(bound)
        self._staging = None if self._worker is None else Staging(shards)
        for average in self._averages:
            average.bind(shards if self._staging is None else self._staging.copies)
        self._members, self._bound, self._copied = members, bound, copied
        self._shards, self._meshes = shards, meshes_of(bound.values())
        buffers = members.buffers
        self._averaged_buffers = [buffers[name] for name in bound if name in buffers]

    def begin(self) -> bool:
        """Copy the values; return whether that was done, as an average cannot begin with bad ones."""
        if self._on_nonfinite == "skip" and self._first_nonfinite() is not None:
            # This is the one time that a step waits for the device.
            return False
        self.begun = True
        self.step([1.0] * len(self._averages), 0)
        return True

    def _first_nonfinite(self) -> str | None:
        """Return the first name with values that are not finite; all processes see that together."""
        bad = first_nonfinite(list(self._shards.items()))
        fine = true_everywhere(torch.tensor(bad is None), self._meshes)
        return None if fine else bad or "a parameter of another process"

    def step(self, weights: Sequence[float], n: int) -> None:
        """Move each average by its weight of the way to the present values, which are bound.

        Args:
            weights: One for each average.
            n: The number of the step; 0 is the copy.
        """
        buffers = [(member.name, member.current().detach()) for member in self._copied]
        if self._worker is None or self._staging is None:
            self._step(weights, n, self._shards, buffers)
            return
        self._worker.flush()
        staged = self._staging.copies
        host = [(name, buffer.to("cpu", copy=True, non_blocking=True)) for name, buffer in buffers]
        events = self._staging.fill() + events_on({buffer.device for _, buffer in buffers})

        def task() -> None:
            for event in events:
                event.synchronize()
            self._step(weights, n, staged, host)

        self._worker.submit(task)

    def _step(
        self,
        weights: Sequence[float],
        n: int,
        bound: Mapping[str, Tensor],
        buffers: Sequence[tuple[str, Tensor]],
    ) -> None:
        finite = None
        if n and self._on_nonfinite == "skip":
            tensors = list(bound.values())
            finite = all_finite(tensors, tensors[0].device)
            finite = true_everywhere(finite, self._meshes)
        for average, weight in zip(self._averages, weights, strict=True):
            average.step(weight, finite, n)
        for name, buffer in buffers:
            self._copy_buffer(name, buffer)

    def _copy_buffer(self, name: str, current: Tensor) -> None:
        mine = self._copies.get(name)
        place = self.device if self.device is not None else current.device
        if (
            mine is None
            or mine.shape != current.shape
            or mine.dtype != current.dtype
            or mine.device != place
        ):
            self._copies[name] = current.to(place, copy=True)
        else:
            mine.copy_(current)

    # What there is.

    def named(self, index: int) -> dict[str, Tensor]:
        """Return one of the averages and the copies, by name; nothing before the first step."""
        self.flush()
        if not self.begun:
            return {}
        average = self._averages[index]
        return {**{name: average.value(name) for name in average.names()}, **self._copies}

    def pairs(self, model: torch.nn.Module | None, index: int) -> list[Pair]:
        """Pair one of the averages with the tensors of a model, by default of the one it follows."""
        values = self.named(index)
        # Only then can it be seen whether they are others.
        reshard(self.model if model is None else model)
        members = self._members
        if (model is not None and model is not self.model) or members is None or members.changed():
            members = Members(self.model if model is None else model)
        return pairs_for(members, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the copies; nothing is copied for it."""
        self.flush()
        averages = [average.state_dict() for average in self._averages]
        return {"averages": averages, "buffers": dict(self._copies)}

    def load(self, loaded: _state.LoadedState, members: Members) -> None:
        """Take over a state; it is checked before anything is changed."""
        bound, wanted, found = _state.matched(loaded, members, self.selection)
        if self._worker is not None:
            self._worker.forget()
        for average, state, tensors in zip(self._averages, loaded.averages, found, strict=True):
            average.start(bound)
            average.load_state_dict({**state, "tensors": tensors})
        self._copies = {
            name: value.to(self.device, copy=True)
            for name, value in loaded.buffers.items()
            if name in wanted
        }
        self.begun, self._members = True, None

    def reset(self) -> None:
        """Forget everything, so that the next step is the first one."""
        if self._worker is not None:
            self._worker.forget()
        self.begun, self._members = False, None
        for average in self._averages:
            average.reset()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: all but what is bound, and the thread."""
        self.flush()
        unbound: dict[str, Any] = {
            "_members": None,
            "_bound": {},
            "_shards": {},
            "_meshes": [],
            "_copied": [],
            "_averaged_buffers": [],
            "_staging": None,
            "_worker": None if self._worker is None else Worker(),
        }
        return {**vars(self), **unbound}


def _check_whole(bound: Mapping[str, Tensor]) -> None:
    sharded = next((name for name, tensor in bound.items() if is_sharded(tensor)), None)
    if sharded is not None:
        raise ValueError(
            f"EMA: {sharded} is split up, so on_nonfinite='skip' asks the other processes; that "
            "cannot be done in a thread, with asynchronous=True"
        )
