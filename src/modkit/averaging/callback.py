"""``EMACallback``: an ``EMA`` behind the hooks that training loops call."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Generic

import torch
from typing_extensions import TypeVar, Unpack

from modkit._namespace import publish
from modkit.averaging.ema import EMA, Device, EMAOptions
from modkit.averaging.named_tensors import NamedTensors
from modkit.averaging.options import Options
from modkit.averaging.schedules import Decays
from modkit.averaging.swap import exchanged, pairs_for


__all__ = ["EMACallback", "EMAOptions"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)

NO_AVERAGES: Final = (
    "EMACallback: the checkpoint holds no averages, so averaging starts anew from its weights"
)


def check_options(decay: Decays, index: int, options: EMAOptions) -> None:
    """Raise the error with which ``EMA`` would refuse the options, without a model."""
    Options(
        include=options.get("include"),
        exclude=options.get("exclude"),
        buffers=options.get("buffers", "copy"),
    )
    # The names of the model are not known yet.
    probe: EMAOptions = {**options, "include": None, "exclude": None, "buffers": "copy"}
    EMA(torch.nn.Linear(1, 1), decay, **probe)._engine.check_index(index)


def averaged_parameters(ema: EMA[Any]) -> list[torch.Tensor]:
    """Return the model's parameters that are averaged, or will be from the first update on."""
    chooses = ema._engine.options.chooses
    return [one.tensor for one in NamedTensors(ema.model).parameters.values() if chooses(one)]


def training_weights(ema: EMA[Any], model: torch.nn.Module) -> AbstractContextManager[None]:
    """Swap the training weights into a model for a ``with`` block, wherever it holds the average."""
    return exchanged(pairs_for(NamedTensors(model), ema.training_weights()))


def swap_at_end(ema: EMA[Any], index: int) -> None:
    """Copy an average into its model, so that ``ema.restore()`` restores the training weights."""
    end_swap(ema)
    ema.store()
    ema.copy_to(index=index)


def end_swap(ema: EMA[Any] | None) -> None:
    """Restore the training weights if a training has ended with the average in its model."""
    if ema is not None and ema._overwritten:
        ema.restore()


class Evaluation:
    """An average swapped in from one call to another, or until the object is deleted."""

    def __init__(self) -> None:
        self._block: AbstractContextManager[None] | None = None

    def start(self, ema: EMA[Any], index: int = 0) -> None:
        """Swap an average in; without effect during an evaluation."""
        if self._block is None:
            block = ema.applied(index=index)
            # Loops often evaluate in inference mode. Tensors made there could not be trained.
            with torch.inference_mode(False), torch.no_grad():
                block.__enter__()
            self._block = block

    def end(self) -> None:
        """Restore the training weights, also if they were written to, which is a RuntimeError."""
        block, self._block = self._block, None
        if block is not None:
            with torch.inference_mode(False), torch.no_grad():
                block.__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        # ``EMA`` gives the copy of a model its training weights.
        return {"_block": None}


class EMACallback(Generic[ModelT]):
    """Averages a model in any training loop, and swaps the average in for evaluation.

    A hand-written loop needs two lines: this one, and ``with ema.evaluating():`` around the
    validation. A loop that calls hooks calls the methods below, with any arguments.

    Args:
        model: Model in training.
        optimizer: The optimizer, or a sequence of all optimizers of the model. None to call
            :meth:`step` or :meth:`on_train_batch_end` instead.
        decay: Decay factor, or a list of them for several averages.
        index: Index of the average to evaluate.
        swap_to_average_at_end: If True, :meth:`on_train_end` copies the average into the model.
        **options: All other options of :class:`~modkit.EMA`.

    Attributes:
        ema: The :class:`~modkit.EMA`.

    Example:
        >>> import torch
        >>> from modkit import EMACallback, nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ema = EMACallback(model, torch.optim.SGD(model.parameters()), decay=0.75)
        >>> with ema.evaluating():
        ...     model.training
        False
    """

    ema: EMA[ModelT]
    index: int
    swap_to_average_at_end: bool

    def __init__(
        self,
        model: ModelT,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        decay: Decays = None,
        *,
        index: int = 0,
        swap_to_average_at_end: bool = False,
        **options: Unpack[EMAOptions],
    ) -> None:
        self.ema = EMA(model, decay, **options)
        self.ema._engine.check_index(index)
        self.index = index
        self.swap_to_average_at_end = swap_to_average_at_end
        self._evaluation = Evaluation()
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        optimizers = [one for one in several if one is not None]
        self._attached = bool(optimizers)
        if optimizers:
            self.ema.attach(*optimizers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ema!r}, index={self.index})"

    @property
    def model(self) -> ModelT:
        """The model in training."""
        return self.ema.model

    def step(self) -> None:
        """Update the average, unless an optimizer does so."""
        if not self._attached:
            self.ema.update()

    def on_train_batch_end(self, *args: object, **kwargs: object) -> None:
        """Call :meth:`step`."""
        self.step()

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Copy the average in if ``swap_to_average_at_end``; ``ema.restore()`` undoes it."""
        self._evaluation.end()
        if self.swap_to_average_at_end:
            swap_at_end(self.ema, self.index)

    @contextmanager
    def evaluating(self) -> Generator[ModelT]:
        """Swap the average in and set evaluation mode for a ``with`` block. See ``EMA.applied``."""
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            with self.ema.applied(index=self.index):
                self.model.eval()
                yield self.model
        finally:
            for module, training in modes:
                module.training = training

    def update_bn(
        self, loader: Iterable[Any], device: Device = None, *, weight_by_samples: bool = False
    ) -> None:
        """Compute the batch normalization statistics of the average. See ``EMA.update_bn``.

        Call it before :meth:`evaluating`, not inside.
        """
        self.ema.update_bn(loader, device, index=self.index, weight_by_samples=weight_by_samples)

    def on_validation_start(self, *args: object, **kwargs: object) -> None:
        """Swap the average in until :meth:`on_validation_end`; a second call has no effect."""
        self._evaluation.start(self.ema, self.index)

    def on_validation_end(self, *args: object, **kwargs: object) -> None:
        """Restore the training weights; without effect outside an evaluation."""
        self._evaluation.end()

    on_test_start = on_validation_start
    on_predict_start = on_validation_start
    on_test_end = on_validation_end
    on_predict_end = on_validation_end
    # Where an evaluation was left without its end hook.
    on_train_batch_start = on_validation_end
    on_exception = on_validation_end

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the averages. See ``EMA.state_dict``."""
        return self.ema.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, step: int | None = None) -> None:
        """Load a state, after the model. See ``EMA.load_state_dict``."""
        self.ema.load_state_dict(state_dict, step=step)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no optimizer.
        return {**vars(self), "_attached": False}


publish("modkit", EMACallback)
