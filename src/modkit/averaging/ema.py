"""``EMA``: averages of a model's parameters, stored by name, without a second model."""

import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeAlias, TypedDict, cast

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar

from modkit._namespace import publish
from modkit._upstream import RemovableHandle
from modkit.averaging import state as ema_state
from modkit.averaging.engine import Engine
from modkit.averaging.named_tensors import Buffers, NamedTensors, Names, Options
from modkit.averaging.precision import OnNonfinite, Precision
from modkit.averaging.schedules import Decay, Schedule, as_schedule
from modkit.averaging.sharding import is_sharded, resharded, shards_of
from modkit.averaging.swap import any_swapped, copy_of, exchanged, raw_values, write


__all__ = ["EMA", "EMAOptions"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)

Device: TypeAlias = int | str | torch.device | None
Decays: TypeAlias = float | Sequence[Decay] | None
DEFAULT_DECAY: Final = 0.999
# Below it a decay is more likely a momentum, which is one minus the decay.
_LEAST_PLAUSIBLE: Final = 0.1


class EMAOptions(TypedDict, total=False):
    """Keywords of :class:`EMA` that each callback takes. See EMA."""

    schedule: Decay | Sequence[Decay] | None
    update_after_step: int
    update_every: int
    precision: Precision
    device: Device
    buffers: Buffers
    include: Names
    exclude: Names
    trainable_only: bool
    on_nonfinite: OnNonfinite
    seed: int


class EMA(Generic[ModelT]):
    """Exponential moving averages of a model's parameters, stored by name.

    Call :meth:`update` after each optimizer step, or :meth:`attach` the optimizer once. To evaluate
    an average, swap it into the model with :meth:`applied`. The first update copies the parameters;
    each later one computes ``average = decay * average + (1 - decay) * parameter``. Methods raise
    ``NameMismatchError`` before anything changes if names or shapes of a model do not match. No
    update synchronizes with an accelerator, except with ``on_nonfinite="raise"``, and the first one
    with ``"skip"``.

    Args:
        model: Model to track. It is neither copied nor modified.
        decay: Decay factor in [0, 1], by default 0.999. A list gives several averages, numbered by
            ``index``.
        schedule: Decay that changes, instead of ``decay``; see :mod:`modkit.schedules`.
        update_after_step: Number of updates to ignore before the parameters are copied.
        update_every: Average once every ``update_every`` updates, with ``decay ** update_every``.
        precision: ``"fp32"`` and ``"fp64"`` keep the average in at least that precision. ``"same"``
            keeps the parameter's dtype: bf16 and fp16 averages stall for decays close to 1.
            ``"stochastic"`` rounds stochastically; ``"compensated"`` adds a low-order error term.
        device: Device of the averages. Default: that of each parameter.
        buffers: ``"copy"``, ``"average"`` or ``"ignore"`` floating-point buffers, or a dict from
            globs of names to one of the three. Integer buffers are always copied.
        include: Globs of names, or a predicate: parameters to average. Default: all.
        exclude: Globs of names, or a predicate: parameters not to average.
        trainable_only: Average only parameters that require gradients at the first update.
        on_nonfinite: ``"ignore"`` averages infinite and NaN parameters, ``"skip"`` skips the step,
            ``"raise"`` raises. On CPU a skipped step has no part in ``n_averaged`` and in the
            schedule; on accelerators it counts there, because reading the flag is a host sync.
        seed: Seed for stochastic rounding.

    Attributes:
        step: Number of updates that were requested.
        n_averaged: Number of models averaged so far, including the initial copy; on accelerators,
            including steps that ``on_nonfinite="skip"`` has skipped.

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
    """

    model: ModelT
    step: int
    n_averaged: int
    schedules: list[Schedule]
    update_after_step: int
    update_every: int

    def __init__(
        self,
        model: ModelT,
        decay: Decays = None,
        *,
        schedule: Decay | Sequence[Decay] | None = None,
        update_after_step: int = 0,
        update_every: int = 1,
        precision: Precision = "fp32",
        device: Device = None,
        buffers: Buffers = "copy",
        include: Names = None,
        exclude: Names = None,
        trainable_only: bool = False,
        on_nonfinite: OnNonfinite = "ignore",
        seed: int = 0,
    ) -> None:
        if not isinstance(cast("object", model), torch.nn.Module):
            raise TypeError(
                f"EMA: model must be a torch.nn.Module, got {type(model).__name__}. Pass the "
                "model, not parameters: EMA(model, decay) averages by name and swaps them itself."
            )
        self.model = model
        self.update_after_step = checked_count("update_after_step", update_after_step, 0)
        self.update_every = checked_count("update_every", update_every, 1)
        self.schedules = schedules_of(decay, schedule)
        self.step = 0
        self.n_averaged = 0
        self._start: int | None = None
        place = None if device is None else torch.device(device)
        chosen = include, exclude, buffers, trainable_only
        options = Options(*chosen, precision, place, on_nonfinite, seed)
        self._engine = Engine(model, len(self.schedules), options)
        self._stored: dict[str, Tensor] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._handles: list[RemovableHandle] = []
        self._stepped: set[int] = set()
        self._module: ModelT | None = None
        self._check_selection()

    def _check_selection(self) -> None:
        parameters = NamedTensors(self.model).parameters.values()
        options = self._engine.options
        if not parameters:
            raise ValueError(
                f"EMA: {type(self.model).__name__} has no parameters to average. Create the EMA "
                "when the model has its parameters; a quantized model keeps its weights elsewhere."
            )
        if not any(map(options.chooses, parameters)):
            raise ValueError(
                f"EMA: include={options.include!r}, exclude={options.exclude!r}, "
                f"trainable_only={options.trainable_only} select none of the "
                f"{len(parameters)} parameters"
            )

    def _check_restored(self, method: str, model: torch.nn.Module) -> None:
        if any_swapped(model):
            raise RuntimeError(
                f"EMA.{method}() was called inside applied(): the model holds the averaged "
                f"weights. Call {method}() outside of the block."
            )

    @property
    def device(self) -> torch.device | None:
        """Device of the averages; None if each is where its parameter is."""
        return self._engine.options.device

    def __repr__(self) -> str:
        parts = [type(self.model).__name__, *map(repr, self.schedules)]
        parts += [f"step={self.step}", f"n_averaged={self.n_averaged}"]
        return f"{type(self).__name__}({', '.join(parts)})"

    def update(self, model: torch.nn.Module | None = None) -> None:
        """Update the averages with the present parameters; call it after ``optimizer.step()``.

        Args:
            model: Another model of the same names and shapes to take the parameters from. All of its
                names may have one more prefix, as in a wrapper of the tracked model, or one fewer.

        Raises:
            NameMismatchError: If names or shapes are not those of the averages.
            RuntimeError: Inside :meth:`applied`, if a parameter has no values yet, or, with
                ``on_nonfinite="raise"``, is not finite.
        """
        source = self.model if model is None else model
        self._check_restored("update", source)
        step, start, every = self.step + 1, self._start, self.update_every
        early = start is None and step <= self.update_after_step
        if not early and (start is None or (step - start) % every == 0):
            # In this order: leaving inference mode turns gradients on.
            with torch.inference_mode(False), torch.no_grad():
                plan = self._engine.bind(source)
                if start is not None:
                    weights = [1.0 - one.over(step - start, every) for one in self.schedules]
                    if self._engine.step(plan, weights):
                        self.n_averaged += 1
                    else:
                        # Schedules count from here, so that a skipped step has no part in any of them.
                        self._start = start + every
                elif self._engine.begin(plan):
                    self._start = step
                    self.n_averaged += 1
        self.step = step

    def rebind(self) -> None:
        """Adapt the averages to the model's present parameters: copy new ones, drop missing ones."""
        self._check_restored("rebind", self.model)
        with torch.inference_mode(False), torch.no_grad():
            self._engine.rebind()
        self._module = None

    def attach(self, *optimizers: torch.optim.Optimizer) -> Self:
        """Update after each step that the optimizer really takes, until :meth:`detach`.

        A step that a ``GradScaler`` skips does not count. Pass all optimizers of the model at once:
        the averages are then updated when each has stepped, or one steps again. If an optimizer
        does not train an averaged parameter, none is attached.
        """
        if not optimizers:
            raise ValueError("EMA.attach() needs an optimizer")
        named = NamedTensors(self.model).parameters.values()
        averaged = {id(one.tensor) for one in named if self._engine.options.chooses(one)}
        for place, one in enumerate(optimizers):
            what = f"EMA.attach(): {type(one).__name__}"
            if not isinstance(cast("object", one), torch.optim.Optimizer):
                raise TypeError(
                    f"{what} is not a torch.optim.Optimizer, so its steps cannot be tracked. Call "
                    "update() after each step instead."
                )
            if any(one is other for other in (*self._optimizers, *optimizers[:place])):
                raise ValueError(f"{what} is attached already, or given twice")
            groups = one.param_groups
            if averaged.isdisjoint(id(each) for group in groups for each in group["params"]):
                raise ValueError(
                    f"{what} has no averaged parameter of the model. Attach the optimizer that "
                    "trains it, after the model is where it is trained."
                )
        self._optimizers += optimizers
        for one in optimizers:
            self._handles.append(one.register_step_pre_hook(self._before_step))
            self._handles.append(one.register_step_post_hook(self._after_step))
        return self

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any_swapped(self.model):
            text = "EMA: optimizer.step() was called inside applied()"
            raise RuntimeError(
                f"{text}: the model holds the averaged weights. Call step() outside of the block."
            )
        if id(optimizer) in self._stepped:
            self._stepped.clear()
            self.update()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self.update()

    def detach(self) -> None:
        """Stop updating after the steps of attached optimizers."""
        for handle in self._handles:
            handle.remove()
        self._optimizers, self._handles, self._stepped = [], [], set()

    def named_averages(self, index: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` of averages and copied buffers; none before the first update."""
        yield from self._engine.named(index).items()

    @contextmanager
    def applied(self, model: torch.nn.Module | None = None, *, index: int = 0) -> Generator[None]:
        """Swap an average into the model for the length of a ``with`` block; blocks may be nested.

        The swap exchanges storage: nothing is copied unless dtype or device differ, and parameters
        stay the same objects. Before the first update the block sees the training weights. If the
        block writes to the parameters, and so to the average, it ends with a RuntimeError.

        Args:
            model: Another model to swap into, such as the wrapped one in distributed training.
            index: Index of the average.
        """
        target = self.model if model is None else model
        with resharded(target), exchanged(self._engine.pairs(target, index)):
            yield

    @torch.no_grad()
    def copy_to(self, model: torch.nn.Module | None = None, *, index: int = 0) -> None:
        """Copy an average into a model, after :meth:`store`; no effect before the first update."""
        for _, tensor, value in self._engine.pairs(self.model if model is None else model, index):
            write(tensor, value)

    @torch.no_grad()
    def store(self) -> None:
        """Store a copy of what :meth:`copy_to` replaces, until :meth:`restore`."""
        self._check_restored("store", self.model)
        named = NamedTensors(self.model)
        names = self._engine.named(0) or dict.fromkeys(named.all())
        self._stored = {name: named.tensor(name).detach().clone() for name in names}

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the training weights of :meth:`store` back into the model, and drop them."""
        if not self._stored:
            raise RuntimeError("EMA.restore(): nothing is stored. Call store() before copy_to().")
        _write(self.model, self._stored)
        self._stored = {}

    def averaged_model(self, index: int = 0) -> ModelT:
        """Return a copy of the model with averaged weights, in eval mode, without gradients."""
        # Tensors that are made in inference mode could not be trained outside of it.
        with torch.inference_mode(False), torch.no_grad():
            model = copy_of(self.model)
            self.copy_to(model, index=index)
        return model.requires_grad_(False).eval()

    @property
    def module(self) -> ModelT:
        """A copy of the model with the first average, in eval mode, without gradients.

        It shares memory with averages of the model's dtype and device. Each access copies the
        others, and what is not averaged.
        """
        # Tensors that are made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            found = NamedTensors(self.model)
            if self._module is None or not found.is_like(NamedTensors(self._module)):
                self._module = self.averaged_model()
            averages = self._engine.named(0)
            for name, member in NamedTensors(self._module).all().items():
                own, value = member.tensor, averages.get(name)
                alike = value is not None and (own.dtype, own.device) == (value.dtype, value.device)
                if alike and not is_sharded(own):
                    own.data = value
                else:
                    write(own, found.tensor(name) if value is None else value)
        return self._module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :attr:`module`, the averaged model."""
        return self.module(*args, **kwargs)

    def to(self, device: Device = None, dtype: torch.dtype | None = None) -> Self:
        """Move and cast the averages, and keep later ones there; None leaves device or dtype."""
        if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
            raise ValueError(f"EMA.to(): dtype must be a floating-point dtype, got {dtype}")
        with torch.inference_mode(False), torch.no_grad():
            self._engine.to(None if device is None else torch.device(device), dtype)
        self._module = None
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next update depends on: numbers, strings and tensors, not copied.

        Inside :meth:`applied` it includes the training weights.
        """
        own = "step", "n_averaged", "update_every", "update_after_step"
        state: dict[str, Any] = {
            "version": ema_state.VERSION,
            "start": self._start,
            **{name: getattr(self, name) for name in own},
            "schedules": [schedule.to_config() for schedule in self.schedules],
            **self._engine.state_dict(),
        }
        raw = raw_values(self.model)
        return {**state, "raw": raw} if raw else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of an ``EMA``, averages of another library, or plain averaged weights.

        Averaging resumes with bitwise identical results. Schedule, ``update_every`` and
        ``update_after_step`` are those of the state, with a warning where they differ; precision
        and device stay. Supported are torch's ``AveragedModel``, timm's ``ModelEmaV3``, diffusers'
        ``EMAModel``, ema-pytorch, torch_ema and Lightning. An empty state starts anew, with a
        warning. A state from inside :meth:`applied` also loads its training weights into the model.
        An invalid or unknown state is a ValueError, and nothing is changed.
        """
        self._check_restored("load_state_dict", self.model)
        if not state_dict:
            warnings.warn("EMA: the state is empty, so averaging starts anew", stacklevel=2)
            self._module, self.step, self.n_averaged, self._start = None, 0, 0, None
            self._engine.reset()
            return
        loaded = ema_state.read(
            state_dict,
            self.model,
            schedules=self.schedules,
            update_every=self.update_every,
            update_after_step=self.update_after_step,
            on_nonfinite=self._engine.options.on_nonfinite,
        )
        with torch.inference_mode(False), torch.no_grad():
            named = NamedTensors(self.model)
            raw = [(named.tensor(name), value) for name, value in loaded.raw.items()]
            if loaded.start is None:
                self._engine.reset()
            else:
                self._engine.load(loaded, named)
            for tensor, value in raw:
                write(tensor, shards_of(value, tensor))
        self._module = None
        self.step, self._start, self.n_averaged = loaded.step, loaded.start, loaded.n_averaged
        self.schedules = loaded.schedules
        self.update_every, self.update_after_step = loaded.update_every, loaded.update_after_step
        if raw:
            text = "EMA: the state was saved inside applied(); its training weights are loaded"
            warnings.warn(f"{text} into the model", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        # Attached optimizers are not copied.
        detached: dict[str, Any] = {"_optimizers": [], "_handles": [], "_stepped": set()}
        return {**vars(self), **detached, "_module": None, "_raw": raw_values(self.model)}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        # There are training weights if the copy was made inside ``applied()``.
        raw: dict[str, Tensor] = state.pop("_raw")
        self.__dict__.update(state)
        _write(self.model, raw)


def _write(model: torch.nn.Module, values: Mapping[str, Tensor]) -> None:
    named = NamedTensors(model)
    for name, value in values.items():
        write(named.tensor(name), value)


def checked_count(name: str, value: int, least: int) -> int:
    """Return a number of steps, or raise TypeError or ValueError if it is not an int >= least."""
    if isinstance(cast("object", value), bool) or not isinstance(cast("object", value), int):
        raise TypeError(f"EMA: {name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"EMA: {name} must be {least} or more, got {value}")
    return value


def schedules_of(decay: Decays, schedule: Decay | Sequence[Decay] | None) -> list[Schedule]:
    """Return one schedule for each average that is asked for."""
    if schedule is not None and decay is not None:
        raise ValueError(f"EMA: give decay or schedule, not both: got {decay!r} and {schedule!r}")
    chosen = schedule if schedule is not None else DEFAULT_DECAY if decay is None else decay
    several: Sequence[Decay] = chosen if isinstance(chosen, Sequence) else (chosen,)
    if not several:
        raise ValueError("EMA: decay must not be an empty list")
    for one in several:
        if isinstance(one, (int, float)) and 0 < one < _LEAST_PLAUSIBLE:
            text = f"EMA: decay={one} keeps {one:.2%} of the average in each update. If that is a "
            warnings.warn(f"{text}momentum, pass decay={1 - one:g}.", stacklevel=3)
    return [as_schedule(one) for one in several]


publish("modkit", EMA)
