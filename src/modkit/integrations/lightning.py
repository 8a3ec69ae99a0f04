"""``EMACallback`` for Lightning's Trainer; it needs ``lightning`` or ``pytorch_lightning``."""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Unpack

from modkit._messages import install_extra
from modkit._namespace import publish_all
from modkit._upstream import RemovableHandle
from modkit.averaging.callback import (
    NO_AVERAGES,
    EMAOptions,
    Evaluation,
    averaged_parameters,
    check_options,
    end_swap,
    swap_at_end,
    training_weights,
)
from modkit.averaging.ema import EMA, Device
from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.optimizer_steps import check_optimizer
from modkit.averaging.options import CheckedCount, checked_count
from modkit.averaging.schedules import Decays
from modkit.averaging.sharding import MSG_FLAT_PARAMETERS, has_shards, split_up, whole
from modkit.files.torch_files import verify_checksums, write_checkpoint


__all__ = ["EMACallback"]


def _package() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise ModuleNotFoundError(
        f"modkit.integrations.lightning needs Lightning 2.6 or later. {install_extra('lightning')}",
        name="lightning",
    )


_pl = _package()
Callback: Any = _pl.Callback
CheckpointIO: Any = _pl.plugins.CheckpointIO


class EMACallback(Callback):
    """Averages a model that Lightning trains; evaluates and saves the average.

    The average is updated after each batch in which an optimizer stepped on an averaged parameter.
    Validation, test and prediction see the average, and before the first update the training weights;
    weights loaded for an evaluation are evaluated as they are. The ``state_dict`` of a checkpoint is
    the average, so it loads without this callback. The checkpoint also holds the training weights and
    the state of the averages, so ``fit(ckpt_path=...)`` resumes bitwise identically.

    Args:
        decay: Decay factor, or a list of them for several averages.
        index: Index of the average to evaluate and to save as the ``state_dict``.
        update_every_n_steps: Update if the step's index is a multiple; the decay is not adjusted.
        update_starting_at_step: Index of the first step to update on; by default 0.
        update_starting_at_epoch: Index of the first epoch at whose end to update; by default none.
        swap_to_average_at_end: If True, ``fit`` ends with the average in the model;
            ``callback.ema.restore()`` restores the training weights.
        **options: Further options of :class:`~modkit.EMA`.

    Attributes:
        ema: The :class:`~modkit.EMA` of the latest fit, or None.

    Example::

        trainer = Trainer(callbacks=[EMACallback(decay=0.999)])
        trainer.fit(model, train_loader, val_loader)
    """

    update_every_n_steps: CheckedCount = CheckedCount(1)

    def __init__(
        self,
        decay: Decays = None,
        *,
        index: int = 0,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        swap_to_average_at_end: bool = False,
        **options: Unpack[EMAOptions],
    ) -> None:
        check_options(decay, index, options)
        self.update_every_n_steps = update_every_n_steps
        checked_count("update_starting_at_step", update_starting_at_step or 0, 0)
        checked_count("update_starting_at_epoch", update_starting_at_epoch or 0, 0)
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self.index = index
        self.swap_to_average_at_end = swap_to_average_at_end
        self.ema: EMA[Any] | None = None
        self._decay, self._options, self._evaluation = decay, options, Evaluation()
        self._loaded: Mapping[str, Any] | None = None
        self._handles: list[RemovableHandle] = []
        self._fitting = self._training = False
        self._latest_step: int | None = None  # taken, and not yet shown to should_update()
        self._latest_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True to update the average now. Override it to update on other steps or epochs.

        As in Lightning's ``WeightAveraging``, one zero-based index is given: that of the latest
        optimizer step, or of the training epoch that ends.
        """
        if step_idx is not None:
            is_due = step_idx % self.update_every_n_steps == 0
            return is_due and step_idx >= (self.update_starting_at_step or 0)
        first = self.update_starting_at_epoch
        return epoch_idx is not None and first is not None and epoch_idx >= first

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reset the state of an interrupted run, and wrap the checkpoint plugin."""
        self._leave()
        self._loaded, self._latest_epoch = None, -1
        trainer.strategy.checkpoint_io = _CheckpointIO(trainer, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start or resume averaging, with the model on its device and sharded."""
        if isinstance(trainer.strategy, _pl.strategies.FSDPStrategy):
            raise TypeError(
                f"EMACallback: FSDPStrategy is not supported: {MSG_FLAT_PARAMETERS}. Use "
                "ModelParallelStrategy with torch.distributed.fsdp.fully_shard."
            )
        if has_shards(pl_module) and any(
            getattr(one, "save_weights_only", False) for one in trainer.checkpoint_callbacks
        ):
            _pl.utilities.rank_zero_warn(
                "EMACallback: checkpoints with save_weights_only=True hold the training weights of a "
                "sharded model, because Lightning calls no callback"
            )
        self._leave()
        # The last fit may have ended with the average in its model.
        end_swap(self.ema)
        if self.ema is None or self.ema.model is not pl_module:
            self.ema = EMA(pl_module, self._decay, **self._options)
        if self._loaded is not None:
            self.ema.load_state_dict(split_up(self._loaded, _parameters_of(pl_module)))
            self._loaded = None
        self._fitting = True
        for optimizer in trainer.optimizers:
            self._watch(check_optimizer("EMACallback", optimizer), self.ema, trainer)

    def _watch(self, optimizer: torch.optim.Optimizer, ema: EMA[Any], trainer: Any) -> None:
        """Record the steps of an optimizer that has averaged parameters."""
        averaged: set[int] = set()

        def has_averaged() -> bool:
            groups = optimizer.param_groups
            return any(id(p) in averaged for group in groups for p in group["params"])

        def after(*_: object) -> None:
            if self._training and not has_averaged():
                # The model or the optimizer may have got new parameters.
                averaged.update(map(id, averaged_parameters(ema)))
            if self._training and has_averaged():
                # Lightning counts the step only after this hook.
                self._latest_step = trainer.global_step

        # After an error that the user caught in an evaluation, the average is still swapped in.
        before = optimizer.register_step_pre_hook(lambda _, _args, _kwargs: self._evaluation.end())
        self._handles += [before, optimizer.register_step_post_hook(after)]

    def _update(self) -> None:
        step, self._latest_step = self._latest_step, None
        if step is not None and self.ema is not None and self.should_update(step_idx=step):
            self.ema.update()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Track steps from here on; loading an optimizer's state may take a step before."""
        self._training = True

    def on_train_batch_end(self, *_: Any) -> None:
        """Update the average, if an optimizer stepped and :meth:`should_update` returns True."""
        self._update()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Update the average, if :meth:`should_update` returns True for this epoch."""
        epoch = trainer.fit_loop.epoch_progress.current
        # Lightning counts an epoch as processed before on_train_epoch_end(), as completed after it.
        if epoch.completed > self._latest_epoch and epoch.processed > epoch.completed:
            self._latest_epoch = epoch.completed
            if self.ema is not None and self.should_update(epoch_idx=epoch.completed):
                self.ema.update()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Copy the average into the model, if ``swap_to_average_at_end=True``."""
        self._leave()
        if self.swap_to_average_at_end and self.ema is not None:
            swap_at_end(self.ema, self.index)

    def _leave(self) -> None:
        self._evaluation.end()
        self._fitting = self._training = False
        self._latest_step = None
        while self._handles:
            self._handles.pop().remove()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Swap the average in until the end of the validation, test or prediction."""
        if self.ema is None or self.ema.model is not pl_module:
            return
        if not self._fitting and trainer.ckpt_path:
            # These weights were loaded to be evaluated; the averages belong to other weights.
            self.ema = None
            return
        self._update()
        self._evaluation.start(self.ema, self.index)

    def on_validation_end(self, *_: Any) -> None:
        """Restore the training weights; without effect outside an evaluation."""
        self._evaluation.end()

    on_test_start = on_validation_start
    on_predict_start = on_validation_start
    on_test_end = on_validation_end
    on_predict_end = on_validation_end
    # An error may have left an evaluation before its end.
    on_train_batch_start = on_validation_end
    on_exception = on_validation_end

    def update_bn(
        self, loader: Iterable[Any], device: Device = None, *, weight_by_samples: bool = False
    ) -> None:
        """Compute the batch normalization statistics of the average. See ``EMA.update_bn``.

        Call it when no evaluation is running, for instance in ``on_train_epoch_end``.
        """
        if self.ema is None:
            raise RuntimeError("EMACallback.update_bn(): there are no averages. Call fit() first.")
        self.ema.update_bn(loader, device, index=self.index, weight_by_samples=weight_by_samples)

    def state_dict(self) -> dict[str, Any]:
        """Update for the latest step; :meth:`on_save_checkpoint` adds the state of the averages."""
        self._update()
        return {}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the average as the ``state_dict``, the training weights and the averages beside it."""
        if self.ema is None or self.ema.model is not pl_module:
            return
        # Lightning may have made an optimizer take a step of length zero, to have a state to save.
        self._latest_step = None
        # Another callback may save at the end of an epoch before this one is called.
        EMACallback.on_train_epoch_end(self, trainer, pl_module)
        state = self.ema.state_dict()
        state.pop("raw", None)
        average = self.members_of(trainer, checkpoint)
        as_raw = training_weights(self.ema, pl_module)
        if has_shards(pl_module):
            # Lightning saves the callback's entry from rank 0.
            with torch.inference_mode(False), torch.no_grad(), as_raw:
                raw, state = whole(dict(pl_module.state_dict())), whole(state)
        else:
            found = self.members_of(trainer, checkpoint, as_raw)
            raw = {k: value for k, value in found.items() if _memory(value) != _memory(average[k])}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **average}
        entry = {"ema": state, "raw": raw, "latest_epoch": self._latest_epoch}
        checkpoint["callbacks"][self.state_key] = entry

    def members_of(
        self,
        trainer: Any,
        saved: Mapping[str, Any],
        block: AbstractContextManager[None] | None = None,
    ) -> dict[str, Any]:
        """Return a checkpoint's ``state_dict`` as in a block; by default with the average."""
        assert self.ema is not None
        block = block or self.ema.applied(index=self.index)
        with torch.inference_mode(False), torch.no_grad(), block:
            found = trainer.strategy.lightning_module_state_dict()
        return {name: value for name, value in found.items() if name in saved["state_dict"]}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load the training weights into the model; the averages are loaded when the fit starts."""
        if trainer.state.fn != "fit":
            return
        # Lightning would deepcopy the entry for load_state_dict().
        saved = checkpoint["callbacks"].pop(self.state_key, None)
        self.ema = None
        if saved is not None:
            raw, self._loaded = saved["raw"], saved["ema"]
            self._latest_epoch = saved.get("latest_epoch", -1)
        elif {"current_model_state", "averaging_state"} <= checkpoint.keys():  # WeightAveraging's
            raw = checkpoint["current_model_state"]
            keys = ("averaging_state", "state_dict", "global_step")
            self._loaded = {key: checkpoint[key] for key in keys if key in checkpoint}
        else:
            _pl.utilities.rank_zero_warn(NO_AVERAGES)
            raw = {}
        if has_shards(pl_module):
            pl_module.load_state_dict(split_up(raw, _parameters_of(pl_module)), strict=False)
        else:
            loaded = {**checkpoint, "state_dict": {**checkpoint["state_dict"], **raw}}
            trainer.strategy.load_model_state_dict(loaded, strict=pl_module.strict_loading)
        if self._fitting:
            self.on_fit_start(trainer, pl_module)


def _parameters_of(pl_module: Any) -> dict[str, torch.Tensor]:
    return {name: member.tensor for name, member in NamedTensors(pl_module).parameters.items()}


def _memory(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else id(value)


class _CheckpointIO(CheckpointIO):
    """Wraps a strategy's plugin: atomic writes, verified loads, averages in weights-only files."""

    def __init__(self, trainer: Any, callback: EMACallback) -> None:
        inner: Any = trainer.strategy.checkpoint_io
        self.inner: Any = inner.inner if isinstance(inner, _CheckpointIO) else inner
        self.trainer, self.callback = trainer, callback

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        ema = self.callback.ema
        weights_only = "pytorch-lightning_version" in checkpoint and "callbacks" not in checkpoint
        if weights_only and ema is not None and not has_shards(ema.model):
            average = self.callback.members_of(self.trainer, checkpoint)
            checkpoint = {**checkpoint, "state_dict": {**checkpoint["state_dict"], **average}}
        is_local = "://" not in str(path) and "::" not in str(path) and storage_options is None
        # Torch's plugin copies the file from a folder for temporary files, which is not atomic.
        if is_local and type(self.inner) is _pl.plugins.TorchCheckpointIO:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint(checkpoint, path)
        else:
            self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        # A folder, or a URL, is left to the wrapped plugin.
        if Path(path).is_file():
            verify_checksums(path)
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()


publish_all(globals())
