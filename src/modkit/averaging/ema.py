"""``EMA``: averages of a model's parameters, stored by name, without a second model."""

import copy
import functools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn

import torch
from torch import Tensor
from typing_extensions import ParamSpec, Self, TypeVar

from modkit._interrupts import critical, uninterrupted
from modkit._messages import MSG_COPY_WRITTEN, MSG_NO_UPDATE, warn_user
from modkit._namespace import publish
from modkit._upstream import never_compiled
from modkit.averaging import batch_norm, foreign_states, state as ema_state
from modkit.averaging.engine import Engine
from modkit.averaging.optimizer_steps import OptimizerSteps
from modkit.averaging.options import Buffers, Device, EMAOptions, Names, Options, checked_count
from modkit.averaging.precision import OnNonfinite, Precision
from modkit.averaging.rules import Ema
from modkit.averaging.schedules import Decay, Decays, Schedule, schedules_of
from modkit.averaging.sharding import reshard
from modkit.averaging.swap import Pairing, active_swaps, any_swapped, exchanged, raw_values
from modkit.averaging.tensors import NamedTensors, check_writable, write, write_all


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["EMA", "EMAOptions"]

# So many writes to a parameter are training: creating and loading a model takes fewer.
_TRAINED: Final = 10

# The weight of the first model above which an average is not yet one of the training.
_LARGE_SHARE: Final = 0.1

_LATER: Final = "Call it outside of the block, or after restore()."

ModelT_co = TypeVar("ModelT_co", bound=torch.nn.Module, default=torch.nn.Module, covariant=True)
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def _section(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Run a method that makes tensors in one critical section, checks included."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        # Tensors that are made in inference mode could not be averaged outside of it. In this
        # order: leaving inference mode turns gradients on.
        with uninterrupted(), torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return run


class EMA(Generic[ModelT_co]):
    """Exponential moving averages of a model's parameters, stored by name.

    Call :meth:`update` after each optimizer step, or :meth:`attach` the optimizer once. To evaluate
    an average, swap it into the model with :meth:`applied`. The first update copies the parameters;
    each later one computes ``average = decay * average + (1 - decay) * parameter``, as mean teacher
    does (https://arxiv.org/abs/1703.01780, section 2). With the schedule ``Equal()`` that is
    stochastic weight averaging (https://arxiv.org/abs/1803.05407, algorithm 1).

    Tensors are matched by name, without the prefixes of DDP, ``torch.compile``, FSDP and activation
    checkpointing; tied tensors are averaged once. No update synchronizes with an accelerator,
    except with averages on another device, with ``on_nonfinite="raise"``, and the first one with
    ``"skip"``.

    All methods that use a model have these errors in common, before anything has changed; their own
    pages name them in short:

    - ``NameMismatchError``: names or shapes of the model are not those that are averaged.
      :meth:`rebind` adapts the averages to a model that has changed on purpose.
    - ``RuntimeError``, the model holds an average: inside :meth:`applied`, or between
      :meth:`copy_to` and :meth:`restore`, where the training weights are needed.
    - ``RuntimeError``, the model cannot be averaged: a parameter has no values yet, because it is
      uninitialized (lazy) or on the meta device, or torch has no kernels for its layout: sparse,
      nested and mkldnn parameters.
    - ``TypeError``: ``model`` is not a module, or is sharded by ``FullyShardedDataParallel``
      (FSDP1: use ``fully_shard``) or DeepSpeed ZeRO-3; ``index`` is not an int.
    - ``IndexError``: there is no average ``index``.

    Args:
        model: Model to track. It is neither copied nor modified.
        decay: Constant decay factor of one step, in [0, 1]. An average spans about
            ``1 / (1 - decay)`` steps. A list gives several averages, numbered by ``index`` from 0.
        schedule: Decay that changes, instead of ``decay``: a schedule of :mod:`modkit.schedules`, a
            function of ``n``, the number of steps since the average was a copy, or a list of them.
            Default, if ``decay`` is not given: ``CountWarmup(0.999)``, which has forgotten the
            first model within a few steps.
        update_after_step: Number of updates to ignore before the parameters are copied, 0 or more.
        update_every: Average once every ``update_every`` updates, 1 or more, with the product of
            the decays of these steps, such as ``decay ** update_every``.
        precision: ``"fp32"`` and ``"fp64"`` keep the average in at least that precision.
            ``"same"`` keeps the parameter's dtype: bf16 and fp16 averages stall for decays close to
            1. ``"stochastic"`` rounds stochastically (https://arxiv.org/abs/1502.02551, section
            3.1).
        device: Device of the averages. Default: that of each parameter. With ``"cpu"`` and a model
            on an accelerator, each update that averages waits for the step and copies the
            parameters to the host: use ``update_every``.
        buffers: ``"copy"``, ``"average"`` or ``"ignore"`` floating-point buffers, or a dict from
            globs of names to one of the three; the first glob that matches counts. Integer buffers
            have no average: they are copied, and ignored only if a glob says so. Buffers that are
            not persistent, such as caches and masks, are ignored unless a glob names them. Ignore a
            persistent one that an evaluation writes to.
        include: Globs of names, or a predicate: parameters to average. Default: all.
        exclude: Globs of names, or a predicate: parameters not to average.
        trainable_only: Average only parameters that require gradients at the first update. One that
            is frozen later is still averaged. One that is unfrozen later is a ``NameMismatchError``
            until :meth:`rebind`.
        on_nonfinite: ``"ignore"`` averages infinite and NaN parameters, ``"skip"`` skips the step,
            ``"raise"`` raises. On CPU a skipped step has no part in ``n_averaged`` and in the
            schedule; on accelerators it counts there, because reading the flag is a host sync.
        seed: Seed for stochastic rounding, to which the number of the step is added. XLA has no
            generators, so its 16-bit averages are rounded with noise of the host, which reads them
            at each update.
        process_group: The ranks that take, or skip, a step together, if ``on_nonfinite`` is not
            ``"ignore"``: all stages of a pipeline. It costs one all-reduce of one element. Default:
            the ranks that share a sharded tensor. A pickle does not hold it.

    Raises:
        TypeError: If ``model`` is refused, as above; if a number of steps is not an int, a decay is
            not a number, a schedule or a function, names are neither globs nor a predicate, or
            ``buffers`` is neither a policy nor a dict.
        ValueError: If ``decay`` and ``schedule`` are both given, a list of them is empty, a decay
            is outside of [0, 1], a number of steps is too small, an option is not one of its
            values, ``device`` is meta, ``seed`` is not an int of at most 64 bits, no parameter is
            selected, or a glob other than ``"*"`` matches no name; for a lazy model the first
            update checks the globs.
        RuntimeError: If torch does not know ``device``, or a module of the model contains itself.

    Warns:
        UserWarning: If a constant decay is above 0 and below 0.1, as a momentum is.

    Attributes:
        model: The model in training.
        step: Number of updates that were requested, those included that ``update_after_step`` and
            ``update_every`` skip.
        n_averaged: Number of models averaged so far, including the initial copy; on accelerators,
            including steps that ``on_nonfinite="skip"`` has skipped.
        schedules: The schedule of each average. An entry that is replaced counts from the next
            update on.
        update_after_step: The option, which counts until the first update that averages.
        update_every: The option; a new value counts from the next update on.

    Example:
        >>> from modkit import EMA, nn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ema = EMA(model, decay=0.75)
        >>> for value in 1.0, 2.0:
        ...     _ = nn.init.constant_(model.weight, value)
        ...     ema.update()
        >>> with ema.applied():
        ...     model.weight.item()
        1.25
        >>> model.weight.item()
        2.0
    """

    model: ModelT_co
    step: int
    n_averaged: int
    schedules: list[Schedule]
    update_after_step: int
    update_every: int

    def __init__(
        self,
        model: ModelT_co,
        decay: Decays = None,
        *,
        schedule: Decay | Sequence[Decay] | None = None,
        update_after_step: int = 0,
        update_every: int = 1,
        precision: Precision = "fp32",
        device: Device = None,
        buffers: Buffers = "copy",
        include: Names = None,
        exclude: Names = None,
        trainable_only: bool = False,
        on_nonfinite: OnNonfinite = "ignore",
        seed: int = 0,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        self.model = model
        self.update_after_step = checked_count("update_after_step", update_after_step, 0)
        self.update_every = checked_count("update_every", update_every, 1)
        self.schedules = schedules_of(decay, schedule)
        self.step = 0
        self.n_averaged = 0
        # The step at which the average was a copy of the model; None before.
        self._start: int | None = None
        # The weight of the first model in each average; None if it is unknown.
        self._first_shares: list[float] | None = None
        self._has_warned_of_first = False

        options = Options(
            include=include,
            exclude=exclude,
            buffers=buffers,
            trainable_only=trainable_only,
            precision=precision,
            device=None if device is None else torch.device(device),
            on_nonfinite=on_nonfinite,
            seed=seed,
            process_group=process_group,
        )
        self._engine = Engine(model, len(self.schedules), options)

        # Training weights that store() keeps, and the model's tensors that copy_to() then wrote to:
        # until restore() the model holds an average.
        self._stored: dict[str, Tensor] = {}
        self._overwritten: list[Tensor] = []
        # Copied buffers that a block has written to, each of which was warned of.
        self._written: set[str] = set()
        self._steps = OptimizerSteps()
        # How often the model had been written to; None once a training without updates was noticed.
        self._writes: int | None = self._engine.writes()
        # The step of the state that was loaded, and how often averages were written to the model
        # and out of it since the latest update, which does not train it.
        self._loaded_step = 0
        self._own_writes = 0

    def _check_restored(self, call: str, model: torch.nn.Module, remedy: str = _LATER) -> None:
        """Check that the model holds its training weights, not an average in their place.

        Args:
            call: The refused call with its class, such as ``EMA.update()``, for the error.
            model: The model to check.
            remedy: The remedy, a sentence.

        Raises:
            RuntimeError: If the model holds an average inside applied(), or between copy_to() and
                restore().
        """
        # Either of the two would average, save or train the average itself.
        is_inside = any_swapped(model)
        if is_inside or self._holds_copy(model):
            place = "inside applied()" if is_inside else "between copy_to() and restore()"
            raise RuntimeError(
                f"{call} was called {place}: the model holds the averaged weights. {remedy}"
            )

    def _holds_copy(self, model: torch.nn.Module) -> bool:
        """Return True if the model has parameters that ``copy_to`` has written an average to."""
        if not self._overwritten:
            return False
        # A forward of FSDP may have left full parameters in place of those that were written to.
        reshard(model.modules())
        return not set(map(id, self._overwritten)).isdisjoint(map(id, model.parameters()))

    def training_weights(self) -> dict[str, Tensor]:
        """Return the training weights while the model holds an average, by name; else nothing.

        It holds one inside :meth:`applied`, and between :meth:`copy_to` and :meth:`restore`.

        Returns:
            The tensors that were replaced, parameters and buffers, by canonical name. They are not
            copied; those of a sharded model inside :meth:`applied` are the clones that will be
            restored.

        Example:
            >>> from modkit import EMA, nn
            >>> model = nn.Linear(1, 1, bias=False)
            >>> ema = EMA(model)
            >>> ema.update()
            >>> with ema.applied():
            ...     list(ema.training_weights())
            ['weight']
            >>> ema.training_weights()
            {}
        """
        return {**raw_values(self.model), **(self._stored if self._overwritten else {})}

    @property
    def decay(self) -> float:
        """Decay of the latest step of the first average, for logs; 0.0 if that step was the copy.

        After an update that averaged, ``average == decay * before + (1 - decay) * parameter`` holds
        for it. With ``update_every=k`` it is the decay of ``k`` steps together, such as
        ``schedule.decay ** k``, until the next update that averages. It is 0.0 before the first
        update, while ``update_after_step`` delays it, and after it, because the first update
        copies. A step that ``on_nonfinite="skip"`` has skipped on CPU leaves it at that of the step
        before.

        It is computed from :attr:`schedules` at each access, without a host sync. The decay as it
        is configured is ``ema.schedules[0]``.

        Raises:
            ValueError: If the schedule returns a decay outside of [0, 1].
            AttributeError: If it is set. For another one, pass a schedule, or replace that of
                :attr:`schedules`.

        Example:
            >>> from modkit import EMA, nn
            >>> ema = EMA(nn.Linear(1, 1), schedule=lambda n: n / (n + 1))
            >>> decays = []
            >>> for _ in range(4):
            ...     ema.update()
            ...     decays.append(ema.decay)
            >>> decays
            [0.0, 0.5, 0.6666666666666666, 0.75]
        """
        if self._start is None:
            return 0.0
        every = self.update_every
        # The latest step that ``update_every`` divides, counted from the copy.
        latest = (self.step - self._start) // every * every
        return self.schedules[0].over(latest, every)

    @property
    def device(self) -> torch.device | None:
        """Device of the averages, read-only; None if each is where its parameter is."""
        return self._engine.options.device

    def __repr__(self) -> str:
        schedules = ", ".join(map(repr, self.schedules))
        counts = f"step={self.step}, n_averaged={self.n_averaged}"
        if self._first_shares is not None:
            counts += f", first_model={', '.join(f'{s:.1%}' for s in self._first_shares)}"
        return f"{type(self).__name__}({type(self.model).__name__}, {schedules}, {counts})"

    def _warn_of_first(self, call: str, index: int) -> None:
        """Warn once if an average that becomes final is still the model of the first update."""
        if self._first_shares is None or self._has_warned_of_first:
            return
        share = self._first_shares[index]
        # A plain mean of a few models has as much of each.
        if share <= max(_LARGE_SHARE, 1.01 / self.n_averaged):
            return
        self._has_warned_of_first = True
        warn_user(
            f"{call}: {share:.0%} of this average is the model of the first update: the decay of "
            f"{self.schedules[index]} is too close to 1 for {self.n_averaged} updates. Leave decay "
            "out, which warms it up, or pass a smaller one"
        )

    @never_compiled
    @_section
    def update(self, model: torch.nn.Module | None = None) -> None:
        """Update the averages with the present parameters; call it after ``optimizer.step()``.

        The first update copies, each later one averages; ``update_after_step`` and ``update_every``
        skip some. Copied buffers take the present values in each update that averages. If one of
        the errors below is raised, nothing has changed, :attr:`step` included.

        In compiled code it is one graph break.

        Args:
            model: Another model of the same names and shapes to take the parameters from. All of
                its names may have one more prefix, as in a wrapper of the tracked model, or one
                fewer.

        Raises:
            TypeError, NameMismatchError: See :class:`EMA`.
            RuntimeError: If the model holds an average or cannot be averaged, see :class:`EMA`; or,
                with ``on_nonfinite="raise"``, if a value is not finite.
            ValueError: If a schedule returns a decay outside of [0, 1]; in the first update also if
                ``trainable_only=True`` and no parameter requires gradients, or a glob matches no
                name of a model that was lazy.

        Warns:
            UserWarning: Once, if an attached optimizer has already updated the averages for this
                step.
        """
        source = self.model if model is None else model
        if active_swaps or self._overwritten:
            self._check_restored("EMA.update()", source)
        if self._steps.versions is not None and source is self.model:
            self._steps.warn_if_updated()

        # ``count`` is the schedule's ``n``: the number of steps since the average was a copy.
        step = self.step + 1
        start = self._start
        every = self.update_every
        count = 0 if start is None else step - start
        is_due = step > self.update_after_step if start is None else count % every == 0
        if not is_due:
            self.step = step
            return

        # Without calls of Python beside those of the schedules: this runs in every step.
        decays = [*map(operator.methodcaller("over", count, every), self.schedules)]
        taken = self._engine.step(source, Ema([*map(operator.sub, repeat(1.0), decays)]), count)

        # Counters change after the step: if that raises, the update has not taken place.
        if taken:
            if start is None:
                self._first_shares = [1.0] * len(decays)
            elif self._first_shares is not None:
                self._first_shares = list(map(operator.mul, self._first_shares, decays))
            self._start = step if start is None else start
            self.n_averaged += 1
            self._own_writes = 0
        elif start is not None:
            # Schedules count from here, so that a skipped step has no part in any of them. With
            # another ``update_every`` than before, it may stand for fewer calls.
            self._start = min(start + every, step + 1 - self.n_averaged)
        self.step = step

    @_section
    def rebind(self) -> None:
        """Adapt the averages to the model's present parameters: copy new ones, drop missing ones.

        A parameter that has another name now, because an adapter or a parametrization wraps its
        layer, keeps its average, if it is the same object with the same memory. If only the name is
        the same, it keeps its average too, unless the shape is another one. :attr:`step` and
        :attr:`n_averaged` stay; statistics of :meth:`update_bn` are dropped.

        Raises:
            TypeError: See :class:`EMA`.
            RuntimeError: If the model holds an average or cannot be averaged, see :class:`EMA`; or
                if a parameter is not finite, unless ``on_nonfinite`` is ``"ignore"``.
            ValueError: If no parameter is selected any more.

        Example:
            >>> from modkit import EMA, nn
            >>> model = nn.Sequential(nn.Linear(1, 1, bias=False))
            >>> ema = EMA(model)
            >>> ema.update()
            >>> _ = model.append(nn.Linear(1, 2, bias=False))
            >>> ema.rebind()
            >>> [name for name, _ in ema.named_averages()]
            ['0.weight', '1.weight']
        """
        self._check_restored("EMA.rebind()", self.model)
        self._engine.rebind()

    def attach(self, *optimizers: torch.optim.Optimizer) -> Self:
        """Update after each step that the optimizer takes, until :meth:`detach`.

        Pass all optimizers of the model at once: the averages are then updated when each has
        stepped, or one steps again. Save states after the last of them.

        Each outermost call of ``step()`` is one step, so accumulated gradients count once. These do
        not count: ``super().step()`` in a subclass, a step that raises, a step that a
        ``GradScaler`` skips, and the step by which ``torch.distributed.checkpoint`` allocates the
        state of an optimizer. A fused optimizer skips steps on the device, and they count, because
        reading the flag would be a host sync.

        While the model holds an average, inside :meth:`applied` or between :meth:`copy_to` and
        :meth:`restore`, ``optimizer.step()`` raises RuntimeError before it changes anything,
        because the step would be taken from the average. The errors of :meth:`update` come out of
        ``optimizer.step()``, after the parameters have changed. So does a RuntimeError if the
        optimizer trains other parameters since, as DeepSpeed's, whose steps write the model later:
        call :meth:`update` after them instead. An optimizer that is made later is not attached, and
        :meth:`applied` warns once if it has trained the model.

        Args:
            *optimizers: Optimizers of averaged parameters. Attach the optimizer itself, not a
                wrapper such as that of ``accelerator.prepare()``.

        Returns:
            The object itself.

        Raises:
            TypeError: If an object is not a ``torch.optim.Optimizer``, or does not run its hooks,
                so that its steps cannot be tracked. None is attached then.
            ValueError: If there is no optimizer, one is attached already or given twice, or one
                does not train an averaged parameter. None is attached then.

        Example:
            >>> import torch
            >>> from modkit import EMA, nn
            >>> model = nn.Linear(1, 1)
            >>> optimizer = torch.optim.SGD(model.parameters())
            >>> ema = EMA(model).attach(optimizer)
            >>> model(torch.ones(1, 1)).sum().backward()
            >>> optimizer.step()
            >>> ema.n_averaged
            1
        """
        averaged = self._engine.averaged_parameters
        self._steps.attach("EMA.attach()", optimizers, averaged, self._refuse_step, self.update)
        return self

    def _refuse_step(self) -> None:
        """Raise RuntimeError before an optimizer takes a step from the average."""
        remedy = "End the block, or call restore(), first; to train the average, call detach()."
        self._check_restored("EMA: optimizer.step()", self.model, remedy)

    def detach(self) -> None:
        """Stop updating after the steps of attached optimizers; without effect if there are none.

        If only some of several optimizers have stepped in this training step, it does not count.
        """
        self._steps.detach()

    def named_averages(self, index: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over names and tensors of an average, and of what is copied with it.

        Args:
            index: Index of the average.

        Returns:
            Pairs of canonical name and tensor, none before the first update: averages in the order
            of the model's parameters and buffers, then copied buffers, then the statistics of
            :meth:`update_bn`. Averages have the shape of the parameter, and the dtype that
            ``precision`` gives them. They are not copied, so that a write changes the
            average.

        Raises:
            IndexError, TypeError: See :class:`EMA`.

        Example:
            >>> from modkit import EMA, nn
            >>> ema = EMA(nn.BatchNorm1d(1, affine=True))
            >>> ema.update()
            >>> [name for name, _ in ema.named_averages()]
            ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
        """
        return iter(self._engine.named(index).items())

    @contextmanager
    def applied(self, model: torch.nn.Module | None = None, *, index: int = 0) -> Generator[None]:
        """Swap an average into the model for the length of a ``with`` block; blocks may be nested.

        The swap exchanges storage: nothing is copied unless dtype or device differ, except weights
        of recurrent layers on CUDA, which cuDNN wants in one piece. Parameters stay the same
        objects. Before the first update the block sees the training weights. The training weights
        are restored whatever ends the block, Ctrl-C included. A state that is saved inside contains
        them too, and :meth:`load_state_dict` restores them. A ``backward()`` after the block, of a
        graph that was recorded inside, computes gradients with the training weights.

        Args:
            model: Another model to swap into, such as the wrapped one in distributed training.
            index: Index of the average.

        Yields:
            Nothing: the model holds the average.

        Raises:
            IndexError, TypeError, NameMismatchError: See :class:`EMA`.
            RuntimeError: At the end, if the block has written to averaged tensors, and so to the
                average, or to statistics of batch normalization; has cast or moved them; or has
                replaced parameters or their modules, which are put back, without hooks and
                parametrizations that computed them. The training weights are restored. An
                assignment to ``parameter.data`` ends with the block. A block that raised gets a
                note instead.

        Warns:
            UserWarning: Once, if the model was trained since this object was created or loaded, or
                since an attached optimizer's last step, and there has been no update: the average
                lacks these steps. :meth:`copy_to`, :attr:`module` and :meth:`averaged_model` warn
                too. Fused optimizers are not
                noticed, because torch does not count their writes. If the block has written to or
                replaced a buffer that is copied, not averaged, once for each: the model has its
                training value again after the block, and the next update renews the copy.
        """
        pairing = self._pairing(self.model if model is None else model, index)
        if pairing.by_element:
            # The elements are written at both ends of the block.
            self._own_writes += 2
        with exchanged(pairing, self._warn_of_written):
            yield

    def _pairing(self, model: torch.nn.Module, index: int) -> Pairing:
        """Pair an average with a model, or take the pairing of the latest calls."""
        if self.step == self._loaded_step or self._steps.versions is not None:
            self._warn_of_no_update()
        engine = self._engine
        # With its type: True is not an index.
        key = (type(index), index, engine.begun)
        return engine.swaps.get(model, key, lambda: engine.pair(model, index))

    def _warn_of_no_update(self) -> None:
        """Warn once if the model was trained since the last update, before it or by attach()."""
        if self._writes is None:
            return
        is_new = self.step == self._loaded_step
        writes = self._engine.writes() - self._writes if is_new else self._steps.writes()
        if writes - self._own_writes >= _TRAINED:
            self._writes = None
            warn_user(MSG_NO_UPDATE)

    def _warn_of_written(self, names: Iterable[str]) -> None:
        """Warn once of each copied buffer that a block has written to."""
        new = [name for name in names if name not in self._written]
        self._written.update(new)
        for name in new:
            warn_user(MSG_COPY_WRITTEN.format(name=name))

    @critical
    def copy_to(self, model: torch.nn.Module | None = None, *, index: int = 0) -> None:
        """Copy an average into a model; no effect before the first update.

        After :meth:`store`, and until :meth:`restore`, saved states hold the training weights too,
        and updates and steps of attached optimizers are refused. Without :meth:`store` the training
        weights are lost. Either all tensors are written, or none. Values are cast to the dtypes of
        the model.

        Args:
            model: Model to copy into, of the same names and shapes. Default: the model itself.
            index: Index of the average.

        Raises:
            IndexError, TypeError, NameMismatchError: See :class:`EMA`.
            RuntimeError: If a tensor of the model cannot be written to: it is expanded, on the meta
                device, or an inference tensor outside of inference mode.

        Example:
            >>> from modkit import EMA, nn
            >>> model = nn.Linear(1, 1, bias=False)
            >>> ema = EMA(model, decay=0.75)
            >>> for value in 1.0, 2.0:
            ...     _ = nn.init.constant_(model.weight, value)
            ...     ema.update()
            >>> ema.store()
            >>> ema.copy_to()
            >>> model.weight.item()
            1.25
            >>> ema.restore()
            >>> model.weight.item()
            2.0
        """
        pairing = self._pairing(self.model if model is None else model, index)
        tensors = pairing.tensors
        check_writable(pairing.names, tensors)
        write_all(tensors, pairing.values)

        # ``model`` may be a wrapper of the model, or another model.
        own = {id(member.tensor) for member in self._engine.own().all().values()}
        written = [tensor for tensor in tensors if id(tensor) in own]
        self._own_writes += bool(written)
        if self._stored:
            self._overwritten += written

    @_section
    def store(self) -> None:
        """Store a copy of what :meth:`copy_to` replaces, until :meth:`restore`.

        That is, of all averages: averaged parameters and buffers, copied buffers, and batch
        normalization statistics; before the first update all tensors. A second call replaces what
        the first one has stored. See :meth:`copy_to` for an example.

        Raises:
            RuntimeError: If the model holds an average, see :class:`EMA`: that would be stored as
                the training weights.
            NameMismatchError: If the model has lost an averaged tensor.
            ValueError: If a parameter is uninitialized (lazy).
        """
        self._check_restored("EMA.store()", self.model)
        named = self._engine.own()
        averages = [self._engine.named(index) for index in range(len(self.schedules))]
        names = dict.fromkeys(chain.from_iterable(averages)) or named.all()
        self._stored = {name: named.tensor(name).clone() for name in names}

    @critical
    def restore(self) -> None:
        """Copy the training weights of :meth:`store` back into the model, and drop them.

        If the model was trained or loaded after :meth:`copy_to`, that change is lost. See
        :meth:`copy_to` for an example.

        Raises:
            RuntimeError: If nothing is stored.
            NameMismatchError: If the model has lost a tensor that is stored.
        """
        if not self._stored:
            raise RuntimeError("EMA.restore(): nothing is stored. Call store() before copy_to().")
        named = self._engine.own()
        write_all([named.tensor(name) for name in self._stored], [*self._stored.values()])
        self._own_writes += 1
        self._stored = {}
        self._overwritten = []

    def update_bn(
        self,
        loader: Iterable[Any],
        device: Device = None,
        *,
        index: int = 0,
        call: Callable[[Any, Any], object] | None = None,
    ) -> None:
        """Compute the batch normalization statistics of an average in one pass over the data.

        They belong to this average: :meth:`applied`, :attr:`module`, :meth:`averaged_model`,
        :meth:`copy_to` and :meth:`state_dict` contain them, whatever ``buffers`` is. The next
        update that averages drops them, and the statistics are again those that ``buffers``
        selects, so call it before each evaluation. The model in training does not change; the pass
        runs on a copy. A model without batch normalization is left alone.

        With the mean ``m_b`` and the unbiased variance ``v_b`` of a channel in batch ``b``, the
        running mean and variance are the plain means of ``m_b`` and ``v_b`` over the batches, as in
        ``torch.optim.swa_utils.update_bn`` (https://arxiv.org/abs/1502.03167, algorithm 2).

        Each rank of a distributed run computes statistics of its own batches. Layers of
        ``torch.nn.SyncBatchNorm`` combine those of all ranks, which must have equally many batches.

        Args:
            loader: Yields batches: a tensor, or a list or tuple that begins with the model's input.
            device: Device that inputs are moved to.
            index: Index of the average.
            call: Function of the model and a batch that calls the model, for batches of keywords
                or several inputs, as in ``call=lambda model, batch: model(**batch)``. Default: the
                model is called with the batch, or the first element of a list or tuple.

        Raises:
            IndexError, NameMismatchError: See :class:`EMA`.
            TypeError: If ``index`` is not an int, or the loader cannot be iterated over.
            RuntimeError: If the model holds an average, see :class:`EMA`, or before the first
                update.
            ValueError: If the loader is empty, or ``device`` and ``call`` are both given. Nothing
                has been changed.
            Exception: Whatever the loader, the model, or ``copy.deepcopy`` of it raises. Nothing
                has been changed.

        Example:
            >>> import torch
            >>> from modkit import EMA, nn
            >>> ema = EMA(nn.BatchNorm1d(1))
            >>> ema.update()
            >>> ema.update_bn([torch.tensor([[2.0], [4.0]])])
            >>> ema.module.running_mean
            tensor([3.])
        """
        self._engine.check_index(index)
        self._check_restored("EMA.update_bn()", self.model)
        if not self._engine.begun:
            raise RuntimeError(
                "EMA.update_bn(): there is no average before the first update. Call update() first."
            )
        if not batch_norm.layers_of(self.model):
            return

        # Tensors that are made in inference mode could not be averaged outside of it. The pass runs
        # on a copy, which the user may interrupt, and only its end is a critical section.
        with torch.inference_mode(False), torch.no_grad():
            model = self.averaged_model(index)
            batch_norm.recompute(loader, model, device, call)
            with uninterrupted():
                statistics = batch_norm.statistics_of(NamedTensors(model))
                self._engine.averages[index].set_statistics(statistics)
                self._engine.follow()

    @_section
    def averaged_model(self, index: int = 0) -> ModelT_co:
        """Return a copy of the model with averaged weights, in eval mode, without gradients.

        It is independent of the averages. What is not averaged, and everything before the first
        update, has the model's present values.

        Args:
            index: Index of the average.

        Returns:
            A deep copy of the model, with its class, dtypes and devices.

        Raises:
            IndexError, TypeError, NameMismatchError: See :class:`EMA`.
            Exception: Whatever ``copy.deepcopy`` raises for the model. A sharded model cannot be
                copied: use :meth:`applied`, or ``modkit.distributed.export_average``.

        Example:
            >>> from modkit import EMA, nn
            >>> ema = EMA(nn.Linear(1, 1))
            >>> ema.update()
            >>> model = ema.averaged_model()
            >>> model.training, model.weight.requires_grad
            (False, False)
        """
        self._engine.check_index(index)
        self._warn_of_no_update()
        model: ModelT_co = self._engine.averaged_model(index)
        return model

    @property
    @_section
    def module(self) -> ModelT_co:
        """A copy of the model with the first average, in eval mode, without gradients.

        It shares memory with averages of the model's dtype and device, so a reference follows all
        later updates and loaded states. Tensors of another dtype or device, subclasses that wrap
        other tensors, and what is not averaged, are copied at each access; before the first update
        these are all tensors. If names or shapes of the model change, the next access makes another
        copy, and earlier references no longer follow.

        On CUDA, cuDNN compacts shared weights of recurrent layers at each call, with a warning;
        :meth:`applied` and :meth:`averaged_model` have them in one piece.

        BatchNorm statistics are those of the model, or their average: see ``buffers``. For a
        teacher in training mode, with statistics of its own, use :meth:`copy_to`; the mode that
        ``module.train()`` sets is kept.

        Raises:
            NameMismatchError: See :class:`EMA`.
            Exception: Whatever ``copy.deepcopy`` raises for the model. A sharded model cannot be
                copied: use :meth:`applied`.

        Example:
            >>> from modkit import EMA, nn
            >>> model = nn.Linear(1, 1, bias=False)
            >>> ema = EMA(model, decay=0.75)
            >>> module = ema.module
            >>> for value in 1.0, 2.0:
            ...     _ = nn.init.constant_(model.weight, value)
            ...     ema.update()
            >>> module.weight.item()
            1.25
        """
        self._pairing(self.model, 0)
        module: ModelT_co = self._engine.module()
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call :attr:`module`, the averaged model in eval mode.

        The outputs differ from those of a momentum teacher in training mode, which normalizes by
        the statistics of its batch: see "Momentum teachers" in the guide to weight averaging.

        Args:
            *args: Positional arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            What the model returns.

        Raises:
            Exception: Whatever reading :attr:`module`, or the model itself, raises.
        """
        return self.module(*args, **kwargs)

    @critical
    def state_dict(self) -> dict[str, Any]:
        """Return all that the next update depends on: numbers, strings and tensors, not copied.

        While the model holds an average, inside :meth:`applied` and between :meth:`copy_to` and
        :meth:`restore`, it includes the training weights.

        Returns:
            A dict that ``torch.save`` writes, and ``torch.load`` reads with ``weights_only=True``:

            - ``"version"`` of the format; ``"step"``, ``"n_averaged"``, ``"update_every"`` and
              ``"update_after_step"``; ``"start"``, the step at which the average was a copy, or
              None;
            - ``"schedules"``: name and fields of each schedule;
            - ``"versions"``: those of the model's modules that are not 1, by path, and the model's
              own, by which :mod:`modkit.migrations` finds what to migrate;
            - ``"first_shares"``: the weight of the first model in each average; None if unknown;
            - ``"averages"``: for each average its ``"tensors"`` and, after :meth:`update_bn`,
              ``"statistics"``;
            - ``"buffers"``: the copied buffers;
            - ``"raw"``: the training weights, if the model holds an average.
        """
        state: dict[str, Any] = {
            "version": ema_state.VERSION,
            "start": self._start,
            "step": self.step,
            "n_averaged": self.n_averaged,
            "update_every": self.update_every,
            "update_after_step": self.update_after_step,
            "schedules": [schedule.to_config() for schedule in self.schedules],
            "versions": ema_state.versions_of(self.model),
            "first_shares": self._first_shares,
            **self._engine.state_dict(),
        }

        # The model's own state holds the average then, and only this one the training weights.
        raw = self.training_weights()
        if raw:
            state["raw"] = raw
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *, step: int | None = None) -> None:
        """Load the state of an ``EMA``, averages of another library, or plain averaged weights.

        Averaging resumes with bitwise identical results. Schedule, ``update_every`` and
        ``update_after_step`` are those of the state, with a warning where they differ. Device and
        precision stay. A state of an older version migrates as the model's does, see
        :mod:`modkit.migrations`. Supported are torch's ``AveragedModel``, timm's ``ModelEmaV3``,
        diffusers' ``EMAModel``, ema-pytorch, torch_ema and Lightning. An empty state starts anew,
        with a warning. A state from inside :meth:`applied` also loads its training weights into the
        model, whose own state holds the average then: load that one first.

        timm and plain weights have no counter of updates. Without ``step`` they continue as after
        the first update, with a warning if they replace an average, and unless the schedule is
        constant and ``update_after_step`` 0.

        Args:
            state_dict: The state; it is validated completely before anything changes. Tensors are
                copied.
            step: Number of calls of :meth:`update` so far, for a state of another library or plain
                weights: the value of :attr:`step`, from which ``n_averaged`` follows with
                ``update_after_step`` and ``update_every``. It replaces the counter of the state.

        Raises:
            TypeError: If ``step`` is not an int.
            ValueError: If the state is not a mapping, invalid, of an unknown kind or a newer
                version, cannot be migrated (``MigrationError``), holds another number of averages,
                or values that are not finite unless ``on_nonfinite="ignore"``; if ``step`` is
                negative, or is given with a state that is empty or of an ``EMA``, which holds its
                own counter.
            NameMismatchError: If names or shapes of the state are not those of the model.
            RuntimeError: If the model holds an average or cannot be averaged, see :class:`EMA`.

        Warns:
            UserWarning: If the state is empty, changes an option, has no counter although that
                matters or the state replaces an average, or loads training weights into the model.

        Example:
            >>> from modkit import EMA, nn
            >>> model = nn.Linear(1, 1)
            >>> ema = EMA(model, decay=0.9)
            >>> ema.update()
            >>> resumed = EMA(model, decay=0.9)
            >>> resumed.load_state_dict(ema.state_dict())
            >>> resumed
            EMA(Linear, Constant(decay=0.9), step=1, n_averaged=1, first_model=100.0%)
        """
        self._check_restored("EMA.load_state_dict()", self.model)
        if step is not None:
            checked_count("step", step, 0)

        current = ema_state.LoadedState(
            step=self.step,
            start=self._start,
            n_averaged=self.n_averaged,
            schedules=self.schedules,
            averages=[],
            update_every=self.update_every,
            update_after_step=self.update_after_step,
        )
        if ema_state.is_own(state_dict):
            loaded = ema_state.read(state_dict, current, step)
        else:
            loaded = foreign_states.read(state_dict, self.model, current, step)
        self._load(loaded)

        if loaded.raw:
            warn_user(
                "EMA: the state was saved inside applied(), or between copy_to() and restore(); "
                "its training weights are loaded into the model. Load the state of the model "
                "before this one, because it holds the average"
            )

    @_section
    def _load(self, loaded: ema_state.LoadedState) -> None:
        """Load a valid state; it is compared with the model before anything changes."""
        # Another thread may have swapped an average in since.
        self._check_restored("EMA.load_state_dict()", self.model)
        named = NamedTensors(self.model)
        loaded = ema_state.migrated(loaded, self.model)
        ema_state.check_raw(loaded.raw, named)
        raw = [(named.tensor(name), value) for name, value in loaded.raw.items()]
        if loaded.start is None:
            self._engine.reset()
        else:
            self._engine.load(loaded, named)
        for tensor, value in raw:
            write(tensor, value)

        self.step = self._loaded_step = loaded.step
        self._start = loaded.start
        self.n_averaged = loaded.n_averaged
        self.schedules = loaded.schedules
        self._first_shares = loaded.first_shares
        self.update_every = loaded.update_every
        self.update_after_step = loaded.update_after_step
        self._steps.restart()
        self._writes = self._engine.writes()

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "EMA: copy.copy() would share the averages, with counters of its own. Use "
            "copy.deepcopy((model, ema)) for an independent pair, or averaged_model()."
        )

    @critical
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # As ``copy.deepcopy`` does, while no other thread changes the averages.
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # A copied model would hold the average for good.
        remedy = "Copy it outside, or take its state_dict(), which has the training weights too."
        self._check_restored("copying or pickling an EMA", self.model, remedy)
        return vars(self)


publish("modkit", EMA)
