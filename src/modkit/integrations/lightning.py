"""``EMACallback`` for Lightning's Trainer; it needs ``lightning`` or ``pytorch_lightning``."""

import copy
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import Unpack

from modkit._messages import install_extra
from modkit._namespace import publish_all
from modkit._upstream import RemovableHandle
from modkit.averaging.callback import (
    NO_AVERAGES,
    EMAOptions,
    Evaluation,
    HooksOfEvaluation,
    average_of,
    check_options,
    check_outside,
    end_swap,
    swap_at_end,
    training_weights,
)
from modkit.averaging.ema import EMA
from modkit.averaging.optimizer_steps import check_optimizer, trains_any
from modkit.averaging.schedules import Decays
from modkit.averaging.sharding import MSG_FLATTENED, has_shards
from modkit.distributed import FullState, load_averages
from modkit.files.atomic_write import remove_stale
from modkit.files.checkpoints import verify_checksums, write_checkpoint


__all__ = ["EMACallback"]

# The folder of averages in a distributed checkpoint, which is a folder too.
FOLDER: Final = "ema"


def _package() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        # Not by trying to import, so that an error inside of Lightning is shown as it is.
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise ModuleNotFoundError(
        f"modkit.integrations.lightning needs Lightning 2.6 or later. {install_extra('lightning')}",
        name="lightning",
    )


_pl = _package()
Callback: Any = _pl.Callback
CheckpointIO: Any = _pl.plugins.CheckpointIO


class EMACallback(HooksOfEvaluation[Any], Callback):
    """Averages a model that Lightning trains; evaluates and saves the average.

    The average is updated after each batch in which an optimizer stepped on an averaged parameter:
    once per step with gradient accumulation, at most once per batch with several optimizers or
    manual optimization, and not for steps that a gradient scaler skips. (Fused optimizers skip them
    on the device, which on accelerators is not seen.) Override :meth:`should_update` to update on
    other steps or at the end of epochs.

    Validation, test and prediction see the average, and before the first update the training
    weights; weights loaded for an evaluation are evaluated as they are. To evaluate several
    averages, or the training weights too, use :meth:`evaluating` and
    :meth:`evaluating_training_weights` in ``validation_step``, or around ``trainer.validate()``.

    The ``state_dict`` of a checkpoint is the average, so it loads without this callback. The
    checkpoint also holds the training weights and the state of the averages, so
    ``fit(ckpt_path=...)`` resumes bitwise identically. Checkpoints of Lightning's
    ``WeightAveraging`` can be resumed from too. Checkpoints are written atomically, and verified
    when they are loaded.

    Args:
        decay: Constant decay factor of one update, in [0, 1]. A list gives several averages,
            numbered by ``index`` from 0. Default: the schedule ``CountWarmup(0.999)``.
        index: Index of the average to evaluate, to save as the ``state_dict``, and to end with.
        swap_to_average_at_end: If True, ``fit`` ends with the average in the model;
            ``callback.ema.restore()`` restores the training weights.
        **options: Further keywords of :class:`~modkit.EMA`, such as ``schedule``, ``precision`` and
            ``buffers``.

    Raises:
        TypeError: If ``index`` is not an int, a decay is not a number, a schedule or a function, or
            an option is unknown or of another type.
        ValueError: If an option is invalid. Globs are compared with the names of the model when the
            fit starts.
        IndexError: If there is no average ``index``.
        RuntimeError: If torch does not know ``device``.

    Warns:
        UserWarning: If a constant decay is above 0 and below 0.1, as a momentum is.

    Attributes:
        ema: The :class:`~modkit.EMA` of the latest fit, or None before it, and after an evaluation
            of other weights by ``ckpt_path``.
        index: The option. Another index counts from the next evaluation or checkpoint on.
        swap_to_average_at_end: The option.

    Example::

        from modkit.integrations.lightning import EMACallback

        trainer = Trainer(callbacks=[EMACallback(decay=0.999)])
        trainer.fit(model, train_loader, val_loader)
        trainer.save_checkpoint("last.ckpt")
        averaged = Net.load_from_checkpoint("last.ckpt")
    """

    def __init__(
        self,
        decay: Decays = None,
        *,
        index: int = 0,
        swap_to_average_at_end: bool = False,
        **options: Unpack[EMAOptions],
    ) -> None:
        check_options(decay, index, options)
        self.index = index
        self.swap_to_average_at_end = swap_to_average_at_end

        self.ema: EMA[Any] | None = None
        self._decay = decay
        self._options = options
        self._evaluation = Evaluation()
        # The state of the averages in a checkpoint, until the fit starts.
        self._loaded: Mapping[str, Any] | Path | None = None
        self._handles: list[RemovableHandle] = []
        self._fitting = self._training = False
        # The path of the latest checkpoint of this fit or evaluation, which a tuner restores, and
        # whether the average was swapped in when it began to do so.
        self._saved: Any = None
        self._interrupted = False
        # Indices of the latest step that was taken and not yet shown to should_update(), and of the
        # latest epoch that was.
        self._latest_step: int | None = None
        self._latest_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True to update the average now. Override it to update on other steps or epochs.

        It is called once for each optimizer step, after its batch, and once at the end of each
        training epoch. Arguments are those of Lightning's ``WeightAveraging.should_update``:
        exactly one of them is given.

        Args:
            step_idx: Zero-based index of the latest optimizer step, or None.
            epoch_idx: Zero-based index of the training epoch that ends, or None.

        Returns:
            True for each optimizer step, and False for an epoch.

        Example::

            class EpochAverage(EMACallback):
                def should_update(self, step_idx=None, epoch_idx=None):
                    return epoch_idx is not None and epoch_idx >= 10
        """
        return step_idx is not None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reset what an interrupted run has left, and wrap the checkpoint plugin.

        Lightning calls it.

        Args:
            trainer: Trainer that calls the hook.
            pl_module: Model of the trainer.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            RuntimeError: If ``fit()`` was called inside :meth:`evaluating` or ``EMA.applied()``.
        """
        self._leave()
        if stage == "fit":
            check_outside(self._evaluation, pl_module, "fit()")
            if trainer.is_global_zero:
                _remove_stale_of_runs(trainer)
        self._loaded = self._saved = None
        self._latest_epoch = -1
        trainer.strategy.checkpoint_io = _CheckpointIO(trainer, self)
        if _saves_shards(trainer):
            # It does not use the plugin.
            self._wrap_save(trainer.strategy)

    def _wrap_save(self, strategy: Any) -> None:
        """Save the averages beside the shards of a checkpoint."""
        save_checkpoint = functools.partial(type(strategy).save_checkpoint, strategy)

        @functools.wraps(save_checkpoint)
        def save_both(
            checkpoint: dict[str, Any], filepath: Any, *args: Any, **options: Any
        ) -> None:
            save_checkpoint(checkpoint, filepath, *args, **options)
            self._saved = filepath
            if self.ema is not None and self.state_key in checkpoint.get("callbacks", ()):
                folder = Path(strategy.broadcast(filepath), FOLDER)
                # In the block the state has the training weights, in place of which the checkpoint
                # has the average.
                with torch.inference_mode(False), self.ema.applied(index=self.index):
                    save({"ema": self.ema.state_dict()}, checkpoint_id=folder)

        strategy.save_checkpoint = save_both

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start or resume averaging, with the model on its device and sharded. Lightning calls it.

        A further fit of the same model continues its averages; that of another model starts anew.

        Args:
            trainer: Trainer that calls the hook.
            pl_module: Model of the trainer; its parameters are averaged.

        Raises:
            TypeError: If the strategy is ``FSDPStrategy``, or the steps of an optimizer cannot be
                tracked.
            ValueError: If no parameter is selected, a glob other than ``"*"`` matches no name, or
                the averages of a checkpoint are invalid.
            NameMismatchError: If the averages of a checkpoint do not fit the model.
        """
        if isinstance(trainer.strategy, _pl.strategies.FSDPStrategy):
            raise TypeError(
                f"EMACallback: FSDPStrategy is not supported: {MSG_FLATTENED}, in a "
                "ModelParallelStrategy."
            )
        callbacks = trainer.checkpoint_callbacks
        saves_weights_only = any(getattr(c, "save_weights_only", False) for c in callbacks)
        if saves_weights_only and has_shards(pl_module):
            _pl.utilities.rank_zero_warn(
                "EMACallback: checkpoints with save_weights_only=True hold the training weights of "
                "a sharded model, because Lightning calls no callback"
            )

        self._leave()
        # The last fit may have ended with the average in its model.
        end_swap(self.ema)
        if self.ema is None or self.ema.model is not pl_module:
            self.ema = average_of(pl_module, self._decay, self._options)
        if self._loaded is not None:
            self._load(self.ema, self._loaded)
            self._loaded = None

        self._fitting = True
        for optimizer in trainer.optimizers:
            self._watch(check_optimizer("EMACallback", optimizer), self.ema, trainer)

    def _load(self, ema: EMA[Any], loaded: Mapping[str, Any] | Path) -> None:
        """Load averages, and training weights that are saved with them."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "EMA: the state was saved inside", UserWarning)
            if isinstance(loaded, Path):
                load_averages(ema, loaded)
            else:
                ema.load_state_dict(loaded)

    def _watch(self, optimizer: torch.optim.Optimizer, ema: EMA[Any], trainer: Any) -> None:
        """Record the steps of an optimizer that has averaged parameters."""
        averaged: set[int] = set()

        def after(*_: object) -> None:
            if self._training and not trains_any(optimizer, averaged):
                # The model or the optimizer may have got new parameters.
                averaged.update(map(id, ema._engine.averaged_parameters()))
            if self._training and trains_any(optimizer, averaged):
                # Lightning counts the step only after this hook.
                self._latest_step = trainer.global_step

        # After an error that the user caught in an evaluation, the average is still swapped in.
        before = optimizer.register_step_pre_hook(lambda _, _args, _kwargs: self._evaluation.end())
        self._handles += [before, optimizer.register_step_post_hook(after)]

    def _update(self) -> None:
        """Update the average for the latest step, unless that has been done."""
        step = self._latest_step
        self._latest_step = None
        if step is None or self.ema is None:
            return
        if self.should_update(step_idx=step):
            self.ema.update()
        else:
            # The update was not forgotten, of which EMA would warn.
            self.ema._writes = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Track steps from here on; loading an optimizer's state may take a step before.

        Lightning calls it.
        """
        self._training = True

    def on_train_batch_end(self, *_: Any) -> None:
        """Update the average, if an optimizer stepped and :meth:`should_update` returns True.

        Lightning calls it.

        Raises:
            NameMismatchError: If names or shapes of the model have changed since the last update.
            RuntimeError: If the model holds an average, a parameter has no values yet or cannot be
                averaged, or, with ``on_nonfinite="raise"``, is not finite.
            ValueError: If a schedule returns a decay outside of [0, 1]; in the first update also if
                ``trainable_only=True`` and no parameter requires gradients.
        """
        self._update()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Update the average, if :meth:`should_update` returns True for this epoch.

        Lightning calls it.

        Args:
            trainer: Trainer that calls the hook.
            pl_module: Model of the trainer, not used.

        Raises:
            NameMismatchError: If names or shapes of the model have changed since the last update.
            RuntimeError, ValueError: As in :meth:`on_train_batch_end`.
        """
        epoch = trainer.fit_loop.epoch_progress.current
        # Lightning counts an epoch as processed before on_train_epoch_end(), as completed after it.
        if epoch.completed > self._latest_epoch and epoch.processed > epoch.completed:
            self._latest_epoch = epoch.completed
            if self.ema is not None and self.should_update(epoch_idx=epoch.completed):
                self.ema.update()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Copy the average into the model, if ``swap_to_average_at_end=True``. Lightning calls it.

        Args:
            trainer: Trainer that calls the hook, not used.
            pl_module: Model of the trainer, not used.

        Raises:
            RuntimeError: If the model holds an average inside ``EMA.applied()``.
            NameMismatchError: If names or shapes of the model have changed since the last update.
        """
        self._leave()
        if self.swap_to_average_at_end and self.ema is not None:
            swap_at_end(self.ema, self.index)

    def _leave(self) -> None:
        """Forget a fit or an evaluation, which may have been left by an error."""
        self._evaluation.end()
        self._fitting = self._training = False
        self._latest_step = None
        while self._handles:
            self._handles.pop().remove()

    def _before_evaluation(self) -> None:
        self._update()

    def _evaluated(self, *args: Any) -> EMA[Any] | None:
        """Return the averages of the model, unless Lightning has loaded others to evaluate."""
        ema = self._ema_of(*args)
        if ema is not None:
            self._update()
        return ema

    def _ema_of(self, trainer: Any, pl_module: Any) -> EMA[Any] | None:
        """Return the averages of the weights that a model has, if there are any."""
        if self.ema is None or self.ema.model is not pl_module:
            return None
        if trainer.state.fn != "fit" and trainer.ckpt_path not in (None, self._saved):
            # These weights were loaded to be evaluated; the averages belong to other weights.
            self.ema = None
        return self.ema

    def _is_restored(self, trainer: Any) -> bool:
        """Return True if a tuner restores what it has saved, outside of the training."""
        return not self._fitting and self._saved is not None and trainer.ckpt_path == self._saved

    def _before_restore(self) -> None:
        """Take the average out of the model, into which a tuner is about to load what it saved."""
        self._interrupted = self._evaluation.swap is not None
        self._evaluation.end()
        end_swap(self.ema)

    def state_dict(self) -> dict[str, Any]:
        """Update for the latest step; :meth:`on_save_checkpoint` adds the state of the averages.

        Lightning calls it.

        Returns:
            An empty dict.

        Raises:
            NameMismatchError: If names or shapes of the model have changed since the last update.
            RuntimeError, ValueError: As in :meth:`on_train_batch_end`.
        """
        self._update()
        return {}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the average as the ``state_dict``, the training weights and the averages beside it.

        Lightning calls it. The entry of the callback holds the state of ``EMA``, those training
        weights that differ from the average, and the index of the latest epoch. With sharded
        parameters it is a collective, and the entry is gathered on rank 0; a distributed checkpoint
        has the averages, and the training weights, shard by shard in its folder ``ema``.

        Args:
            trainer: The Trainer.
            pl_module: The model; if it is not the averaged one, nothing is changed.
            checkpoint: The checkpoint, which is modified.

        Raises:
            IndexError: If ``index`` was set to one that no average has.
            NameMismatchError: If names or shapes of the model have changed since the last update.
            RuntimeError, ValueError: As in :meth:`on_train_batch_end`.
        """
        ema = self._ema_of(trainer, pl_module)
        if ema is None:
            return

        # Lightning may have made an optimizer take a step of length zero, to have a state to save.
        self._latest_step = None
        # Another callback may save at the end of an epoch before this one is called.
        EMACallback.on_train_epoch_end(self, trainer, pl_module)
        average = self.members_of(trainer, checkpoint)
        if _saves_shards(trainer):
            state = raw = None
        elif has_shards(pl_module):
            # In the block the state has the training weights.
            with torch.inference_mode(False), ema.applied(index=self.index):
                state = FullState(ema).state_dict()
            raw = state.pop("raw", {})
        else:
            state = ema.state_dict()
            # The training weights are saved beside it, under the names of Lightning's state dict.
            state.pop("raw", None)
            raw = self.members_of(trainer, checkpoint, training_weights(ema, pl_module))
            # Values that are not averaged are in the file once.
            for name, value in average.items():
                if _memory(raw[name]) == _memory(value):
                    del raw[name]

        # A copy, which keeps the versions of modules that torch reads from an attribute.
        checkpoint["state_dict"] = copy.copy(checkpoint["state_dict"])
        checkpoint["state_dict"].update(average)
        entry = {"ema": state, "raw": raw, "latest_epoch": self._latest_epoch}
        checkpoint["callbacks"][self.state_key] = entry

    def members_of(
        self,
        trainer: Any,
        saved: Mapping[str, Any],
        block: AbstractContextManager[None] | None = None,
    ) -> dict[str, Any]:
        """Return the members of a checkpoint's ``state_dict`` with other weights swapped in.

        Args:
            trainer: The Trainer, whose strategy returns the members.
            saved: The checkpoint; members that its ``state_dict`` lacks are left out.
            block: Context manager that swaps weights into the model. Default: the average
                ``index``.

        Returns:
            The members by name, not copied.

        Raises:
            IndexError: If ``index`` was set to one that no average has.
            NameMismatchError: If names or shapes of the model have changed since the last update.
        """
        assert self.ema is not None
        block = block or self.ema.applied(index=self.index)
        with torch.inference_mode(False), torch.no_grad(), block:
            members = trainer.strategy.lightning_module_state_dict()
        return {name: value for name, value in members.items() if name in saved["state_dict"]}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load the training weights into the model; the averages are loaded when the fit starts.

        Lightning calls it. Only a fit loads them; an evaluation sees the average, which is the
        ``state_dict``. A checkpoint of Lightning's ``WeightAveraging`` is loaded as well, and one
        without averages starts averaging anew, with a warning. What ``on_load_checkpoint()`` of the
        module has changed in ``state_dict`` does not reach the training weights in the entry.

        Args:
            trainer: The Trainer.
            pl_module: The model.
            checkpoint: The checkpoint. Its entry of this callback is removed, because Lightning
                would copy it for ``load_state_dict()``.

        Raises:
            RuntimeError: If the training weights do not fit the model, in Lightning's words.
        """
        # A tuner removes all callbacks while it runs, so the averages are as they were.
        by_tuner = self._is_restored(trainer)
        if trainer.state.fn != "fit" and not by_tuner:
            return

        # Lightning would deepcopy the entry for load_state_dict().
        saved = checkpoint["callbacks"].pop(self.state_key, None)
        raw = {} if saved is None else saved["raw"] or {}
        is_sharded = has_shards(pl_module)
        loaded = None if saved is None else saved["ema"] or Path(trainer.ckpt_path, FOLDER)
        if is_sharded and isinstance(loaded, dict):
            loaded["raw"] = raw
        if not by_tuner:
            self.ema = None
            if saved is not None:
                self._loaded = loaded
                self._latest_epoch = saved.get("latest_epoch", -1)
            elif {"current_model_state", "averaging_state"} <= checkpoint.keys():
                # It is a checkpoint of WeightAveraging.
                raw = checkpoint["current_model_state"]
                keys = ("averaging_state", "state_dict", "global_step")
                self._loaded = {key: checkpoint[key] for key in keys if key in checkpoint}
            else:
                _pl.utilities.rank_zero_warn(NO_AVERAGES)

        if is_sharded and by_tuner and self.ema is not None and loaded is not None:
            self._load(self.ema, loaded)
        elif is_sharded and saved is None:
            options = StateDictOptions(full_state_dict=True, strict=False)
            set_model_state_dict(pl_module, dict(raw), options=options)
        elif not is_sharded:
            loaded = {**checkpoint, "state_dict": copy.copy(checkpoint["state_dict"])}
            loaded["state_dict"].update(raw)
            trainer.strategy.load_model_state_dict(loaded, strict=pl_module.strict_loading)
        if self._fitting:
            # Strategies for sharded models load a checkpoint after on_fit_start(), and a tuner that
            # runs at the start of an epoch after on_train_start().
            is_training = self._training
            self.on_fit_start(trainer, pl_module)
            self._training = is_training
        if by_tuner and self._interrupted and self.ema is not None:
            self._evaluation.start(self.ema, self.index)


def _remove_stale_of_runs(trainer: Any) -> None:
    """Remove what killed runs of the same logger left in the folders of their checkpoints.

    ``ModelCheckpoint`` saves to a folder per run, named by the first logger. No later run saves to
    it, and saving is what removes it elsewhere.
    """
    for logger in trainer.loggers[:1]:
        runs = Path(logger.save_dir or trainer.default_root_dir, str(logger.name))
        for folder in runs.glob("*/checkpoints/"):
            remove_stale(folder)


def _saves_shards(trainer: Any) -> bool:
    """Return True if a checkpoint of the strategy is a folder, to which each rank writes."""
    return bool(getattr(trainer.strategy, "_save_distributed_checkpoint", False))


def _memory(value: Any) -> int:
    """Return what tells values apart: the address of a tensor, the ``id`` of anything else."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else id(value)


class _CheckpointIO(CheckpointIO):
    """Wraps a strategy's plugin: atomic writes, verified loads, averages in weights-only files.

    Lightning calls no callback for ``save_weights_only=True``. Everything else is done by the
    plugin that the strategy had before.
    """

    def __init__(self, trainer: Any, callback: EMACallback) -> None:
        replaced: Any = trainer.strategy.checkpoint_io
        self.inner: Any = replaced.inner if isinstance(replaced, _CheckpointIO) else replaced
        self.trainer = trainer
        self.callback = callback

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        ema = self.callback.ema
        self.callback._saved = path
        # Trainer.dump_checkpoint() always writes its version, and leaves callbacks out for weights.
        weights_only = "pytorch-lightning_version" in checkpoint and "callbacks" not in checkpoint
        if weights_only and ema is not None and not has_shards(ema.model):
            ema._warn_of_first("EMACallback: weights only", self.callback.index)
            average = self.callback.members_of(self.trainer, checkpoint)
            checkpoint = {**checkpoint, "state_dict": copy.copy(checkpoint["state_dict"])}
            checkpoint["state_dict"].update(average)

        # Lightning takes paths of fsspec: URLs, and chains such as simplecache::last.ckpt.
        is_local = "://" not in str(path) and "::" not in str(path) and storage_options is None
        # Torch's plugin copies the file from a folder for temporary files, which is not atomic.
        if is_local and type(self.inner) is _pl.plugins.TorchCheckpointIO:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(checkpoint, path)
        else:
            self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        # A folder, or a URL, is left to the wrapped plugin.
        if self.callback._is_restored(self.trainer):
            self.callback._before_restore()
        if Path(path).is_file():
            verify_checksums(path)
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()


publish_all(globals())
