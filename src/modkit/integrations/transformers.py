"""``EMACallback`` for the Trainer of transformers; it needs ``transformers`` and ``accelerate``."""

import functools
import importlib
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import Self, Unpack

from modkit._messages import install_extra
from modkit._namespace import publish_all
from modkit.averaging.callback import (
    NO_AVERAGES,
    BlocksOfEvaluation,
    EMAOptions,
    Evaluation,
    average_of,
    check_options,
    check_outside,
    end_swap,
    swap_at_end,
    training_weights,
)
from modkit.averaging.ema import EMA
from modkit.averaging.optimizer_steps import check_optimizer
from modkit.averaging.options import check_choice
from modkit.averaging.schedules import Decays
from modkit.averaging.swap import any_swapped
from modkit.distributed import load_averages
from modkit.errors import shown
from modkit.files.atomic_write import remove_stale
from modkit.files.checkpoints import load_checkpoint, save_checkpoint


__all__ = ["EMACallback"]

FILE: Final = "ema.pt"
# The folder of torch.distributed.checkpoint in its place, if the model is sharded.
FOLDER: Final = "ema"
VERSION: Final = 1

# The entry of ``trainer_state.json`` that marks a model file as the average. Without that file a
# Trainer does not resume, so the entry cannot get lost as ``ema.pt`` can.
MARK: Final = "modkit.EMA"

# The flags of a Trainer whose ranks hold shards of the model, except FSDP2.
_REFUSED: Final = (
    "is_deepspeed_enabled",
    "is_fsdp_xla_enabled",
    "is_distributed_loading_by_transformers",
)


def _package() -> Any:
    try:
        # Transformers can be imported without accelerate, which only its Trainer needs.
        importlib.import_module("accelerate")
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "modkit.integrations.transformers needs transformers 5 or later and accelerate. "
            f"{install_extra('transformers')}",
            name=error.name,
        ) from error


# At import, since the base class of the callback is in it.
_hf = _package()
TrainerCallback: Any = _hf.TrainerCallback


class EMACallback(BlocksOfEvaluation[Any], TrainerCallback):
    """Averages a model that the Trainer of transformers trains; evaluates and saves the average.

    Each optimizer step updates the average: once per step with gradient accumulation, and not for
    steps that a gradient scaler skips. (Fused optimizers skip them on the device, which on
    accelerators is not seen: the Trainer and the average count them.) ``evaluate()`` and
    ``predict()`` see the average, in training and after it, and before the first update the
    training weights, which are restored even after an error. To evaluate several averages, or the
    training weights too, use :meth:`evaluating` and :meth:`evaluating_training_weights` around
    ``trainer.evaluate()``.

    ``save`` chooses the model file of a checkpoint, which loads without this callback. ``ema.pt``
    beside it holds the averages, and the training weights if the model file does not.
    ``train(resume_from_checkpoint=...)`` resumes bitwise identically; a ``train()`` that does not
    resume starts averaging anew. After ``load_best_model_at_end`` the averages are those of the
    best checkpoint.

    :meth:`attach` wraps the methods ``train``, ``evaluate``, ``predict``, ``evaluation_loop`` and
    ``save_model`` of one Trainer. Training with ``Trainer(callbacks=[EMACallback()])`` alone is
    refused, because the events of a callback do not suffice. None comes before an evaluation, so
    the average would have to be swapped in at ``on_step_end`` if ``control.should_evaluate``, and
    out at ``on_evaluate``. Then, silently:

    - An evaluation that raises, or Ctrl-C in it, has no ``on_evaluate``: the model keeps the
      average, and ``save_model()`` saves it as the training weights.
    - ``trainer.evaluate()``, ``predict()``, and an evaluation that a later callback requests, see
      the training weights.
    - Of a dict of evaluation sets, only the first is evaluated on the average.
    - No event comes before a checkpoint is saved, and none tells the folder that is resumed from,
      so the checkpoint holds the training weights, and ``load_best_model_at_end`` loads those whose
      average was the best.

    With FSDP2 (``fsdp_config={"version": 2}``) the averages are sharded as the model is, and a
    checkpoint has them in the folder ``ema``. The Trainer saves the training weights itself, and
    ``model.safetensors`` is the average if ``state_dict_type`` is ``FULL_STATE_DICT``; with
    ``SHARDED_STATE_DICT`` there is no such file, see
    :func:`~modkit.distributed.export_average`. FSDP1, DeepSpeed and tensor parallelism are refused.

    Args:
        decay: Constant decay factor of one optimizer step, in [0, 1]. A list gives several
            averages, numbered by ``index`` from 0. Default: the schedule ``CountWarmup(0.999)``.
        save: Content of ``model.safetensors``: ``"average"``, or ``"raw"`` for the training
            weights.
        index: Index of the average to evaluate, to save, and to end with.
        swap_to_average_at_end: If True, training ends with the average in the model;
            ``callback.ema.restore()`` restores the training weights.
        **options: Further keywords of :class:`~modkit.EMA`, such as ``schedule``, ``precision`` and
            ``buffers``.

    Raises:
        TypeError: If ``index`` is not an int, a decay is not a number, a schedule or a function, or
            an option is unknown or of another type.
        ValueError: If ``save`` or another option is invalid. Globs are compared with the names of
            the model when training starts.
        IndexError: If there is no average ``index``.
        RuntimeError: If torch does not know ``device``.

    Warns:
        UserWarning: If a constant decay is above 0 and below 0.1, as a momentum is.

    Attributes:
        ema: The :class:`~modkit.EMA` of the latest training, or None before it, and if the best
            checkpoint holds no averages.
        save: The option. Another value counts from the next checkpoint on.
        index: The option. Another index counts from the next evaluation or checkpoint on.
        swap_to_average_at_end: The option.

    Example::

        from modkit.integrations.transformers import EMACallback

        trainer = Trainer(model, args, train_dataset=data, eval_dataset=data)
        ema = EMACallback(decay=0.999).attach(trainer)
        trainer.train(resume_from_checkpoint=True)
        trainer.evaluate()
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
        self._decay = decay
        self._options = options
        self._evaluation = Evaluation()
        self._trainer: Any = None
        self._is_training = False
        # The folder of the checkpoint that train() resumes from.
        self._resumed: Path | None = None

    def attach(self, trainer: Any) -> Self:
        """Average the model of a Trainer, from its next ``train()`` on.

        The callback is added to the Trainer's callbacks, unless it is one of them. Attaching to the
        same Trainer again has no effect. ``trainer.remove_callback(callback)``, or attaching to
        another Trainer, ends averaging; the averages stay in ``ema``.

        Args:
            trainer: A ``transformers.Trainer``, or an instance of a class derived from it.

        Returns:
            This callback.

        Raises:
            TypeError: If ``trainer`` is not a ``transformers.Trainer``.
            ValueError: If the Trainer has another callback of this class.
        """
        if not isinstance(trainer, _hf.Trainer):
            raise TypeError(
                f"EMACallback.attach: {type(trainer).__name__} is not a transformers.Trainer"
            )
        callbacks: list[Any] = trainer.callback_handler.callbacks
        if any(isinstance(other, EMACallback) and other is not self for other in callbacks):
            raise ValueError("EMACallback: the Trainer has one already; pass it a list of decays")

        if self not in callbacks:
            trainer.callback_handler.add_callback(self)
        if self._trainer is not trainer:
            if self._trainer is not None:
                self._trainer.remove_callback(self)
            self._trainer = trainer
            self._wrap("train", self._training)
            for name in ("evaluate", "predict", "evaluation_loop"):
                self._wrap(name, self._averaged)
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

        # On this Trainer alone: others of its class are not averaged.
        setattr(trainer, name, call)

    def _before_evaluation(self) -> None:
        self._prepare_evaluation(self.ema)

    def _prepare_evaluation(self, ema: EMA[Any] | None) -> None:
        """Write to the model what the Trainer would write while an average is swapped in."""
        if ema is None:
            return
        trainer = self._trainer
        # Schedule-free optimizers change the weights here; a second call has no effect.
        if hasattr(trainer.optimizer, "eval"):
            trainer.optimizer.eval()
        args = trainer.args
        # The condition of Trainer.evaluation_loop(), which keeps the dtype of a model in training.
        if (args.fp16_full_eval or args.bf16_full_eval) and not trainer.is_in_train:
            dtype = torch.float16 if args.fp16_full_eval else torch.bfloat16
            trainer.model.to(dtype=dtype, device=args.device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start averaging, or resume with the averages and training weights of a checkpoint.

        The Trainer calls it.

        Args:
            args: Training arguments, not used.
            state: State of the Trainer, with the step that training starts at.
            control: Control of the Trainer, not used.
            kwargs: Objects of the Trainer by name, among them ``model`` and ``optimizer``.

        Raises:
            RuntimeError: If the callback is not attached to the Trainer that trains.
            TypeError: If the steps of the optimizer cannot be tracked.
            ValueError: If no parameter is selected, a glob other than ``"*"`` matches no name,
                ``ema.pt`` cannot be read, is of another step or of a later version, or is missing
                where the model file is the average.
            NameMismatchError: If the averages or training weights of the checkpoint do not fit the
                model, which then is as the Trainer has loaded it.
        """
        if not self._is_training:
            raise RuntimeError(
                "EMACallback: not attached to the Trainer, which passes itself to no callback. "
                "Call callback.attach(trainer) before train()"
            )

        # The last training may have ended with the average in its model, or begin anew with smaller
        # batches.
        end_swap(self.ema)
        if self.ema is not None:
            self.ema.detach()
        self.ema = None
        # Inside accelerate's optimizer: its hooks run only for steps that are taken.
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        check_optimizer("EMACallback", optimizer)
        ema = average_of(kwargs["model"], self._decay, self._options)

        folder = self._resumed
        step = state.global_step
        content = None if folder is None else _read(folder, step)
        if folder is not None and self._has_shards_in(folder):
            load_averages(ema, folder / FOLDER)
        elif content is not None:
            # In one state, as both have to fit the model before either is loaded.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "EMA: the state was saved inside", UserWarning)
                ema.load_state_dict({**content["ema"], "raw": content["raw"]})
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
        """Load the averages of the best model; copy the average into the model, if configured.

        The Trainer calls it, after it has loaded the best model.

        Args:
            args: Training arguments. With ``load_best_model_at_end``, the averages of the best
                model are loaded.
            state: State of the Trainer, with the path of the best checkpoint.
            control: Control of the Trainer, not used.
            kwargs: Objects of the Trainer by name, not used.

        Raises:
            ValueError: If ``ema.pt`` of the best checkpoint cannot be read, is of another step or
                of a later version.
            NameMismatchError: If those averages do not fit the model.
        """
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None and self.ema is not None:
            self.ema = self._averages_in(Path(best), state)
        if self.swap_to_average_at_end and self.ema is not None:
            swap_at_end(self.ema, self.index)

    def _averages_in(self, folder: Path, state: Any) -> EMA[Any] | None:
        """Return the averages of the best checkpoint, whose model the Trainer has loaded."""
        assert self.ema is not None
        is_sharded = self._has_shards_in(folder)
        content = None if is_sharded else _read(folder, state.best_global_step)
        if content is None and not is_sharded:
            # From now on the loaded model is evaluated as it is.
            if self.save == "raw" and state.is_world_process_zero:
                warnings.warn(
                    "EMACallback: the best checkpoint holds no averages, so its training weights "
                    "are used",
                    stacklevel=3,
                )
            return None

        ema = average_of(self.ema.model, self._decay, self._options)
        if content is None:
            load_averages(ema, folder / FOLDER)
        else:
            ema.load_state_dict(content["ema"])
        return ema

    def _has_shards_in(self, folder: Path) -> bool:
        """Return True if the Trainer shards its model, and a checkpoint has shards of averages."""
        return bool(self._trainer.is_fsdp_enabled) and (folder / FOLDER).is_dir()

    @contextmanager
    def _training(
        self, resume_from_checkpoint: Any = None, *args: object, **kwargs: object
    ) -> Generator[None]:
        """Average during ``Trainer.train()``, whose first argument no event gets."""
        is_refused = any(getattr(self._trainer, flag, False) for flag in _REFUSED)
        if self._trainer.is_fsdp_enabled:
            is_refused |= self._trainer.accelerator.state.fsdp_plugin.fsdp_version != 2
        if is_refused:
            raise NotImplementedError(
                "EMACallback: models that are sharded by FSDP1, DeepSpeed or tensor parallelism "
                "are not supported in the Trainer. FSDP2 is: fsdp_config={'version': 2}. In a "
                "hand-written loop modkit.EMA averages models of tensor parallelism, and of "
                "DeepSpeed ZeRO-1 and ZeRO-2; docs/distributed.md has recipes for FSDP1 and ZeRO-3"
            )
        check_outside(self._evaluation, self._trainer.model, "train()")

        folder = resume_from_checkpoint
        if folder is True:
            # If there is none, the Trainer raises an error.
            folder = _hf.trainer_utils.get_last_checkpoint(self._trainer.args.output_dir)
        self._is_training = True
        self._resumed = Path(folder) if folder else None
        try:
            yield
        finally:
            self._is_training = False
            self._resumed = None
            if self.ema is not None:
                # The averages stay; the optimizer may go on to train without them.
                self.ema.detach()

    @contextmanager
    def _averaged(self, *_: object, **__: object) -> Generator[None]:
        """Swap the average in for an evaluation, unless a block has chosen the weights."""
        model = self._trainer.model
        ema = self._averages_of(model)
        self._prepare_evaluation(ema)
        # predict() calls evaluation_loop(), and the user may evaluate inside ema.applied().
        chosen = bool(self._evaluation.blocks) or any_swapped(model)
        with nullcontext() if ema is None or chosen else ema.applied(index=self.index):
            yield

    @contextmanager
    def _saving(
        self, output_dir: Any = None, _internal_call: bool = False, *_: object, **__: object
    ) -> Generator[None]:
        """Save what ``save`` says, and the state of the averages beside it in a checkpoint."""
        trainer = self._trainer
        ema = self._averages_of(trainer.model)
        step = trainer.state.global_step
        if ema is None:
            yield
            return

        is_average = self.save == "average"
        if is_average and not _internal_call:
            ema._warn_of_first("EMACallback: save_model()", self.index)
        # Inside an evaluation the model holds the average.
        with ema.applied(index=self.index) if is_average else training_weights(ema, trainer.model):
            yield
            # A model that the user saves is not a checkpoint, and of a model that is not sharded
            # only one rank writes files.
            is_writer = trainer.args.should_save or trainer.is_fsdp_enabled
            if output_dir is None or not _internal_call or not is_writer:
                return

            # The Trainer writes its state after the model, so the mark is in this checkpoint.
            trainer.state.stateful_callbacks.pop(MARK, None)
            # Before the first update, the block has saved the training weights.
            if is_average and ema.n_averaged:
                trainer.state.stateful_callbacks[MARK] = _mark(step)
            if not trainer.args.save_only_model:
                state = ema.state_dict()
                raw = state.pop("raw", {})
                if trainer.is_fsdp_enabled:
                    # The Trainer saves the training weights by itself, after this block.
                    save({"ema": state}, checkpoint_id=Path(output_dir) / FOLDER)
                    return
                content = {
                    "ema": state,
                    # Otherwise the model file has them.
                    "raw": raw if is_average else {},
                    "version": VERSION,
                    "global_step": step,
                }
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
        return ema if any(id(parameter) in averaged for parameter in model.parameters()) else None


def _mark(step: int) -> dict[str, Any]:
    # A run without the callback copies the entry to its checkpoints, where the step is another one.
    return {"model": "average", "global_step": step}


def _read(folder: Path, step: int | None) -> dict[str, Any] | None:
    """Return the content of a checkpoint's ``ema.pt``, or None if there is no such file."""
    path = folder / FILE
    try:
        content: dict[str, Any] = load_checkpoint(path, map_location="cpu")
        version = content["version"]
        saved_step = content["global_step"]
    except FileNotFoundError:
        return None
    # Also a KeyError, if it is a file of another library.
    except Exception as error:
        message = (
            f"EMACallback: {path} cannot be read ({error}). The averages of this checkpoint are "
            "lost, and the training weights too if its model is the average. Resume from another "
            "checkpoint."
        )
        raise ValueError(shown(message)) from error

    if version > VERSION:
        message = f"EMACallback: {path} has version {version}, newer than {VERSION}"
        raise ValueError(shown(message))
    # The folder may be a copy, or the file may be left from an earlier run.
    if step not in (None, saved_step):
        message = f"EMACallback: {path} is of step {saved_step}, and the checkpoint of step {step}"
        raise ValueError(shown(message))
    return content


publish_all(globals())
