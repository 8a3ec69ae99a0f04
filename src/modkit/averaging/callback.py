"""``EMACallback``: an ``EMA`` behind the hooks that training loops call."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic

import torch
from typing_extensions import TypeVar, Unpack

from modkit.averaging.ema import EMA, Decays, EMAOptions, checked_count
from modkit.averaging.named_tensors import NamedTensors as Members


__all__ = ["EMACallback", "EMAOptions"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)


def checked_index(index: int, ema: EMA[Any]) -> int:
    """Return which average is meant; raise where there is no such one."""
    checked_count("index", index, 0)
    if index >= len(ema.schedules):
        raise ValueError(f"EMA: index is {index}, and there are {len(ema.schedules)} averages")
    return index


def averaged_parameters(ema: EMA[Any]) -> list[torch.Tensor]:
    """Return the parameters of the model that are averaged, or will be at the first update."""
    members = Members(ema.model).parameters
    return [
        member.tensor
        for member in members.values()
        if ema._engine.options.selection.chooses(member)
    ]


class Evaluation:
    """An average in its model from one call to another, for loops that have hooks and no block.

    If it is lost without :meth:`end`, the raw weights come back with that.
    """

    def __init__(self) -> None:
        self._block: AbstractContextManager[None] | None = None

    def start(self, ema: EMA[Any], index: int = 0) -> None:
        """Put an average into the model, unless this has been done and not ended."""
        if self._block is None:
            block = ema.applied(index=index)
            # Loops like to evaluate in inference mode, and what is made there cannot be trained.
            with torch.inference_mode(False), torch.no_grad():
                block.__enter__()
            self._block = block

    def end(self) -> None:
        """Put the raw weights back; without a start nothing happens.

        Raises:
            RuntimeError: The weights were written to meanwhile. The raw ones are back nevertheless.
        """
        block, self._block = self._block, None
        if block is not None:
            with torch.inference_mode(False), torch.no_grad():
                block.__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing: a copy of the model has its raw weights, as ``EMA`` sees to."""
        return {"_block": None}


class EMACallback(Generic[ModelT]):
    """Averages a model in any training loop, and puts the average into it for evaluation.

    In a loop of one's own it is two lines: this one, and ``with ema.evaluating():`` around the
    validation. A loop that calls hooks may call those below, with whatever arguments it has.

    With an optimizer, each step that it really takes updates the average, and :meth:`step` does
    nothing. Without one, call :meth:`step` or :meth:`on_train_batch_end` after each step.

    Args:
        model: The model in training.
        optimizer: What trains it, or None to say when to update.
        decay: How much of the average stays in each step, or several of that.
        index: Which average to evaluate, where there are several.
        swap_to_average_at_end: Whether :meth:`on_train_end` copies the average into the model.
        **options: All other options of :class:`~modkit.averaging.ema.EMA`.

    Attributes:
        ema: The averages.

    Raises:
        TypeError, ValueError: An option makes no sense, or no parameter is averaged.

    Example:
        >>> import torch
        >>> from modkit import EMACallback, nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> ema = EMACallback(model, optimizer, decay=0.75)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 1)).backward()
        ...     _ = optimizer.step()
        >>> raw = model.weight.item()
        >>> with ema.evaluating():
        ...     print(round(model.weight.item() - raw, 4), model.training)
        0.75 False
        >>> model.weight.item() == raw, model.training
        (True, True)
    """

    def __init__(
        self,
        model: ModelT,
        optimizer: torch.optim.Optimizer | None = None,
        decay: Decays = None,
        *,
        index: int = 0,
        swap_to_average_at_end: bool = False,
        **options: Unpack[EMAOptions],
    ) -> None:
        self.ema = EMA(model, decay, **options)
        self.index = checked_index(index, self.ema)
        self.swap_to_average_at_end = swap_to_average_at_end
        self._evaluation = Evaluation()
        self._attached = optimizer is not None
        if optimizer is not None:
            self.ema.attach(optimizer)

    @property
    def model(self) -> ModelT:
        """The model in training."""
        return self.ema.model

    # Training.

    def step(self) -> None:
        """Take the weights into the average, if no optimizer does that already.

        Raises:
            RuntimeError: The average is in the model.
        """
        if not self._attached:
            self.ema.update()

    def on_train_batch_start(self, *args: object, **kwargs: object) -> None:
        """Put the raw weights back if an evaluation has not come to its end."""
        self._evaluation.end()

    def on_train_batch_end(self, *args: object, **kwargs: object) -> None:
        """Do what :meth:`step` does."""
        self.step()

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Copy the average into the model, if ``swap_to_average_at_end`` says so.

        ``ema.restore()`` puts the raw weights back.
        """
        self._evaluation.end()
        if self.swap_to_average_at_end:
            self.ema.store()
            self.ema.copy_to(index=self.index)

    def on_exception(self, *args: object, **kwargs: object) -> None:
        """Put the raw weights back."""
        self._evaluation.end()

    # Evaluation.

    @contextmanager
    def evaluating(self) -> Generator[ModelT]:
        """Put the average into the model, and the model into evaluation mode, for a ``with`` block.

        Before the first update the block sees the raw weights. Blocks may be nested. After the
        block, and after an error in it, the raw weights and the mode of each module are back.

        Yields:
            The model.

        Raises:
            RuntimeError: At the end: the block has written to the weights. The raw ones are back.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            with self.ema.applied(index=self.index):
                self.model.eval()
                yield self.model
        finally:
            for module, training in modes:
                module.training = training

    def on_validation_start(self, *args: object, **kwargs: object) -> None:
        """Put the average into the model until :meth:`on_validation_end`; twice is as once."""
        self._evaluation.start(self.ema, self.index)

    def on_validation_end(self, *args: object, **kwargs: object) -> None:
        """Put the raw weights back; without a start nothing happens."""
        self._evaluation.end()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # Saving and loading.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the averages, and of the raw weights while the average is in the model."""
        return self.ema.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, as :meth:`EMA.load_state_dict <modkit.averaging.ema.EMA.load_state_dict>`.

        Load the model first: where the state was saved in an evaluation, what was saved of the model
        is the average, and this puts the raw weights into it, with a warning.
        """
        self.ema.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: all but the optimizer, so that a copy has none."""
        return {**vars(self), "_attached": False}
