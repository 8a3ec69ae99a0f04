"""``EMACallback`` for Lightning's Trainer.

It needs the extra ``lightning``, or an installed ``pytorch_lightning``.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Unpack

from modkit._namespace import publish_all
from modkit._upstream import RemovableHandle
from modkit.averaging.callback import (
    NO_AVERAGES,
    EMAOptions,
    Evaluation,
    averaged_parameters,
    check_optimizer,
    check_options,
    swap_at_end,
    training_weights,
)
from modkit.averaging.ema import EMA, Decays, checked_count
from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.sharding import has_shards, split_up, whole
from modkit.files.torch_files import save_checkpoint, verify_checksums


__all__ = ["EMACallback"]


def _package() -> Any:
    """Return Lightning under either of its names. To type checkers it is Any."""
    for name in ("lightning", "pytorch_lightning"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module("lightning.pytorch" if name == "lightning" else name)
    raise ModuleNotFoundError(
        "modkit.integrations.lightning needs Lightning 2.6 or later: "
        "pip install 'modkit[lightning]'",
        name="lightning",
    )


_pl = _package()
Callback: Any = _pl.Callback
CheckpointIO: Any = _pl.plugins.CheckpointIO


class EMACallback(Callback):
    """Averages a model that Lightning trains; evaluates and saves the average.

    The average is updated after each batch in which an optimizer stepped on an averaged parameter:
    once per step with gradient accumulation, once per batch with several optimizers or manual
    optimization, and not for steps that a gradient scaler skips. Override :meth:`should_update` to
    update on other steps or at the end of epochs. Validation, test and prediction see the average,
    and before the first update the training weights.

    The ``state_dict`` of a checkpoint is the average, so that it loads without this callback. The
    checkpoint also holds the training weights and the state of the averages:
    ``trainer.fit(ckpt_path=...)`` resumes bitwise identically. Checkpoints of Lightning's
    ``WeightAveraging`` can be resumed from too. Weights loaded for an evaluation are evaluated as they
    are.

    Args:
        decay: Fraction of the average that each update keeps, or a list of them for several averages.
        index: Index of the average to evaluate and to save as the ``state_dict``, if there are several.
        update_every_n_steps: Update on steps whose index is a multiple of this, with ``decay`` as it
            is. The option ``update_every`` of ``EMA`` adjusts the decay instead.
        update_starting_at_step: Index of the first step to update on; by default 0.
        update_starting_at_epoch: Index of the first epoch at whose end to update as well; by default
            no epoch. Steps are not affected.
        swap_to_average_at_end: If True, ``fit`` ends with the average in the model;
            ``callback.ema.restore()`` restores the training weights.
        **options: All other options of :class:`~modkit.EMA`.

    Attributes:
        ema: The :class:`~modkit.EMA` of the latest fit, or None.

    Raises:
        TypeError, ValueError: If an argument is invalid.

    Example::

        from modkit.integrations.lightning import EMACallback

        trainer = Trainer(callbacks=[EMACallback(decay=0.999)])
        trainer.fit(model, train_loader, val_loader)
    """

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
        checked_count("update_every_n_steps", update_every_n_steps, 1)
        checked_count("update_starting_at_step", update_starting_at_step or 0, 0)
        checked_count("update_starting_at_epoch", update_starting_at_epoch or 0, 0)
        self.index = index
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self.swap_to_average_at_end = swap_to_average_at_end
        self.ema: EMA[Any] | None = None
        self._decay = decay
        self._options = options
        self._evaluation = Evaluation()
        self._loaded: Mapping[str, Any] | None = None
        self._handles: list[RemovableHandle] = []
        self._fitting = False
        self._training = False
        self._latest_step: int | None = None  # taken, and not yet shown to should_update()
        self._latest_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True to update the average after this step or epoch. Meant to be overridden.

        The arguments are those of Lightning's ``WeightAveraging.should_update``: one of them is set.

        Args:
            step_idx: Zero-based index of the optimizer step that was just taken, or None.
            epoch_idx: Zero-based index of the training epoch that ends, or None.
        """
        if step_idx is not None:
            first = self.update_starting_at_step or 0
            return step_idx >= first and step_idx % self.update_every_n_steps == 0
        first_epoch = self.update_starting_at_epoch
        return epoch_idx is not None and first_epoch is not None and epoch_idx >= first_epoch

    # Training.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reset what an interrupted run has left, and wrap the checkpoint plugin of this one."""
        self._leave()
        self._loaded, self._latest_epoch = None, -1
        _CheckpointIO.install(trainer, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start or resume averaging, with the model on its device and sharded."""
        if isinstance(trainer.strategy, _pl.strategies.FSDPStrategy):
            raise TypeError(
                "EMACallback: FSDPStrategy (FullyShardedDataParallel) flattens parameters, so they "
                "have no names to average by; use ModelParallelStrategy with torch's fully_shard"
            )
        if has_shards(pl_module) and any(
            getattr(one, "save_weights_only", False) for one in trainer.checkpoint_callbacks
        ):
            _pl.utilities.rank_zero_warn(
                "EMACallback: with save_weights_only=True Lightning calls no callback, so the "
                "checkpoints of a sharded model hold its training weights"
            )
        self._leave()
        if self.ema is None or self.ema.model is not pl_module:
            self.ema = EMA(pl_module, self._decay, **self._options)
        if self._loaded is not None:
            self.ema.load_state_dict(split_up(self._loaded, _parameters_of(pl_module)))
            self._loaded = None
        self._fitting = True
        for optimizer in trainer.optimizers:
            self._watch(check_optimizer(optimizer), self.ema, trainer)

    def _watch(self, optimizer: torch.optim.Optimizer, ema: EMA[Any], trainer: Any) -> None:
        """Note the steps that an optimizer takes, if it has averaged parameters."""
        averaged: set[int] = set()

        def has_averaged() -> bool:
            return any(
                id(p) in averaged for group in optimizer.param_groups for p in group["params"]
            )

        def before(*_: object) -> None:
            # If the user caught an error of an evaluation, the average is still swapped in.
            self._evaluation.end()

        def after(*_: object) -> None:
            if not self._training:
                return
            if not has_averaged():
                # The model or the optimizer may have got new parameters.
                averaged.update(map(id, averaged_parameters(ema)))
            if has_averaged():
                # Lightning counts the step only after this hook.
                self._latest_step = trainer.global_step

        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def _update(self) -> None:
        """Update the average for the latest step, unless that has been done."""
        step, self._latest_step = self._latest_step, None
        if step is not None and self.ema is not None and self.should_update(step_idx=step):
            self.ema.update()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Track steps from here on; loading the state of an optimizer may take a step before."""
        self._training = True

    def on_train_batch_end(self, *_: Any) -> None:
        """Update the average, if an optimizer stepped and :meth:`should_update` returns True."""
        self._update()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Update the average, if :meth:`should_update` returns True for this epoch."""
        self._update_for_epoch(trainer)

    def _update_for_epoch(self, trainer: Any) -> None:
        """Update the average for the epoch that ends now, unless that has been done."""
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

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the hooks of the optimizers."""
        self._leave()

    def _leave(self) -> None:
        self._evaluation.end()
        self._fitting = self._training = False
        self._latest_step = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Evaluation.

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Swap the average in until the end of the validation, test or prediction."""
        if self.ema is None or self.ema.model is not pl_module:
            return
        if not self._fitting and trainer.ckpt_path:
            # These weights were loaded to be evaluated, and the averages belong to others.
            self.ema = None
            return
        self._update()
        self._evaluation.start(self.ema, self.index)

    def on_validation_end(self, *_: Any) -> None:
        """Restore the training weights; without effect outside an evaluation."""
        self._evaluation.end()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    # An error may have left an evaluation before its end.
    on_train_batch_start = on_exception = on_validation_end

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Update for the latest step before a checkpoint; :meth:`on_save_checkpoint` adds the state."""
        self._update()
        return {}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Make the average the ``state_dict``; add the training weights and the state of the averages."""
        if self.ema is None or self.ema.model is not pl_module:
            return
        # Lightning may have made an optimizer take a step of length zero, to have a state to save.
        self._latest_step = None
        # Another callback may save at the end of an epoch, before on_train_epoch_end() of this one.
        self._update_for_epoch(trainer)
        state = self.ema.state_dict()
        state.pop("raw", None)
        average = self.average_of(trainer, checkpoint)
        as_raw = training_weights(pl_module)
        if has_shards(pl_module):
            # Lightning saves all other entries from rank 0, so they must be gathered.
            with torch.inference_mode(False), torch.no_grad(), as_raw:
                raw, state = whole(dict(pl_module.state_dict())), whole(state)
        else:
            raw = self._members_of(trainer, checkpoint, as_raw)
            raw = {name: raw[name] for name in raw if not _same_memory(raw[name], average[name])}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **average}
        entry = {"ema": state, "raw": raw, "latest_epoch": self._latest_epoch}
        checkpoint["callbacks"][self.state_key] = entry

    def average_of(self, trainer: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a checkpoint's ``state_dict`` with the average swapped in."""
        assert self.ema is not None
        return self._members_of(trainer, checkpoint, self.ema.applied(index=self.index))

    @staticmethod
    def _members_of(
        trainer: Any, checkpoint: Mapping[str, Any], block: AbstractContextManager[None]
    ) -> dict[str, Any]:
        """Return the entries of a checkpoint's ``state_dict`` as the strategy gives them in a block."""
        with torch.inference_mode(False), torch.no_grad(), block:
            found = trainer.strategy.lightning_module_state_dict()
        return {name: value for name, value in found.items() if name in checkpoint["state_dict"]}

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
        elif {"current_model_state", "averaging_state"} <= checkpoint.keys():
            raw = checkpoint["current_model_state"]
            self._loaded = {key: checkpoint[key] for key in ("averaging_state", "state_dict")}
        else:
            _pl.utilities.rank_zero_warn(NO_AVERAGES)
            raw = {}
        if has_shards(pl_module):
            raw = split_up(raw, _parameters_of(pl_module))
            pl_module.load_state_dict(raw, strict=False)
        else:
            members = {**checkpoint["state_dict"], **raw}
            loaded = {**checkpoint, "state_dict": members}
            trainer.strategy.load_model_state_dict(loaded, strict=pl_module.strict_loading)
        if self._fitting:
            self.on_fit_start(trainer, pl_module)


def _parameters_of(pl_module: Any) -> dict[str, torch.Tensor]:
    return {name: member.tensor for name, member in NamedTensors(pl_module).parameters.items()}


def _same_memory(first: Any, second: Any) -> bool:
    return first is second or (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.data_ptr() == second.data_ptr()
    )


class _CheckpointIO(CheckpointIO):
    """Saves the average in weights-only checkpoints too, writes atomically, and verifies checksums on load.

    Lightning calls no callback for ``save_weights_only=True``. Everything else is done by the plugin
    that the strategy had before.
    """

    def __init__(self, inner: Any, trainer: Any, callback: EMACallback) -> None:
        self.inner, self.trainer, self.callback = inner, trainer, callback

    @classmethod
    def install(cls, trainer: Any, callback: EMACallback) -> None:
        """Wrap the plugin of the Trainer's strategy."""
        inner = trainer.strategy.checkpoint_io
        if isinstance(inner, cls):
            inner = inner.inner
        trainer.strategy.checkpoint_io = cls(inner, trainer, callback)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save the checkpoint, with the average as its ``state_dict``."""
        ema = self.callback.ema
        weights_only = "pytorch-lightning_version" in checkpoint and "callbacks" not in checkpoint
        if weights_only and ema is not None and not has_shards(ema.model):
            average = self.callback.average_of(self.trainer, checkpoint)
            checkpoint = {**checkpoint, "state_dict": {**checkpoint["state_dict"], **average}}
        if storage_options is not None or not self._is_plain_file(path):
            self.inner.save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(checkpoint, path)

    def _is_plain_file(self, path: Any) -> bool:
        """Return True if the wrapped plugin would write a local file with ``torch.save``.

        It writes to the folder for temporary files first. If that is on another file system, the file
        is copied from there, which is not atomic.
        """
        is_local = "://" not in str(path) and "::" not in str(path)
        return is_local and type(self.inner) is _pl.plugins.TorchCheckpointIO

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify the checksums of a local file, then load it with the wrapped plugin."""
        # A checkpoint may also be a folder, or a URL that only the wrapped plugin can open.
        if Path(path).is_file():
            verify_checksums(path)
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it with the wrapped plugin."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Tear down the wrapped plugin."""
        self.inner.teardown()


publish_all(globals())
