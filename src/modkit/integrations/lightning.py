"""``EMACallback`` for the Trainer of Lightning.

It needs the extra ``lightning``, or a ``pytorch_lightning`` that is installed already.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Unpack

from modkit._errors import (
    MSG_DAMAGED_CHECKPOINT,
    MSG_FSDP1,
    MSG_NO_AVERAGES,
    MSG_NO_LIGHTNING,
    MSG_STEPS_UNKNOWN,
    MSG_WEIGHTS_ONLY_RAW,
)
from modkit._upstream import RemovableHandle
from modkit.averaging.callback import EMAOptions, Evaluation, averaged_parameters, checked_index
from modkit.averaging.ema import EMA, Decays
from modkit.averaging.named_tensors import NamedTensors as Members
from modkit.averaging.sharding import has_shards, split_up, whole
from modkit.averaging.swap import exchanged, pairs_for, raw_values
from modkit.checkpoints import verify


__all__ = ["EMACallback"]


def _package() -> Any:
    """Return Lightning under either of its names; to type checkers it may be anything."""
    for name in ("lightning", "pytorch_lightning"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module("lightning.pytorch" if name == "lightning" else name)
    raise ModuleNotFoundError(MSG_NO_LIGHTNING, name="lightning")


_pl = _package()
Callback: Any = _pl.Callback
CheckpointIO: Any = _pl.plugins.CheckpointIO


class EMACallback(Callback):
    """Averages a model that Lightning trains; evaluates and saves the average.

    After each batch in which an optimizer has really taken a step on an averaged parameter, the
    averages are updated: gradient accumulation, several optimizers, manual optimization and steps that
    a gradient scaler leaves out are counted right. Validation, tests and predictions see the average,
    and before the first update the raw weights.

    A checkpoint holds the average as its ``state_dict``, so that it loads into the model without this
    callback. The raw weights and the state of the averages are part of it, and
    ``trainer.fit(ckpt_path=...)`` goes on with both, bit for bit. It also goes on from checkpoints of
    Lightning's own ``WeightAveraging``. Weights that are loaded for an evaluation are evaluated as they
    are.

    Args:
        decay: How much of the average stays in each step, or several of that.
        index: Which average to evaluate and to save as the ``state_dict``, where there are several.
        swap_to_average_at_end: Whether to copy the average into the model when ``fit`` ends.
        **options: All other options of :class:`~modkit.averaging.ema.EMA`.

    Attributes:
        ema: The averages, once a fit has started.

    Raises:
        TypeError, ValueError: An option makes no sense.

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
        swap_to_average_at_end: bool = False,
        **options: Unpack[EMAOptions],
    ) -> None:
        # Options that make no sense are told now, and not when a fit starts.
        self.index = checked_index(index, EMA(torch.nn.Module(), decay, **options))
        self.swap_to_average_at_end = swap_to_average_at_end
        self.ema: EMA[Any] | None = None
        self._decay = decay
        self._options = options
        self._evaluation = Evaluation()
        self._loaded: Mapping[str, Any] | None = None
        self._handles: list[RemovableHandle] = []
        self._fitting = False
        self._training = False
        self._stepped = False

    # Training.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget what an interrupted run has left, and see to the checkpoints of this one."""
        self._leave()
        self._loaded = None
        _CheckpointIO.put_into(trainer, self)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start or go on averaging, now that the model is where it is trained."""
        if isinstance(trainer.strategy, _pl.strategies.FSDPStrategy):
            raise TypeError(MSG_FSDP1)
        if has_shards(pl_module) and any(
            getattr(one, "save_weights_only", False) for one in trainer.checkpoint_callbacks
        ):
            _pl.utilities.rank_zero_warn(MSG_WEIGHTS_ONLY_RAW)
        self._forget_optimizers()
        ema = self._ema_for(pl_module)
        if self._loaded is not None:
            ema.load_state_dict(split_up(self._loaded, _parameters_of(pl_module)))
            self._loaded = None
        self._fitting = True
        for optimizer in trainer.optimizers:
            self._watch(optimizer, ema)

    def _ema_for(self, pl_module: Any) -> EMA[Any]:
        if self.ema is None or self.ema.model is not pl_module:
            self.ema = EMA(pl_module, self._decay, **self._options)
        return self.ema

    def _watch(self, optimizer: Any, ema: EMA[Any]) -> None:
        """Notice the steps that an optimizer really takes, if it has averaged parameters."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(MSG_STEPS_UNKNOWN.format(kind=type(optimizer).__name__))

        chosen: set[int] = set()

        def is_averaged() -> bool:
            mine = (id(p) for group in optimizer.param_groups for p in group["params"])
            return any(one in chosen for one in mine)

        def before(*_: object) -> None:
            # An error in an evaluation that somebody has caught would leave the average there.
            self._evaluation.end()

        def after(*_: object) -> None:
            if not self._training:
                return
            if not is_averaged():
                # The model may have got new parameters since.
                chosen.update(map(id, averaged_parameters(ema)))
            self._stepped = self._stepped or is_averaged()

        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def _update(self) -> None:
        if self._stepped and self.ema is not None:
            self._stepped = False
            self.ema.update()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count steps from here on; before, optimizers take some to make room for a loaded state."""
        self._training = True

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Put the raw weights back if an evaluation has not come to its end."""
        self._evaluation.end()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the weights into the averages, if an optimizer has taken a step."""
        self._update()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Copy the average into the model, if ``swap_to_average_at_end`` says so."""
        self._leave()
        if self.swap_to_average_at_end and self.ema is not None:
            self.ema.copy_to(index=self.index)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put the raw weights back."""
        self._evaluation.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the optimizers."""
        self._leave()

    def _leave(self) -> None:
        self._evaluation.end()
        self._forget_optimizers()
        self._fitting = self._training = self._stepped = False

    def _forget_optimizers(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Evaluation.

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the average into the model, until the end of the validation, test or prediction."""
        if self.ema is None or self.ema.model is not pl_module:
            return
        if not self._fitting and trainer.ckpt_path:
            # These weights have been loaded to be evaluated, and the averages are not theirs.
            self.ema = None
            return
        self._update()
        self._evaluation.start(self.ema, self.index)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the raw weights back."""
        self._evaluation.end()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Count the step before a checkpoint; what is saved is added when the weights are there."""
        self._update()
        return {}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Make the average the ``state_dict``, and keep the raw weights and the averages beside it."""
        if self.ema is None or self.ema.model is not pl_module:
            return
        # To have a state, the optimizer may have taken a step of no length since then.
        self._stepped = False
        state = self.ema.state_dict()
        state.pop("raw", None)
        average = self.average_of(trainer, checkpoint)
        as_raw = exchanged(pairs_for(Members(pl_module), raw_values(pl_module)))
        if has_shards(pl_module):
            # All but the state_dict and the optimizers is saved by one process, for all of them.
            with torch.inference_mode(False), torch.no_grad(), as_raw:
                raw, state = whole(dict(pl_module.state_dict())), whole(state)
        else:
            raw = self._members_of(trainer, checkpoint, as_raw)
            raw = {name: raw[name] for name in raw if not _same_memory(raw[name], average[name])}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **average}
        checkpoint["callbacks"][self.state_key] = {"ema": state, "raw": raw}

    def average_of(self, trainer: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is the ``state_dict`` of a checkpoint while the average is in the model."""
        assert self.ema is not None
        return self._members_of(trainer, checkpoint, self.ema.applied(index=self.index))

    @staticmethod
    def _members_of(
        trainer: Any, checkpoint: Mapping[str, Any], block: AbstractContextManager[None]
    ) -> dict[str, Any]:
        """Return the entries of the ``state_dict`` of a checkpoint as they are inside the block.

        The strategy is asked, and not the model: it knows how its checkpoints are made.
        """
        with torch.inference_mode(False), torch.no_grad(), block:
            found = trainer.strategy.lightning_module_state_dict()
        return {name: value for name, value in found.items() if name in checkpoint["state_dict"]}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the raw weights into the model, and remember the averages for the start of the fit."""
        if trainer.state.fn != "fit":
            return
        # Without the entry Lightning has no copy to make of it.
        saved = checkpoint["callbacks"].pop(self.state_key, None)
        self.ema = None
        if saved is not None:
            raw, self._loaded = saved["raw"], saved["ema"]
        elif {"current_model_state", "averaging_state"} <= checkpoint.keys():
            raw = checkpoint["current_model_state"]
            self._loaded = {key: checkpoint[key] for key in ("averaging_state", "state_dict")}
        else:
            _pl.utilities.rank_zero_warn(MSG_NO_AVERAGES)
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
    return {name: member.tensor for name, member in Members(pl_module).parameters.items()}


def _same_memory(first: Any, second: Any) -> bool:
    return first is second or (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.data_ptr() == second.data_ptr()
    )


class _CheckpointIO(CheckpointIO):
    """Makes the average the ``state_dict`` of checkpoints without states as well, and verifies files.

    Lightning calls no callback for those (``save_weights_only=True``), and they would hold the raw
    weights. All else is left to the plugin that the strategy had before.
    """

    def __init__(self, inner: Any, trainer: Any, callback: EMACallback) -> None:
        self.inner, self.trainer, self.callback = inner, trainer, callback

    @classmethod
    def put_into(cls, trainer: Any, callback: EMACallback) -> None:
        """Give a strategy this plugin instead of its own, which it goes on using."""
        inner = trainer.strategy.checkpoint_io
        if isinstance(inner, cls):
            inner = inner.inner
        trainer.strategy.checkpoint_io = cls(inner, trainer, callback)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save the checkpoint, with the average in it."""
        ema = self.callback.ema
        is_whole = "pytorch-lightning_version" in checkpoint
        if is_whole and "callbacks" not in checkpoint and ema and not has_shards(ema.model):
            average = self.callback.average_of(self.trainer, checkpoint)
            checkpoint = {**checkpoint, "state_dict": {**checkpoint["state_dict"], **average}}
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what the other plugin does, if the checksums of a file on this machine are right."""
        # Checkpoints may also be folders, and what only the other plugin can open.
        if Path(path).is_file():
            try:
                verify(Path(path), required=False)
            except Exception as error:
                raise ValueError(MSG_DAMAGED_CHECKPOINT.format(path=path, error=error)) from error
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Do what the other plugin does."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Do what the other plugin does."""
        self.inner.teardown()
