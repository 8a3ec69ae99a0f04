"""``EMA``: averages of a model's weights, by name and without a second model."""

import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar

from modkit._upstream import RemovableHandle
from modkit.averaging import state as _state
from modkit.averaging._kinds import average_for
from modkit.averaging._members import Members
from modkit.averaging._nonfinite import OnNonfinite
from modkit.averaging._options import (
    DEFAULT_DECAY,
    Decay,
    checked_choice,
    checked_count,
    schedules_of,
)
from modkit.averaging._precision import PRECISIONS, Precision
from modkit.averaging._selection import Buffers, NameFilter, Names, PolicyOf, Selection
from modkit.averaging._sharded import resharded, shards_of
from modkit.averaging._swap import any_swapped, copy_of, exchanged, raw_values, write
from modkit.averaging._tracked import Tracked


__all__ = ["EMA"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)


class EMA(Generic[ModelT]):
    """Keeps exponential moving averages of a model's weights, by name and without a second model.

    Call :meth:`update` after each optimizer step, or :meth:`attach` the optimizer once. To evaluate
    the average, put it into the model for a while with :meth:`applied`. The first update copies the
    weights; each later one moves the average by ``1 - decay`` of the way to them.

    Tensors are matched by name, and an update that does not fit changes nothing. A tensor that has
    several names is averaged once. No update waits for the device (unless ``on_nonfinite="raise"``).

    Args:
        model: The model in training. It is not copied, and stays as it is.
        decay: How much of the average stays in each step, from 0 to 1; a list for several averages
            of one model, which are numbered by ``index`` in the methods.
        schedule: In place of ``decay``, one that changes: see :mod:`modkit.schedules`.
        update_after_step: How many updates to wait for before the weights are copied.
        update_every: Of how many updates to take one; the decay is taken to that power.
        precision: ``"fp32"`` keeps the average in float32 at least, ``"fp64"`` in float64,
            ``"same"`` as the parameter is (16 bits stand still at a decay near 1),
            ``"stochastic"`` rounds at random by ``seed``, ``"compensated"`` has a second number.
        device: Where the averages are kept; by default where the parameters are.
        buffers: ``"copy"`` takes the latest, ``"average"`` averages those of floating point,
            ``"ignore"`` leaves those out, and a dict of globs says so name by name. Buffers of
            integers are always copied.
        include: Globs of names, or a function of a name: the parameters to average; by default all.
        exclude: The same, for parameters not to average.
        on_nonfinite: What to do with a step whose weights are not all finite: ``"ignore"`` that,
            ``"skip"`` the step, or ``"raise"``, which waits for the device in each update.
        seed: Of the random rounding.
        asynchronous: With ``device="cpu"``: average in a thread, while training goes on. An update
            copies the weights into pinned memory, without waiting for the device, and waits for
            the thread only if that has not finished the update before; the results are the same.

    Attributes:
        step: How many updates have been asked for.
        n_averaged: How many models are in the average, the copy included.

    Raises:
        TypeError, ValueError: An option makes no sense, or no parameter is averaged.

    Example:
        >>> from modkit import EMA, nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ema = EMA(model, decay=0.75)
        >>> for value in 1.0, 2.0:
        ...     _ = nn.init.constant_(model.weight, value)
        ...     ema.update()
        >>> with ema.applied():
        ...     model.weight.item()
        1.25
        >>> model.weight.item()
        2.0
    """

    def __init__(
        self,
        model: ModelT,
        decay: float | Sequence[Decay] = DEFAULT_DECAY,
        *,
        schedule: Decay | Sequence[Decay] | None = None,
        update_after_step: int = 0,
        update_every: int = 1,
        precision: Precision = "fp32",
        device: int | str | torch.device | None = None,
        buffers: Buffers = "copy",
        include: Names = None,
        exclude: Names = None,
        on_nonfinite: OnNonfinite = "ignore",
        seed: int = 0,
        asynchronous: bool = False,
    ) -> None:
        checked_choice("precision", precision, PRECISIONS)
        checked_choice("on_nonfinite", on_nonfinite, ("ignore", "skip", "raise"))
        self.model = model
        self.update_after_step = checked_count("update_after_step", update_after_step, 0)
        self.update_every = checked_count("update_every", update_every, 1)
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.schedules = schedules_of(decay, schedule)
        self.step = 0
        self.n_averaged = 0
        self._start: int | None = None
        place = None if device is None else torch.device(device)
        if asynchronous and place != torch.device("cpu"):
            raise ValueError(f"EMA: asynchronous=True needs device='cpu', got device={device!r}")
        selected = NameFilter(include, default=True), NameFilter(exclude, default=False)
        self._tracked = Tracked(
            model,
            [average_for(one, precision, place, seed, on_nonfinite) for one in self.schedules],
            Selection(*selected, PolicyOf(buffers)),
            place,
            on_nonfinite,
            asynchronous=asynchronous,
        )
        self._stored: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        names = Members(model).parameters
        if names and not any(map(self._tracked.selection.chooses, names)):
            raise ValueError(f"EMA: include={include!r}, exclude={exclude!r} leave no parameter")

    @property
    def device(self) -> torch.device | None:
        """Where the averages are kept; None if that is where the parameters are."""
        return self._tracked.device

    # Averaging.

    @property
    def decay(self) -> float:
        """The decay of the latest step of the first average; 0 if there has been none."""
        if self._start is None:
            return 0.0
        return self.schedules[0](self.step - self._start)

    def update(self) -> None:
        """Take the model's present weights into the averages; call it after ``optimizer.step()``.

        Raises:
            NameMismatchError: The model's parameters are not those of the previous updates, by
                name or by shape. Nothing has been changed.
            RuntimeError: The averages are in the model (:meth:`applied`), or a parameter is still
                uninitialized, or, with ``on_nonfinite="raise"``, not finite.
        """
        if self._is_swapped():
            raise RuntimeError("EMA: update() inside applied() would average the averages")
        # In this order: leaving inference mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            self._update(self.step + 1)
        self.step += 1

    def _update(self, step: int) -> None:
        start = self._start
        if start is None:
            if step <= self.update_after_step:
                return
        elif (step - start) % self.update_every:
            return
        self._tracked.bind()
        if start is None:
            if not self._tracked.begin():
                return
            self._start = step
        else:
            n = step - start
            self._tracked.step([1.0 - s.over(n, self.update_every) for s in self.schedules], n)
        self.n_averaged += 1

    def flush(self) -> None:
        """Wait for the update that is under way, with ``asynchronous=True``.

        Whatever reads the averages does so by itself.

        Raises:
            RuntimeError: It has failed, now or earlier; each later update and reading raises that
                too, until a state is loaded.
        """
        self._tracked.flush()

    def attach(self, optimizer: torch.optim.Optimizer) -> Self:
        """Update after each step that ``optimizer`` really takes, until :meth:`detach`.

        With gradient accumulation that is once for all the backward passes of a step; a step that a
        ``GradScaler`` leaves out is none.

        Returns this object.
        """

        def update(*_: object) -> None:
            self.update()

        def refuse(*_: object) -> None:
            if self._is_swapped():
                raise RuntimeError("EMA: a step inside applied() would train the average")

        self._handles.append(optimizer.register_step_pre_hook(refuse))
        self._handles.append(optimizer.register_step_post_hook(update))
        return self

    def detach(self) -> None:
        """Stop updating after the steps of the optimizers that were attached."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Using the averages.

    def named_averages(self, index: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)``: the averages, then the buffers that are copied.

        The tensors are those that are kept, not copies, and none before the first update.
        """
        yield from self._tracked.named(index).items()

    @contextmanager
    def applied(self, model: torch.nn.Module | None = None, *, index: int = 0) -> Generator[None]:
        """Put an average into the model for the length of a ``with`` block.

        Nothing is copied: the parameters stay the same objects, and their data change places with the
        averages (those of another dtype or device are cast). Before the first update the block sees
        the raw weights. Blocks may be nested. A checkpoint that is written inside holds the raw
        weights too, and :meth:`load_state_dict` puts them back.

        Args:
            model: Another model to put the average into, for instance the one that is wrapped for
                distributed training; by default the one that is averaged.
            index: Which average, where there are several.

        Raises:
            NameMismatchError: The averages do not fit ``model``. Nothing has been changed.
            RuntimeError: At the end: the block has written to the weights, so that the average, which
                was in their place, has changed with them. The raw weights are back.
        """
        target = self.model if model is None else model
        with resharded(target), exchanged(self._tracked.pairs(model, index)):
            yield

    def _is_swapped(self) -> bool:
        return any_swapped(self.model)

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module | None = None, *, index: int = 0) -> None:
        """Copy an average into a model; before the first update nothing happens.

        If it is the averaged model, the values that are replaced are kept until :meth:`restore`.

        Raises:
            NameMismatchError: The averages do not fit ``model``. Nothing has been changed.
        """
        pairs = self._tracked.pairs(model, index)
        if (model is None or model is self.model) and not self._stored:
            self._stored = {name: tensor.detach().clone() for name, tensor, _ in pairs}
        for _, tensor, value in pairs:
            write(tensor, value)

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the values back that the last :meth:`copy_to` has replaced.

        Raises:
            RuntimeError: There has been none.
        """
        if not self._stored:
            raise RuntimeError("EMA: restore() without a copy_to() before it")
        members = Members(self.model)
        found = {**members.parameters, **members.buffers}
        for name, value in self._stored.items():
            write(found[name].tensor, value)
        self._stored = {}

    def averaged_model(self, index: int = 0) -> ModelT:
        """Return a copy of the model that holds an average, in evaluation mode, without gradients.

        What is not averaged is as it is in the model now.
        """
        model = copy_of(self.model)
        if self._start is not None:
            with torch.no_grad():
                for _, tensor, value in self._tracked.pairs(model, index):
                    write(tensor, value)
        return model.requires_grad_(False).eval()

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next update depends on, as plain numbers, strings and tensors.

        The tensors are not copied. Inside :meth:`applied` the raw weights of the model are part of
        it. The state can be saved with ``torch.save`` and loaded with ``weights_only=True``.
        """
        state: dict[str, Any] = {
            "version": _state.VERSION,
            "step": self.step,
            "start": self._start,
            "n_averaged": self.n_averaged,
            "update_every": self.update_every,
            "update_after_step": self.update_after_step,
            "schedules": [schedule.to_config() for schedule in self.schedules],
            **self._tracked.state_dict(),
        }
        raw = raw_values(self.model)
        if raw:
            state["raw"] = raw
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of an ``EMA``, or of what another library averages with.

        The next update is then the one that would have followed when the state was made. Schedule,
        ``update_every`` and ``update_after_step`` are those of the state, with a warning where
        they differ; precision and device stay. Known are the states of torch's ``AveragedModel``,
        timm's ``ModelEmaV3``, diffusers' ``EMAModel``, ema-pytorch, torch_ema and Lightning.

        Args:
            state_dict: What ``state_dict()`` returned. If it is empty, averaging starts anew, with a
                warning. Raw weights in it, from a checkpoint written inside :meth:`applied`, are put
                into the model, with a warning.

        Raises:
            ValueError: The state is of no known kind, or of another number of averages.
            NameMismatchError: Its tensors do not fit the model. Nothing has been changed.
            RuntimeError: The averages are in the model (:meth:`applied`).
        """
        if self._is_swapped():
            raise RuntimeError("EMA: load_state_dict() inside applied()")
        if not state_dict:
            warnings.warn("EMA: the state is empty, so averaging starts anew", stacklevel=2)
            self._reset()
            return
        loaded = _state.read(
            state_dict,
            self.model,
            schedules=self.schedules,
            update_every=self.update_every,
            update_after_step=self.update_after_step,
        )
        with torch.inference_mode(False), torch.no_grad():
            self._load(loaded)
        self.step, self._start, self.n_averaged = loaded.step, loaded.start, loaded.n_averaged
        self.schedules = loaded.schedules
        self.update_every, self.update_after_step = loaded.update_every, loaded.update_after_step

    def _reset(self) -> None:
        self.step, self.n_averaged, self._start = 0, 0, None
        self._tracked.reset()

    def _load(self, loaded: _state.LoadedState) -> None:
        members = Members(self.model)
        raw = [(name, members.tensor(name), value) for name, value in loaded.raw.items()]
        if loaded.start is not None:
            self._tracked.load(loaded, members)
        else:
            self._reset()
        if raw:
            warnings.warn(
                "EMA: the state was saved inside applied(); its raw weights are put into the model",
                stacklevel=3,
            )
            for _, tensor, value in raw:
                write(tensor, shards_of(value, tensor))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: all but the optimizers that are attached."""
        return {**vars(self), "_handles": [], "_raw": raw_values(self.model)}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, with the raw weights in its model if it was made inside ``applied``."""
        raw: dict[str, Tensor] = state.pop("_raw")
        self.__dict__.update(state)
        members = Members(self.model)
        for name, value in raw.items():
            write(members.tensor(name), value)
