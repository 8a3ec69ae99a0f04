"""``EMACallback``: an ``EMA`` behind the hooks that training loops call."""

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic

import torch
from typing_extensions import TypeVar, Unpack

from modkit._interrupts import critical
from modkit._namespace import publish
from modkit.averaging.ema import EMA
from modkit.averaging.options import EMAOptions, Options, check_index, checked_count
from modkit.averaging.schedules import Decays, schedules_of
from modkit.averaging.swap import Pairing, any_swapped, exchanged
from modkit.averaging.tensors import NamedTensors


__all__ = ["EMACallback", "EMAOptions"]

ModelT = TypeVar("ModelT", bound=torch.nn.Module)
ModelT_co = TypeVar("ModelT_co", bound=torch.nn.Module, default=torch.nn.Module, covariant=True)

NO_AVERAGES: Final = (
    "EMACallback: the checkpoint holds no averages, so averaging starts anew from its weights"
)


def check_options(decay: Decays, index: int, options: EMAOptions) -> None:
    """Check the options of a callback that gets its model, whose names globs are for, later."""
    rest: dict[str, Any] = {**options}
    schedules = schedules_of(decay, rest.pop("schedule", None))
    checked_count("update_after_step", rest.pop("update_after_step", 0), 0)
    checked_count("update_every", rest.pop("update_every", 1), 1)
    device = rest.pop("device", None)
    Options(**rest, device=None if device is None else torch.device(device))
    check_index(index, len(schedules))


def average_of(model: ModelT, decay: Decays, options: EMAOptions) -> EMA[ModelT]:
    """Return the averages of a callback, whose loop may unfreeze layers."""
    ema = EMA(model, decay, **options)
    ema._engine.follows_unfrozen = True
    return ema


@contextmanager
def training_weights(ema: EMA[Any], model: torch.nn.Module) -> Generator[None]:
    """Swap the training weights into a model, or a wrapper of it, that holds the average."""
    named = NamedTensors(model)
    with exchanged(Pairing(named, ema.training_weights(), ema._engine.copied())):
        yield


def swap_at_end(ema: EMA[Any], index: int) -> None:
    """Copy an average into its model, so that ``ema.restore()`` restores the training weights."""
    end_swap(ema)
    ema.store()
    ema.copy_to(index=index)
    ema._warn_of_first("swap_to_average_at_end", index)


def end_swap(ema: EMA[Any] | None) -> None:
    """Restore the training weights if a training has ended with the average in its model."""
    if ema is not None and ema._overwritten:
        ema.restore()


def check_outside(evaluation: "Evaluation", model: torch.nn.Module, call: str) -> None:
    """Check that training does not start where the model may hold the average."""
    if evaluation.blocks or any_swapped(model):
        raise RuntimeError(
            f"EMACallback: {call} was called inside evaluating() or applied(), where the model may "
            f"hold the averaged weights. Call {call} outside of the block."
        )


@dataclass(eq=False)
class _Block:
    """An open block: the average that it evaluates, and the modes of modules before it."""

    index: int | None
    modes: list[tuple[torch.nn.Module, bool]] = field(default_factory=list)


class Evaluation:
    """The weights that a model is evaluated with, swapped in between two hooks or for a block.

    Trainers call one hook before an evaluation and one after it. A block takes precedence over the
    hooks: an evaluation that starts inside sees the weights of the block. What a hook has swapped
    in is swapped out at the latest when this object is deleted.
    """

    # While the interpreter exits, the globals of torch may be gone, and no model is used again.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self) -> None:
        # Between start() and end().
        self.swap: AbstractContextManager[None] | None = None
        # In the order in which they began. They may end in another one: blocks in generators, in
        # tasks and in threads do.
        self.blocks: list[_Block] = []

    def start(self, ema: EMA[Any], index: int) -> None:
        """Swap in an average until :meth:`end`; inside a block, its weights take precedence."""
        if self.swap is None:
            swap = _swapped(ema, self.blocks[-1].index if self.blocks else index)
            # Loops often evaluate in inference mode. Tensors made there could not be trained.
            with torch.inference_mode(False), torch.no_grad():
                swap.__enter__()
            self.swap = swap

    def end(self) -> None:
        """Restore the training weights, also if they were written to, which is a RuntimeError."""
        swap = self.swap
        # In this order: leaving raises if the weights were written to, and is not repeated then.
        self.swap = None
        if swap is not None:
            with torch.inference_mode(False), torch.no_grad():
                swap.__exit__(None, None, None)

    @contextmanager
    def block(self, ema: EMA[ModelT_co] | None, index: int | None) -> Generator[ModelT_co]:
        """Swap in an average, or the training weights, for a block in evaluation mode."""
        if ema is None:
            raise RuntimeError(
                "EMACallback: there are no averages to evaluate, because nothing was trained, or "
                "other weights were loaded since. Look at callback.ema, which is None then."
            )
        block = _Block(index)
        try:
            try:
                with _swapped(ema, index):
                    self._begin(block, ema.model)
                    yield ema.model
            finally:
                self._end(block)
        finally:
            # This completes what a signal has interrupted, and otherwise has no effect.
            self._end(block)

    @critical
    def _begin(self, block: "_Block", model: torch.nn.Module) -> None:
        block.modes = [(module, module.training) for module in model.modules()]
        self.blocks.append(block)
        model.eval()

    @critical
    def _end(self, block: "_Block") -> None:
        if self._is_finalizing() or block not in self.blocks:
            return
        place = self.blocks.index(block)
        if block is self.blocks[-1]:
            # By attribute: ``train()`` may be overridden to freeze layers.
            for module, training in block.modes:
                module.training = training
        else:
            # The block that began inside this one goes on, and restores these modes when it ends.
            self.blocks[place + 1].modes += block.modes
        del self.blocks[place]

    def __getstate__(self) -> dict[str, Any]:
        # ``EMA`` gives the copy of a model its training weights, so nothing is swapped in there.
        return vars(Evaluation())


def _swapped(ema: EMA[Any], index: int | None) -> AbstractContextManager[None]:
    """Return a block with an average, or None for the training weights, swapped into the model."""
    return training_weights(ema, ema.model) if index is None else ema.applied(index=index)


class BlocksOfEvaluation(Generic[ModelT_co]):
    """Base of the three classes ``EMACallback``: blocks of an evaluation."""

    # An EMA, or None until a trainer has passed its model.
    ema: Any
    index: int
    swap_to_average_at_end: bool
    _evaluation: Evaluation

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ema or 'not trained'}, index={self.index})"

    def _before_evaluation(self) -> None:
        """Complete what an evaluation must see."""

    def evaluating(self, index: int | None = None) -> AbstractContextManager[ModelT_co]:
        """Swap an average in and set evaluation mode for a ``with`` block.

        Use it in a loop, in Lightning's ``validation_step``, or around ``trainer.validate()`` and
        the ``trainer.evaluate()`` of transformers, which then see this average. Before the first
        update the block sees the training weights. Storage is exchanged, nothing is copied unless
        dtype or device differ. Whatever ends the block, the training weights and the mode of each
        module are restored. Blocks may be nested, so that one validation can evaluate several
        averages, and may end in any order. Checkpoints that a Trainer saves inside are those of the
        callback's ``index``.

        Args:
            index: Index of the average. Default: that of the callback.

        Returns:
            A context manager that yields the model.

        Raises:
            IndexError: If there is no average ``index``. It is raised on entering the block, before
                anything is changed; so are the next two.
            TypeError: If ``index`` is not an int.
            NameMismatchError: If names or shapes of the model have changed since the last update.
            RuntimeError: If there are no averages, because nothing was trained, or a Trainer has
                loaded other weights; at the end, if the block has written to the weights, or has
                replaced parameters or their modules, which are put back. A block that raised gets a
                note instead.

        Example:
            >>> from modkit import EMACallback, nn
            >>> model = nn.Linear(1, 1, bias=False)
            >>> ema = EMACallback(model, decay=[0.75, 0.0])
            >>> for value in 0.0, 8.0:
            ...     _ = nn.init.constant_(model.weight, value)
            ...     ema.step()
            >>> for index in 0, 1:
            ...     with ema.evaluating(index=index):
            ...         print(model.weight.item())
            2.0
            8.0
        """
        self._before_evaluation()
        return self._evaluation.block(self.ema, self.index if index is None else index)

    def evaluating_training_weights(self) -> AbstractContextManager[ModelT_co]:
        """Evaluate the training weights for a ``with`` block, also where an average is swapped in.

        It sets evaluation mode as :meth:`evaluating` does, so a validation can compare both. Inside
        an evaluation it swaps the training weights back in, and at its end the average.

        Returns:
            A context manager that yields the model.

        Raises:
            NameMismatchError: If training has ended with ``swap_to_average_at_end``, and the model
                has lost an averaged tensor since. It is raised on entering the block.
            RuntimeError: If there are no averages; at the end, if the block was entered inside an
                evaluation, and has written to the weights.

        Example:
            >>> from modkit import EMACallback, nn
            >>> model = nn.Linear(1, 1, bias=False)
            >>> ema = EMACallback(model, decay=0.75)
            >>> for value in 0.0, 8.0:
            ...     _ = nn.init.constant_(model.weight, value)
            ...     ema.step()
            >>> with ema.evaluating():
            ...     average = model.weight.item()
            ...     with ema.evaluating_training_weights():
            ...         print(average, model.weight.item(), model.training)
            2.0 8.0 False
        """
        self._before_evaluation()
        return self._evaluation.block(self.ema, None)


class HooksOfEvaluation(BlocksOfEvaluation[ModelT_co]):
    """Base of the callbacks whose loop calls a hook before and after each evaluation."""

    def on_validation_start(self, *args: object, **kwargs: object) -> None:
        """Swap the average in until :meth:`on_validation_end`; a second call has no effect.

        ``on_test_start`` and ``on_predict_start`` are the same. The mode of the model is the
        caller's. Before the first update the model keeps the training weights, and inside a block
        of :meth:`evaluating` or :meth:`evaluating_training_weights` it keeps those of the block.

        Args:
            args: Arguments of the loop's hook, ignored.
            kwargs: Keyword arguments of the loop's hook, ignored.

        Raises:
            IndexError: If ``index`` was set to one that no average has.
            NameMismatchError: If names or shapes of the model have changed since the last update.
        """
        ema = self._evaluated(*args)
        if ema is not None:
            self._evaluation.start(ema, self.index)

    def _evaluated(self, *args: Any) -> Any:
        """Return the averages of the model that a hook is called for, if there are any."""
        return self.ema

    def on_validation_end(self, *args: object, **kwargs: object) -> None:
        """Restore the training weights; without effect outside an evaluation.

        ``on_test_end`` and ``on_predict_end`` are the same. So are ``on_train_batch_start`` and
        ``on_exception``, for an evaluation that an error has left without its end.

        Args:
            args: Arguments of the loop's hook, ignored.
            kwargs: Keyword arguments of the loop's hook, ignored.

        Raises:
            RuntimeError: If the weights were written to, or parameters replaced, since
                :meth:`on_validation_start`. The training weights are restored first.
        """
        self._evaluation.end()

    on_test_start = on_validation_start
    on_predict_start = on_validation_start
    on_test_end = on_validation_end
    on_predict_end = on_validation_end
    # Where an evaluation was left without its end hook.
    on_train_batch_start = on_validation_end
    on_exception = on_validation_end


class EMACallback(HooksOfEvaluation[ModelT_co]):
    """Averages a model in any training loop, and swaps the average in for evaluation.

    It is the class for loops that are written by hand. The Trainers of Lightning and transformers
    have classes of the same name, in :mod:`modkit.integrations.lightning` and
    :mod:`modkit.integrations.transformers`.

    A hand-written loop needs two lines: this one, and ``with ema.evaluating():`` around the
    validation. A loop that calls hooks calls the methods below, with any arguments.

    Args:
        model: Model in training. It is neither copied nor modified.
        optimizer: The optimizer, or a sequence of all optimizers of the model: each of their steps
            is an update, as in :meth:`EMA.attach() <modkit.EMA.attach>`. None, or an empty
            sequence, to call :meth:`step` or :meth:`on_train_batch_end` after each optimizer step
            instead.
        decay: Constant decay factor of one step, in [0, 1]. A list gives several averages, numbered
            by ``index`` from 0. Default: the schedule ``CountWarmup(0.999)``.
        index: Index of the average that evaluations see, and that ``swap_to_average_at_end``
            copies.
        swap_to_average_at_end: If True, :meth:`on_train_end` copies the average into the model.
        **options: Further keywords of :class:`~modkit.EMA`, such as ``schedule``, ``precision`` and
            ``buffers``.

    Raises:
        TypeError: If ``model`` is not a module, the steps of an optimizer cannot be tracked,
            ``index`` or a number of steps is not an int, a decay is not a number, a schedule or a
            function, or an option is unknown.
        ValueError: If ``decay`` and ``schedule`` are both given, an option is invalid, no parameter
            is selected, a glob other than ``"*"`` matches no name, or an optimizer is given twice
            or has no averaged parameter.
        IndexError: If there is no average ``index``.
        RuntimeError: If torch does not know ``device``, or a module of the model contains itself.

    Warns:
        UserWarning: If a constant decay is above 0 and below 0.1, as a momentum is.

    Attributes:
        ema: The :class:`~modkit.EMA`, with the averages and all their methods.
        index: The option. Another index counts from the next evaluation on.
        swap_to_average_at_end: The option.

    Example:
        >>> import torch
        >>> from modkit import EMACallback, nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> ema = EMACallback(model, optimizer, decay=0.75)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 1)).backward()
        ...     optimizer.step()
        >>> trained = model.weight.item()
        >>> with ema.evaluating():
        ...     print(round(model.weight.item() - trained, 4), model.training)
        0.75 False
        >>> model.weight.item() == trained, model.training
        (True, True)
    """

    ema: EMA[ModelT_co]

    def __init__(
        self,
        model: ModelT_co,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        decay: Decays = None,
        *,
        index: int = 0,
        swap_to_average_at_end: bool = False,
        **options: Unpack[EMAOptions],
    ) -> None:
        self.ema = average_of(model, decay, options)
        self.ema._engine.check_index(index)
        self.index = index
        self.swap_to_average_at_end = swap_to_average_at_end
        self._evaluation = Evaluation()

        # An empty sequence is as None: the loop calls ``step()`` itself.
        given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        optimizers = [optimizer for optimizer in given if optimizer is not None]
        if optimizers:
            self.ema.attach(*optimizers)

    @property
    def model(self) -> ModelT_co:
        """The model in training."""
        return self.ema.model

    def step(self) -> None:
        """Update the averages after an optimizer step; without effect if an optimizer was given.

        Raises:
            NameMismatchError: If names or shapes of the model have changed since the last update.
            RuntimeError: If the model holds an average, a parameter has no values yet or cannot be
                averaged, or, with ``on_nonfinite="raise"``, is not finite.
            ValueError: If a schedule returns a decay outside of [0, 1]; in the first update also if
                ``trainable_only=True`` and no parameter requires gradients.
        """
        if not self.ema._steps.optimizers:
            self.ema.update()

    def on_train_batch_end(self, *args: object, **kwargs: object) -> None:
        """Call :meth:`step`, whose errors it raises. All arguments are ignored."""
        self.step()

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Copy the average in if ``swap_to_average_at_end``; ``ema.restore()`` undoes it.

        Until then, states hold the training weights too, and updates and steps of attached
        optimizers are refused. An evaluation that was left without its end is ended first.

        Args:
            args: Arguments of the loop's hook, ignored.
            kwargs: Keyword arguments of the loop's hook, ignored.

        Raises:
            RuntimeError: If that evaluation has written to the weights, or if the model holds an
                average inside :meth:`evaluating` or ``EMA.applied()``.
            NameMismatchError: If names or shapes of the model have changed since the last update.
        """
        self._evaluation.end()
        if self.swap_to_average_at_end:
            swap_at_end(self.ema, self.index)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the averages, in the format of ``EMA.state_dict()``.

        It holds all averages, counters and schedules, and while the model holds an average also the
        training weights, so it may be saved anywhere in a loop.

        Returns:
            A dict of numbers, strings and tensors. The tensors are not copied: save or copy it
            before the next update.
        """
        return self.ema.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, step: int | None = None) -> None:
        """Load a state of this class, of ``EMA`` or of another library; load the model first.

        Averaging resumes with bitwise identical results. A state that was saved while the model
        held the average also loads its training weights into the model, with a warning. An empty
        state starts anew, with a warning. See :meth:`EMA.load_state_dict()
        <modkit.EMA.load_state_dict>`.

        Args:
            state_dict: The state; it is validated completely before anything changes.
            step: Number of calls of ``EMA.update()`` so far, for a state of another library or
                plain weights.

        Raises:
            TypeError: If ``step`` is not an int.
            ValueError: If the state is invalid or unknown, or of another number of averages; if
                ``step`` is negative, or is given with a state that is empty or of an ``EMA``.
            NameMismatchError: If the state does not fit the model.
            RuntimeError: If the model holds an average.
        """
        self.ema.load_state_dict(state_dict, step=step)


publish("modkit", EMACallback)
