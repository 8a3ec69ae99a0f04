"""``AveragedModel``: torch's face of the averaging engine."""

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import (
    AveragedModel as _TorchAveragedModel,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)
from typing_extensions import TypeVar, override

from modkit._messages import add_note
from modkit._upstream import foreach_devices, make_parameter
from modkit.averaging.averages import Average, flat_buffers
from modkit.averaging.copies import Copies
from modkit.averaging.interrupts import uninterrupted
from modkit.averaging.named_tensors import Member, NamedTensors
from modkit.averaging.names import canonical_names, check_match
from modkit.averaging.options import Buffers, Names, Options
from modkit.averaging.plan import Cache, Group, Plan
from modkit.averaging.precision import (
    OnNonfinite,
    Precision,
    Weight,
    check_finite,
    first_nonfinite,
    is_averaged,
    lerp_one_,
    reads_are_free,
    where_,
)
from modkit.averaging.swap import copy_of
from modkit.nn.module import Module
from modkit.optim.averaging_functions import AvgFn, MultiAvgFn, is_known


ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)

_swa_ = get_swa_multi_avg_fn()
_swa_of = get_swa_avg_fn()


class AveragedModel(_TorchAveragedModel, Module, Generic[ModelT]):
    """Running average of a model's weights, as a model of its own.

    Use it for stochastic weight averaging (SWA, https://arxiv.org/abs/1803.05407) and exponential
    moving averages (EMA). The averaged copy is the attribute ``module``; calling the averaged model
    calls that copy. The first ``update_parameters`` copies the weights, each later one averages.
    Averaging functions are not part of ``state_dict()``: pass them again to load an average.

    Args:
        model: Model to average. It is deep-copied and not modified.
        device: Device of the average. Default: that of the model.
        avg_fn: Returns the new average from the averaged tensor, the model's tensor and the number
            of models averaged so far. Default: the equal average.
        multi_avg_fn: Averages lists of tensors of one device and dtype in place, instead of ``avg_fn``.
        use_buffers: Whether buffers are averaged. If False they are copied: call ``update_bn``
            at the end of training.

    modkit: Tensors are paired by name, and a model that does not match is refused before anything is
    written. Integer, boolean and quantized buffers are copied, also with ``use_buffers=True``, and so
    are buffers whose shape has changed. An update does not synchronize with the accelerator. The model
    may be lazy, may have another dtype than the average, and may hold results of autograd or its own
    average. With the averaging functions of this module, an average can be pickled. On CPU, small
    averages share memory, so their storages cannot be resized. ``AveragedModel[Net].module`` is a
    ``Net``.

    Keyword Args:
        precision: See ``modkit.EMA``. The averaged model computes in the dtype of the average, and an
            update after it was cast to fewer bits than ``"fp32"`` or ``"fp64"`` promise is refused;
            ``"compensated"`` keeps the error terms in the child module ``compensation``.
        on_nonfinite: See ``modkit.EMA``. A skipped step counts only if ``n_averaged`` is in host
            memory and the model on an accelerator.
        buffers: Policy of ``EMA``, instead of ``use_buffers``.
        include: Globs of names, or a predicate: parameters to average. The others are copied.
        exclude: Globs of names, or a predicate: parameters to copy.
        trainable_only: Average only parameters that require gradients now, and copy the others.
        seed: Seed for stochastic rounding.

    Raises:
        AssertionError: If both averaging functions are given, as in torch.
        ValueError: If an option is invalid, or a glob other than ``"*"`` matches no name; for a lazy model
            the first update checks the globs.

    Attributes:
        module: The averaged copy, typed by the class of ``model``.
        n_averaged: Buffer, a 0-dimensional ``int64`` tensor: number of models averaged so far. An
            update copies the model at 0, averages above, and only counts below.

    Example:
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        >>> ema.update_parameters(model)
    """

    module: ModelT
    n_averaged: Tensor
    avg_fn: AvgFn | None
    multi_avg_fn: MultiAvgFn | None
    use_buffers: bool
    compensation: Module

    def __init__(
        self,
        model: ModelT,
        device: int | torch.device | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        use_buffers: bool = False,
        *,
        precision: Precision = "same",
        on_nonfinite: OnNonfinite = "ignore",
        buffers: Buffers | None = None,
        include: Names = None,
        exclude: Names = None,
        trainable_only: bool = False,
        seed: int = 0,
    ) -> None:
        # Torch's class is a base only for ``isinstance``: its own initialization is not used.
        super(_TorchAveragedModel, self).__init__()
        if avg_fn is not None and multi_avg_fn is not None:
            message = "Only one of avg_fn and multi_avg_fn should be provided"
            raise AssertionError(message)
        if use_buffers and buffers is not None:
            raise ValueError(
                f"AveragedModel: give use_buffers or buffers, not both: got True and {buffers!r}"
            )
        options = Options(
            precision=precision,
            buffers="copy" if buffers is None else buffers,
            include=include,
            exclude=exclude,
            on_nonfinite=on_nonfinite,
            seed=seed,
            copy_rest=True,
            integers=True,
            owner="AveragedModel",
        )
        options.check_globs(model)
        parameters = NamedTensors(model).parameters.items() if trainable_only else ()
        frozen = frozenset(name for name, one in parameters if not one.tensor.requires_grad)
        self._runtime = _Runtime(options, frozen)
        self._device = device
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn
        self.use_buffers = use_buffers
        if precision in {"stochastic", "compensated"} and self._has_own_function():
            raise ValueError(
                f"AveragedModel: precision={precision!r} works with get_ema_multi_avg_fn(), "
                "get_swa_multi_avg_fn() or no averaging function"
            )
        # Tensors that are made in inference mode could never be updated outside of it.
        with torch.inference_mode(False):
            self.module = self._copy_of(model)
            self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))
            if precision == "compensated":
                self.compensation = Module()
                named = NamedTensors(self.module)
                members = {} if named.has_lazy() else named.all()
                self._errors_for({name: member.tensor for name, member in members.items()})

    def _has_own_function(self) -> bool:
        """Return True for averaging functions that the engine has no kernel for."""
        rule = self.multi_avg_fn
        return self.avg_fn is not None if rule is None else not is_known(rule)

    def _copy_of(self, model: ModelT) -> ModelT:
        """Return a copy of the model, on the device and in the dtypes of the average."""
        options = self._runtime.options
        precision = options.precision
        copies: dict[int, Tensor] = {}
        is_flat = precision not in {"compensated", "stochastic"} and not self._has_own_function()
        if is_flat and str(self._device) in {"None", "cpu"} and hasattr(model, "parameters"):
            plain = {
                str(number): parameter
                for number, parameter in enumerate(model.parameters())
                if type(parameter) is torch.nn.Parameter
            }
            self._runtime.average.flats = flat_buffers(
                plain, options, lambda name, one: make_parameter(one, plain[name].requires_grad)
            )
            with torch.no_grad():
                for flat in self._runtime.average.flats:
                    flat.fill(plain)
                    ids = [id(plain[name]) for name in flat.names]
                    copies.update(zip(ids, flat.tensors, strict=True))
        copy = copy_of(model, copies)
        if self._device is not None:
            try:
                copy = copy.to(self._device)
            except TypeError as error:
                if callable(cast("object", self._device)):
                    add_note(error, "device is an averaging function: pass it as multi_avg_fn=")
                raise
        if precision != "same":

            def widened(one: Tensor) -> Tensor:
                return one.to(options.kept_dtype(one.dtype))

            cast("Any", copy)._apply(widened)
        return copy

    @override
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Update the average with the present weights of a model, on any device.

        modkit: Tensors are paired by name, not by position, and are not broadcast; nothing is written
        unless all of them match. Names are compared without the parts that ``torch.compile``,
        data-parallel and checkpoint wrappers add, and without one prefix that all names have because
        the model, or the average, is in a wrapper. Averaging functions get a copy of the count. If the
        count is on an accelerator, they are also called in updates that copy, with a count of 1, and
        the result is not used.

        Call it after ``optimizer.step()`` (EMA) or at the end of an epoch (SWA).

        Args:
            model: The model in training, or a wrapper of it.

        Raises:
            NameMismatchError: If names or shapes are not those of the average.
            RuntimeError: If a value is not finite, with ``on_nonfinite="raise"``.
            TypeError: If ``model`` has parameters, but is not a module.
        """
        # Whatever has no parameters is refused in torch's words.
        model.parameters  # noqa: B018
        if torch.compiler.is_compiling():
            self._update_traced(model)
            return
        runtime, counter = self._runtime, self.n_averaged
        # Writes through ``.data``, by collectives and other processes leave no trace, so no number on the
        # host can stand for the buffer. Where reading it is a host sync, the device decides.
        on_device = not (reads_are_free(counter.device) or counter.is_meta)
        count: Any = counter.detach() if on_device else counter.item()
        first_on_host = not on_device and count == 0
        # Functions of the user get the tensors one by one, or as lists.
        flat = not self._has_own_function()
        key = id(self.module), self.use_buffers, flat
        plan: Plan = runtime.plans.get(model, key, lambda: self._plan(model, flat=flat))
        options = runtime.options
        policy = options.on_nonfinite
        if policy == "raise":
            check_finite("AveragedModel", plan.currents)
        elif policy == "skip" and first_on_host and first_nonfinite(plan.currents) is not None:
            # The first update of an average is the only one that reads a flag on the host.
            return
        if options.precision == "stochastic":
            # A seed for each step is all the state that there is.
            runtime.average.seed(options.seed + runtime.counter.read(counter))

        taken: bool | Tensor = True
        with uninterrupted():
            # As in torch, an update copies at zero, averages above, and only counts below.
            if on_device or count >= 0:
                taken = plan.step(lambda group, finite: self._step(group, count, finite), policy)
                plan.mark_written()
            with torch.no_grad():
                plan.copies.run()
            # A count on the host does not wait for a flag on the device.
            runtime.counter.advance(counter, taken if on_device else taken is not False)

    def _step(self, group: Group, count: int | Tensor, finite: Tensor | None) -> None:
        """Take one step of a group; a count or a flag in device memory is not read on the host."""
        averages, currents = group.averages[0], group.currents
        device = averages[0].device
        first, taken = None, finite
        weight: Weight | None = 1.0
        number = self.n_averaged
        if isinstance(count, Tensor):
            first, taken = _flags(count, finite, device)
            # Other counts are masked: what is computed for them is not used.
            number = count = count.clamp(min=1).to(device)
        if first is not None or count > 0:
            weight = self._weight(count, averages[0])

        if weight is not None:
            with torch.no_grad():
                group.step([weight], taken, first)
            return

        before = [] if taken is None else [one.detach().clone() for one in averages]
        targets = [one.detach() for one in averages]
        sources = [
            one.detach().to(target.device) for one, target in zip(currents, targets, strict=True)
        ]
        if self.multi_avg_fn is not None:
            self.multi_avg_fn(targets, sources, number.to(device, copy=True))
        elif self.avg_fn is not None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(self.avg_fn(target, source, number.to(device, copy=True)))
        elif has_foreach_kernels(device):
            _swa_(averages, currents, number)
        else:
            _swa_step(averages, currents, count)

        if taken is not None:
            where_(~taken.to(device), targets, before)
        if first is not None:
            where_(first, targets, sources)

    def _weight(self, count: Tensor | int, average: Tensor) -> Weight | None:
        """Return how far a step moves; None for other functions and torch's rule on CPU."""
        rule = self.multi_avg_fn
        if not is_averaged(average) or self._has_own_function():
            return None
        if is_known(rule):
            return _swa_weight(count) if rule.decay is None else 1 - rule.decay
        exact = self._runtime.options.precision in {"stochastic", "compensated"}
        fused = has_foreach_kernels(average.device)
        return _swa_weight(count) if fused or exact else None

    def _update_traced(self, model: torch.nn.Module) -> None:
        """Take a first or a later step in operations that can be compiled: nothing reads the count."""
        averages, currents, copies, _ = self._paired(model)
        counter = self.n_averaged
        for name, found in currents.items():
            target = averages[name].detach()
            source = found.detach().to(target.device)
            first, later = _flags(counter, None, target.device)
            # Other counts are masked: what is computed for them is not used.
            count = counter.clamp(min=1).to(target.device)
            weight = self._weight(count, target)
            before, value = target.clone(), target
            if weight is not None:
                lerp_one_(target, source, weight)
            elif self.multi_avg_fn is not None:
                self.multi_avg_fn([target], [source], count)
            else:
                value = (self.avg_fn or _swa_of)(target, source, count)
            value = torch.where(later, value, before)
            target.copy_(torch.where(first, source.to(value.dtype), value))
        copies.run_traced()
        counter.add_(1)

    def _plan(self, model: torch.nn.Module, *, flat: bool) -> Plan:
        if NamedTensors(self.module).has_lazy() and not NamedTensors(model, self).has_lazy():
            # The copy was made before the model had got its shapes.
            self._runtime.options.check_globs(model)
            self.module = self._copy_of(cast("ModelT", model))
        averages, currents, copies, models = self._paired(model)
        average = self._runtime.average
        average.tensors = averages
        if self._runtime.options.precision == "compensated":
            average.errors = self._errors_for(averages)
        average.expose()
        names = {id(tensor): name for name, tensor in averages.items()}
        for flat_buffer in average.flats:
            flat_buffer.rename(names)
        more, buffers = averages.values(), self.use_buffers
        return Plan(
            model, [average], currents, copies, models, more=more, flat=flat, buffers=buffers
        )

    def _paired(
        self, model: torch.nn.Module
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Copies, tuple[NamedTensors, NamedTensors]]:
        """Pair the copy with a model: averages, and current values, by name; copies; both models."""
        if not hasattr(model, "_modules"):
            raise TypeError(
                "AveragedModel.update_parameters(): model must be a torch.nn.Module, got "
                f"{type(model).__name__}. Tensors are paired by the names that modules give them."
            )
        kept = NamedTensors(self.module)
        found = NamedTensors(model, leave_out=self, like=kept)
        _check_pairs(kept, found)
        options = self._runtime.options
        if self.use_buffers:
            options = replace(options, buffers="average")
        averaged, copied = options.split(kept)
        averages: dict[str, Tensor] = {}
        currents: dict[str, Tensor] = {}
        for name, target in averaged.items():
            source, member = found.member(name), cast("Member", kept.member(name))
            # The copy may be frozen as a whole, so what counts is what the model was when copied.
            if (
                source is None
                or name in self._runtime.frozen
                or not (member.is_parameter or is_averaged(source.tensor))
                or target.shape != source.tensor.shape
            ):
                copied.append(member)
            else:
                remedy = "Cast the average back, or a copy of it."
                options.check_width(f"AveragedModel: {name} was cast to", target.dtype, remedy)
                averages[name], currents[name] = target, source.tensor
        pairs: list[tuple[dict[str, Any], str, Member]] = []
        for place in (*copied, *kept.empty.values()):
            source = found.member(place.name) or found.empty.get(place.name)
            if source is not None:
                pairs.append((cast("dict[str, Any]", place.registry), place.key, source))
        return averages, currents, Copies(pairs, follow=False), (kept, found)

    def _errors_for(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the error terms of averages: buffers, named with / for a dot, that start at zero."""
        terms: dict[str, Tensor] = {}
        for name, tensor in averages.items():
            key = name.replace(".", "/")
            term = self.compensation._buffers.get(key)
            known = term is not None and (term.shape, term.device) == (tensor.shape, tensor.device)
            if is_averaged(tensor) and not known:
                with torch.inference_mode(False), torch.no_grad():
                    term = torch.zeros_like(tensor, requires_grad=False)
                    self.compensation.register_buffer(key, term)
            if term is not None:
                terms[name] = term
        return terms

    def export_state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights and buffers under the names of the model without wrappers."""
        state: dict[str, Tensor] = self.module.state_dict()
        names = canonical_names(state)
        return {names[name]: tensor for name, tensor in state.items()}


class _Runtime:
    """Unsaved state for the updates of an averaged model. Copies are empty."""

    def __init__(self, options: Options, frozen: frozenset[str] = frozenset()) -> None:
        self.options = options
        # Parameters that ``trainable_only`` leaves out.
        self.frozen = frozen
        self.average = Average(options)
        self.plans = Cache()
        self.counter = _Counter()

    @override
    def __reduce__(self) -> tuple[type["_Runtime"], tuple[Options, frozenset[str]]]:
        return _Runtime, (self.options, self.frozen)


def _check_pairs(kept: NamedTensors, found: NamedTensors) -> None:
    """Raise unless both have the same names and shapes; buffers that are not saved may come and go."""
    facts: list[dict[str, torch.Size | None]] = []
    for one, other in ((kept, found), (found, kept)):
        there = other.names() | other.empty.keys()
        aliased = {name: cast("Member", one.member(name)) for name in one.aliases}
        facts.append(
            {
                name: member.tensor.shape if member.is_parameter else None
                for name, member in {**one.all(), **aliased, **one.empty}.items()
                if name in there or (member.persistent and name not in one.empty)
            }
        )
    what = "AveragedModel: the model is not the one that is averaged"
    check_match(what, *facts)
    untied = [
        f"{alias} (no longer tied to {first})"
        for alias, first in kept.aliases.items()
        if found.tensor(alias) is not found.tensor(first)
    ]
    check_match(what, {}, dict.fromkeys(untied))


class _Counter:
    """The number of updates on the host, read again where that is free or the buffer has changed.

    Writes to the buffer of an accelerator can be missed, so it only seeds random numbers. It counts a
    step that the accelerator skips, and the buffer does not: a run that is resumed after one draws
    other numbers.
    """

    def __init__(self) -> None:
        self._value = 0
        self._facts: tuple[Any, ...] = ()

    def read(self, buffer: Tensor) -> int:
        """Return the number that ``buffer`` holds."""
        if reads_are_free(buffer.device) or buffer.is_inference() or self._facts != _facts(buffer):
            self._value = int(buffer)
        return self._value

    def advance(self, buffer: Tensor, taken: bool | Tensor) -> None:
        """Count one update in ``buffer`` if it was taken, and here."""
        buffer.add_(taken.to(buffer.device) if isinstance(taken, Tensor) else taken)
        self._value += 1
        self._facts = () if buffer.is_inference() else _facts(buffer)


def _flags(count: Tensor, finite: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return whether an update is the first one, and whether it is a later one, on a device."""
    first, later = count == 0, count > 0
    if finite is not None:
        finite = finite.to(count.device)
        first, later = first & finite, later & finite
    return first.to(device), later.to(device)


def _facts(buffer: Tensor) -> tuple[Any, ...]:
    return id(buffer), buffer.data_ptr(), buffer._version


def _swa_weight(count: Tensor | int) -> Weight:
    """Return ``1 / (count + 1)``, rounded as torch rounds it: to the default dtype."""
    if isinstance(count, Tensor):
        return 1 / (count + 1)
    if torch.get_default_dtype() is torch.float32:
        # Several times faster than with a tensor.
        return float(struct.unpack("f", struct.pack("f", 1 / (count + 1)))[0])
    return (1 / torch.tensor(count + 1, device="cpu")).item()


def _swa_step(averages: list[Tensor], currents: list[Tensor], count: int | Tensor) -> None:
    """Take one step of the equal average in the form that torch uses on CPU."""
    plain = averages[0].dtype == currents[0].dtype and averages[0].device == currents[0].device
    with torch.no_grad():
        for target, source in zip(averages, currents, strict=True):
            if plain and is_averaged(target):
                target.add_(source.sub(target).div_(count + 1))
            else:
                target.copy_(_swa_of(target, source.to(target.device), count))


def has_foreach_kernels(device: torch.device) -> bool:
    """Return True if lists of tensors have fused kernels on a device; torch's default depends on it."""
    return device.type in foreach_devices()
