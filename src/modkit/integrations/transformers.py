"""``EMACallback`` for the Trainer of transformers; it needs ``transformers`` and ``accelerate``."""

import functools
import importlib
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal

import torch
from typing_extensions import Self, Unpack

from modkit._messages import install_extra
from modkit._namespace import publish_all
from modkit.averaging.callback import (
    NO_AVERAGES,
    EMAOptions,
    check_options,
    end_swap,
    swap_at_end,
    training_weights,
)
from modkit.averaging.ema import EMA
from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.optimizer_steps import check_optimizer
from modkit.averaging.options import check_choice
from modkit.averaging.schedules import Decays
from modkit.averaging.swap import any_swapped, pairs_for, write
from modkit.errors import shown
from modkit.files.atomic_write import remove_stale
from modkit.files.torch_files import load_checkpoint, save_checkpoint


__all__ = ["EMACallback"]

FILE: Final = "ema.pt"
VERSION: Final = 1

# The entry of ``trainer_state.json`` that marks a model file as the average. Without that file a
# Trainer does not resume, so the entry cannot get lost as ``ema.pt`` can.
MARK: Final = "modkit.EMA"

# The flags of a Trainer whose ranks hold shards of the model.
_SHARDED: Final = (
    *("is_deepspeed_enabled", "is_fsdp_enabled", "is_fsdp_xla_enabled"),
    "is_distributed_loading_by_transformers",
)


def _package() -> Any:
    try:
        importlib.import_module("accelerate")
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "modkit.integrations.transformers needs transformers 5 or later and accelerate. "
            + install_extra("transformers"),
            name=error.name,
        ) from error


_hf = _package()
TrainerCallback: Any = _hf.TrainerCallback


class EMACallback(TrainerCallback):
    """Averages a model that the Trainer of transformers trains; evaluates and saves the average.

    Each optimizer step updates the average. (Steps that a gradient scaler skips do not count, except in
    fused optimizers on accelerators, which skip them on the device.) ``evaluate()`` and ``predict()`` see the average,
    and before the first update the training weights, which are restored even after an error.

    A checkpoint loads without this callback. ``ema.pt`` beside the model holds the averages, and the
    training weights if the model file does not. ``train(resume_from_checkpoint=...)`` resumes bitwise
    identically. After ``load_best_model_at_end`` the averages are those of the best checkpoint.

    :meth:`attach` wraps the methods ``train``, ``evaluate``, ``predict``, ``evaluation_loop`` and
    ``save_model`` of one Trainer, because callbacks are not notified when an evaluation begins.
    Training without it is refused, and so is a model that FSDP or DeepSpeed shards.

    Args:
        decay: Decay factor, or a list of them for several averages.
        save: Content of ``model.safetensors``: ``"average"``, or ``"raw"`` for the training weights.
        index: Index of the average to evaluate and to save.
        swap_to_average_at_end: If True, training ends with the average in the model;
            ``callback.ema.restore()`` restores the training weights.
        **options: Further options of :class:`~modkit.EMA`.

    Attributes:
        ema: The :class:`~modkit.EMA` of the latest training, or None.

    Example::

        ema = EMACallback(decay=0.999).attach(trainer)
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(
        self,
        decay: Decays = None,
        *,
        save: Literal["average", "raw"] = "average",
        index: int = 0,
        swap_to_average_at_end: bool = False,
        **options: Unpack[EMAOptions],
    ) -> None:
        check_choice("EMACallback", "save", save, ("average", "raw"))
        check_options(decay, index, options)
        self.save = save
        self.index = index
        self.swap_to_average_at_end = swap_to_average_at_end
        self.ema: EMA[Any] | None = None
        self._decay, self._options = decay, options
        self._trainer: Any = None
        self._is_training = False
        self._resumed: Path | None = None

    def attach(self, trainer: Any) -> Self:
        """Average the model of a Trainer, from its next ``train()`` on, and return this callback.

        ``trainer.remove_callback(callback)``, or attaching to another Trainer, ends averaging; the
        averages stay in ``ema``.

        Raises:
            TypeError: If ``trainer`` is not a ``transformers.Trainer``.
            ValueError: If the Trainer has another callback of this class.
        """
        if not isinstance(trainer, _hf.Trainer):
            kind = type(trainer).__name__
            raise TypeError(f"EMACallback.attach: {kind} is not a transformers.Trainer")
        found: Any = trainer
        callbacks: list[Any] = found.callback_handler.callbacks
        if any(isinstance(one, EMACallback) and one is not self for one in callbacks):
            raise ValueError("EMACallback: the Trainer has one already; pass it a list of decays")
        if self not in callbacks:
            found.callback_handler.add_callback(self)
        if self._trainer is not found:
            if self._trainer is not None:
                self._trainer.remove_callback(self)
            self._trainer = found
            self._wrap("train", self._training)
            for name in ("evaluate", "predict", "evaluation_loop"):
                self._wrap(name, self._evaluating)
            self._wrap("save_model", self._saving)
        return self

    def _wrap(self, name: str, block: Callable[..., AbstractContextManager[None]]) -> None:
        """Run a method of the Trainer inside a block that gets its arguments."""
        trainer = self._trainer
        inner = getattr(trainer, name)

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            # The callback may have been removed, or attached to another Trainer.
            if self._trainer is not trainer or self not in trainer.callback_handler.callbacks:
                return inner(*args, **kwargs)
            with block(*args, **kwargs):
                return inner(*args, **kwargs)

        setattr(trainer, name, call)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start averaging, or resume with the averages and training weights of a checkpoint."""
        if not self._is_training:
            raise RuntimeError(
                "EMACallback: not attached to the Trainer, which passes itself to no callback. Call "
                "callback.attach(trainer) before train()"
            )
        # The last training may have ended with the average in its model.
        end_swap(self.ema)
        self.ema = None
        # Inside accelerate's optimizer: its hooks run only for steps that are taken.
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        check_optimizer("EMACallback", optimizer)
        ema = EMA(kwargs["model"], self._decay, **self._options)
        folder, step = self._resumed, state.global_step
        content = None if folder is None else _read(folder, step)
        if content is not None:
            # Both have to fit the model before either is loaded.
            pairs = pairs_for(NamedTensors(ema.model), content["raw"])
            ema.load_state_dict(content["ema"])
            with torch.no_grad():
                for _, tensor, value in pairs:
                    write(tensor, value)
        elif folder is not None and state.stateful_callbacks.get(MARK) == _mark(step):
            raise ValueError(
                f"EMACallback: the model in {folder} is the average, and {FILE} with the training "
                "weights is missing, so training cannot resume. Restore the file or resume from "
                "another checkpoint. To train the average, load it with from_pretrained()"
            )
        elif folder is not None and state.is_world_process_zero:
            warnings.warn(NO_AVERAGES, stacklevel=2)
        self.ema = ema.attach(optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the averages of the best model; copy the average into the model, if configured."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None and self.ema is not None:
            self.ema = self._averages_in(Path(best), state)
        if self.swap_to_average_at_end and self.ema is not None:
            swap_at_end(self.ema, self.index)

    def _averages_in(self, folder: Path, state: Any) -> EMA[Any] | None:
        assert self.ema is not None
        content = _read(folder, state.best_global_step)
        if content is None:
            # From now on the loaded model is evaluated as it is.
            if self.save == "raw" and state.is_world_process_zero:
                message = "the best checkpoint holds no averages, so its training weights are used"
                warnings.warn(f"EMACallback: {message}", stacklevel=3)
            return None
        ema = EMA(self.ema.model, self._decay, **self._options)
        ema.load_state_dict(content["ema"])
        return ema

    @contextmanager
    def _training(
        self, resume_from_checkpoint: Any = None, *args: object, **kwargs: object
    ) -> Generator[None]:
        if any(getattr(self._trainer, flag, False) for flag in _SHARDED):
            raise NotImplementedError(
                "EMACallback: models that are sharded (FSDP, DeepSpeed, tensor parallel) are not "
                "supported in the Trainer; use modkit.EMA in a hand-written loop"
            )
        folder = resume_from_checkpoint
        if folder is True:
            # If there is none, the Trainer raises an error.
            folder = _hf.trainer_utils.get_last_checkpoint(self._trainer.args.output_dir)
        self._is_training, self._resumed = True, Path(folder) if folder else None
        try:
            yield
        finally:
            self._is_training, self._resumed = False, None
            if self.ema is not None:
                self.ema.detach()

    @contextmanager
    def _evaluating(self, *_: object, **__: object) -> Generator[None]:
        trainer = self._trainer
        ema, args = self._averages_of(trainer.model), trainer.args
        narrow = (args.fp16_full_eval or args.bf16_full_eval) and not trainer.is_in_train
        if ema is not None and narrow:
            # The Trainer would cast the model inside the block, while the average is swapped in.
            dtype = torch.float16 if args.fp16_full_eval else torch.bfloat16
            trainer.model.to(dtype=dtype, device=args.device)
        # predict() calls evaluation_loop(), and the user may evaluate inside ema.applied().
        block = None if ema is None or any_swapped(trainer.model) else ema.applied(index=self.index)
        with block or nullcontext():
            yield

    @contextmanager
    def _saving(
        self, output_dir: Any = None, _internal_call: bool = False, *_: object, **__: object
    ) -> Generator[None]:
        trainer = self._trainer
        ema, step = self._averages_of(trainer.model), trainer.state.global_step
        if ema is None:
            yield
            return
        is_average = self.save == "average"
        # Inside an evaluation the model holds the average.
        with ema.applied(index=self.index) if is_average else training_weights(ema, trainer.model):
            yield
            if output_dir is None or not _internal_call or not trainer.args.should_save:
                return
            trainer.state.stateful_callbacks.pop(MARK, None)
            if is_average and ema.n_averaged:
                trainer.state.stateful_callbacks[MARK] = _mark(step)
            if not trainer.args.save_only_model:
                state = ema.state_dict()
                raw = state.pop("raw", {})
                content = {"ema": state, "raw": raw if is_average else {}}
                content |= {"version": VERSION, "global_step": step}
                folder = Path(output_dir)
                # Each checkpoint has a folder of its own, which a killed process leaves for good.
                for other in folder.parent.glob(f"{_hf.trainer_utils.PREFIX_CHECKPOINT_DIR}-*/"):
                    remove_stale(other)
                save_checkpoint(content, folder / FILE)

    def _averages_of(self, model: torch.nn.Module) -> EMA[Any] | None:
        """Return the averages if they belong to this model, or to a model that it wraps."""
        ema = self.ema
        if ema is None or ema.model is model:
            return ema
        averaged = set(map(id, ema.model.parameters()))
        return ema if any(id(one) in averaged for one in model.parameters()) else None


def _mark(step: int) -> dict[str, Any]:
    # A run without the callback copies the entry to its checkpoints, where the step is another one.
    return {"model": "average", "global_step": step}


def _read(folder: Path, step: int | None) -> dict[str, Any] | None:
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = load_checkpoint(path, map_location="cpu")
        version, found = content["version"], content["global_step"]
    except Exception as error:
        text = (
            f"EMACallback: {path} cannot be read ({error}). The averages of this checkpoint are lost, "
            "and the training weights too if its model is the average. Resume from another checkpoint."
        )
        raise ValueError(shown(text)) from error
    if version > VERSION:
        text = f"EMACallback: {path} has version {version}, newer than {VERSION}"
        raise ValueError(shown(text))
    if step not in (None, found):
        text = f"{path} is of step {found}, and the checkpoint of step {step}"
        raise ValueError(shown(f"EMACallback: {text}"))
    return content


publish_all(globals())
