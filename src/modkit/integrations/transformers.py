"""``EMACallback`` for the Trainer of transformers; it needs the extra ``transformers``."""

import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from typing_extensions import Unpack

from modkit._errors import (
    MSG_BEST_WITHOUT_AVERAGES,
    MSG_NO_AVERAGES,
    MSG_NO_TRANSFORMERS,
    MSG_SHARDED_TRAINER,
    MSG_STATE_OF_ANOTHER_STEP,
    MSG_STATE_UNREADABLE,
    MSG_STEPS_UNKNOWN,
    MSG_TRAINER_UNKNOWN,
)
from modkit.averaging._members import Members
from modkit.averaging._options import DEFAULT_DECAY, Decay, checked_choice
from modkit.averaging._swap import any_swapped, exchanged, pairs_for, raw_values, write
from modkit.averaging.callback import EMAOptions, checked_index
from modkit.averaging.ema import EMA
from modkit.checkpoints import checksums, verify
from modkit.files.atomic_write import written_whole


__all__ = ["EMACallback", "EMATrainer"]

Saved: TypeAlias = Literal["average", "raw"]
TrainerT = TypeVar("TrainerT")

FILE = "ema.pt"
VERSION = 1

# What a Trainer calls the ways in which each process holds another part of the model.
_SHARDED = (
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
    "is_fsdp_xla_enabled",
    "is_distributed_loading_by_transformers",
)


def _package() -> Any:
    """Return transformers; to type checkers it may be anything."""
    try:
        importlib.import_module("accelerate")
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(MSG_NO_TRANSFORMERS, name=error.name) from error


_hf = _package()
Trainer: Any = _hf.Trainer
TrainerCallback: Any = _hf.TrainerCallback


class EMACallback(TrainerCallback):
    """Averages a model that the Trainer of transformers trains; evaluates and saves the average.

    Each step that the optimizer really takes updates the averages: gradient accumulation is counted
    right, and so are steps that a gradient scaler leaves out. (A fused optimizer leaves them out by
    itself, on the device; they count as steps, here as in the Trainer.) ``evaluate()`` and ``predict()`` see the
    average, called by the Trainer or by you, in training or after it; before the first update they
    see the raw weights. The raw weights are back afterwards, and after any error in them.

    A checkpoint holds what ``save`` says as its ``model.safetensors``, so that it loads without this
    callback. Beside it lies ``ema.pt`` with the averages, and with the raw weights where those are not
    the model; ``train(resume_from_checkpoint=...)`` goes on with both, bit for bit. After
    ``load_best_model_at_end`` the averages are those of the best checkpoint too. A ``train()``
    that does not resume begins to average anew.

    A Trainer does not tell its callbacks when an evaluation begins. So it becomes an
    :class:`EMATrainer` in place: the same object, whose class is derived from its own. Given as one
    of the ``callbacks`` of a Trainer, this is done by itself; a Trainer that is there already
    takes :meth:`attach`.

    Models that FSDP or DeepSpeed shard are refused.

    Args:
        decay: How much of the average stays in each step, or several of that.
        save: What ``model.safetensors`` holds: the ``"average"`` or the ``"raw"`` weights.
        index: Which average to evaluate and to save, where there are several.
        swap_to_average_at_end: Whether to copy the average into the model when training ends.
        **options: All other options of :class:`~modkit.averaging.ema.EMA`.

    Attributes:
        ema: The averages, once training has begun.

    Raises:
        TypeError, ValueError: An option makes no sense.

    Example::

        from modkit.integrations.transformers import EMACallback

        trainer = Trainer(model, args, train_dataset=data, callbacks=[EMACallback(decay=0.999)])
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(
        self,
        decay: float | Sequence[Decay] = DEFAULT_DECAY,
        *,
        save: Saved = "average",
        index: int = 0,
        swap_to_average_at_end: bool = False,
        **options: Unpack[EMAOptions],
    ) -> None:
        checked_choice("save", save, ("average", "raw"))
        # Options that make no sense are told now, and not when training starts.
        self.index = checked_index(index, EMA(torch.nn.Module(), decay, **options))
        self.save: Saved = save
        self.swap_to_average_at_end = swap_to_average_at_end
        self.ema: EMA[Any] | None = None
        self._decay = decay
        self._options = options
        self._is_training = False
        self._resumed: Path | None = None

    def attach(self, trainer: TrainerT) -> TrainerT:
        """Let a Trainer average its model, from its next ``train()`` on.

        Returns the Trainer.

        Raises:
            TypeError: It is no Trainer of transformers.
            ValueError: It has a callback of this kind already.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(f"EMACallback: {type(trainer).__name__} is no transformers.Trainer")
        found: Any = trainer
        others = [one for one in _callbacks_of(found) if one is not self]
        if others:
            raise ValueError("EMACallback: the Trainer has one already; it takes several decays")
        if not isinstance(found, EMATrainer):
            kind: Any = type(found)
            found.__class__ = _averaging(kind)
        if self not in found.callback_handler.callbacks:
            found.add_callback(self)
        return trainer

    # Events of the Trainer.

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the Trainer that is calling one that averages."""
        trainer = _caller(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start averaging, or go on with the averages and the raw weights of a checkpoint."""
        if not self._is_training:
            raise RuntimeError(MSG_TRAINER_UNKNOWN)
        self._leave()
        optimizer = _innermost(kwargs["optimizer"])
        ema = EMA(kwargs["model"], self._decay, **self._options)
        if self._resumed is not None:
            content = _read(self._resumed, state.global_step)
            if content is not None:
                _restore(ema, content)
            elif state.is_world_process_zero:
                warnings.warn(MSG_NO_AVERAGES, stacklevel=2)
        self.ema = ema.attach(optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go back to the averages of the best model, or copy them into the model, if asked to."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None and self.ema is not None:
            self.ema = self._averages_in(Path(best), state)
        if self.swap_to_average_at_end and self.ema is not None:
            self.ema.copy_to(index=self.index)

    def _averages_in(self, folder: Path, state: Any) -> EMA[Any] | None:
        """Return the averages of the best checkpoint, whose model the Trainer has loaded."""
        assert self.ema is not None
        content = _read(folder, state.best_global_step)
        if content is None:
            # What has been loaded is then evaluated as it is.
            if self.save == "raw" and state.is_world_process_zero:
                warnings.warn(MSG_BEST_WITHOUT_AVERAGES, stacklevel=3)
            return None
        ema = EMA(self.ema.model, self._decay, **self._options)
        ema.load_state_dict(content["ema"])
        return ema

    def _leave(self) -> None:
        if self.ema is not None:
            self.ema.detach()
        self.ema = None

    # What the Trainer asks for.

    def averages_of(self, model: torch.nn.Module) -> EMA[Any] | None:
        """Return the averages if they are those of this model, or of what it wraps."""
        ema = self.ema
        if ema is None or ema.model is model:
            return ema
        mine = set(map(id, ema.model.parameters()))
        return ema if any(id(one) in mine for one in model.parameters()) else None

    @contextmanager
    def training(self, resumed: str | os.PathLike[str] | None = None) -> Generator[None]:
        """Remember for the length of a ``train()`` which checkpoint it goes on from.

        Args:
            resumed: The folder of the checkpoint.
        """
        self._is_training = True
        self._resumed = None if resumed is None else Path(resumed)
        try:
            yield
        finally:
            self._is_training, self._resumed = False, None
            if self.ema is not None:
                self.ema.detach()

    @contextmanager
    def evaluating(self, model: torch.nn.Module) -> Generator[None]:
        """Put the average into the model for the length of a ``with`` block.

        A block inside another one changes nothing, nor does one around a model that has no
        parameter in common with the averaged one.
        """
        ema = self.averages_of(model)
        if ema is None or any_swapped(model):
            yield
            return
        with ema.applied(index=self.index):
            yield

    @contextmanager
    def saving(self, model: torch.nn.Module) -> Generator[None]:
        """Put what is to be saved into the model for the length of a ``with`` block."""
        ema = self.averages_of(model)
        if ema is None:
            block: Any = nullcontext()
        elif self.save == "average":
            block = ema.applied(index=self.index)
        else:
            # Inside an evaluation the model holds the average.
            block = exchanged(pairs_for(Members(model), raw_values(model)))
        with block:
            yield

    def write_state(self, folder: str | os.PathLike[str], step: int) -> None:
        """Write ``ema.pt`` into a checkpoint; call it inside :meth:`saving`.

        Args:
            folder: The folder of the checkpoint.
            step: The number of steps that the Trainer has taken.
        """
        assert self.ema is not None
        state = self.ema.state_dict()
        raw = state.pop("raw", {})
        content = {
            "version": VERSION,
            "global_step": step,
            "ema": state,
            "raw": raw if self.save == "average" else {},
        }
        with written_whole(Path(folder) / FILE) as unfinished, checksums():
            torch.save(content, unfinished)


class EMATrainer(Trainer):
    """The Trainer of transformers, with the calls that an :class:`EMACallback` has to know of.

    There is no need to name it: the callback makes any Trainer one. A class of one's own may have it as
    its first base.
    """

    @property
    def ema_callback(self) -> EMACallback | None:
        """The callback that averages, or None."""
        found = _callbacks_of(self)
        return found[0] if found else None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, and go on with the averages of a checkpoint."""
        callback = self.ema_callback
        if callback is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        if any(getattr(self, flag, False) for flag in _SHARDED):
            raise NotImplementedError(MSG_SHARDED_TRAINER)
        if resume_from_checkpoint is True:
            # If there is none, the Trainer says so.
            last = _hf.trainer_utils.get_last_checkpoint(self.args.output_dir)
            resume_from_checkpoint = True if last is None else last
        is_path = not isinstance(resume_from_checkpoint, bool)
        with callback.training(resume_from_checkpoint if is_path else None):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Generator[None]:
        callback = self.ema_callback
        if callback is None or callback.averages_of(self.model) is None:
            yield
            return
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            # The Trainer does so after this, when the model holds the average: too late.
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            self.model.to(dtype=dtype, device=self.args.device)
        with callback.evaluating(self.model):
            yield

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the average."""
        with self._evaluating():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the average."""
        with self._evaluating():
            return super().predict(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the loop that both have in common on the average."""
        with self._evaluating():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what the callback says, and in a checkpoint the state of the averages beside it."""
        callback = self.ema_callback
        if callback is None or callback.averages_of(self.model) is None:
            super().save_model(output_dir, _internal_call)
            return
        with callback.saving(self.model):
            super().save_model(output_dir, _internal_call)
            if output_dir is None or not _internal_call:
                return
            if self.args.should_save and not self.args.save_only_model:
                callback.write_state(output_dir, self.state.global_step)


@functools.cache
def _averaging(kind: Any) -> Any:
    """Return the class that a Trainer of this class gets; it bears the same name."""
    facts = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (EMATrainer, kind), facts)


def _callbacks_of(trainer: Any) -> list[EMACallback]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, EMACallback)]


def _caller(callback: EMACallback) -> Any:
    """Return the Trainer that is calling the callback, or None.

    An event carries all that a Trainer has, and not the Trainer.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found: Any = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    return None


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that tells of the steps that it really takes.

    That of accelerate wraps another one, and is called where no step is due as well.
    """
    accelerated = importlib.import_module("accelerate.optimizer").AcceleratedOptimizer
    while isinstance(optimizer, accelerated):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(MSG_STEPS_UNKNOWN.format(kind=type(optimizer).__name__))
    return optimizer


def _read(folder: Path, step: int | None) -> dict[str, Any] | None:
    """Return what the ``ema.pt`` of a checkpoint holds, or None if there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        verify(path)
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        version, found = content["version"], content["global_step"]
    except Exception as error:
        raise ValueError(MSG_STATE_UNREADABLE.format(path=path, error=error)) from error
    if version > VERSION:
        raise ValueError(f"EMACallback: {path} has version {version}, newer than {VERSION}")
    if step is not None and found != step:
        raise ValueError(MSG_STATE_OF_ANOTHER_STEP.format(path=path, found=found, step=step))
    return content


@torch.no_grad()
def _restore(ema: EMA[Any], content: dict[str, Any]) -> None:
    """Give averages their state, and their model its raw weights, if both fit."""
    pairs = pairs_for(Members(ema.model), content["raw"])
    ema.load_state_dict(content["ema"])
    for _, tensor, value in pairs:
        write(tensor, value)
