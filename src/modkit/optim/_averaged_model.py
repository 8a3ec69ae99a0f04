"""``AveragedModel``: torch's face of the averaging engine."""

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel as _TorchAveragedModel
from typing_extensions import TypeVar, override

from modkit._messages import add_note
from modkit._upstream import foreach_devices, make_parameter
from modkit.averaging.averages import Average, Options, flat_buffers
from modkit.averaging.engine import (
    Group,
    Plan,
    PlanCache,
    first_nonfinite_of,
    step,
)
from modkit.averaging.named_tensors import (
    Buffers,
    Copies,
    Member,
    NamedTensors,
    Names,
    canonical_names,
    check_match,
    is_averaged,
)
from modkit.averaging.precision import (
    OnNonfinite,
    Precision,
    Weight,
    computable,
    is_8bit,
    kept_dtype,
    reads_are_free,
)
from modkit.averaging.swap import copy_of
from modkit.nn.module import Module
from modkit.optim._averaging_functions import AvgFn, MultiAvgFn, swa_, swa_of


ModelT = TypeVar("ModelT", bound=torch.nn.Module, default=torch.nn.Module)


class AveragedModel(_TorchAveragedModel, Module, Generic[ModelT]):
    """Running average of a model's weights, as a model of its own.

    Use it for stochastic weight averaging (SWA, the equal mean of the weights at the end of
    training: https://arxiv.org/abs/1803.05407) and for exponential moving averages (EMA). The
    averaged copy is the attribute ``module``; calling the averaged model calls that copy.

    The first ``update_parameters`` copies the weights, each later one averages. Without an
    averaging function all updates have the same weight. The functions are not part of
    ``state_dict()``: pass them again to load an average.

    With ``use_buffers=False`` each update copies the buffers, so the batch normalization statistics
    are those of the last model seen and not of the averaged weights: call ``update_bn`` at the end
    of training. With ``use_buffers=True`` they are averaged along the way. Integer and boolean
    buffers are always copied.

    Args:
        model: Model to average. It is deep-copied and not modified.
        device: Device of the average. Default: that of the model.
        avg_fn: Returns the new average from the averaged tensor, the model's tensor and the number
            of models averaged so far. Excludes ``multi_avg_fn``.
        multi_avg_fn: Averages a list of tensors in place, from a list of averaged tensors, a list of
            the model's tensors, all of one device and dtype, and the number of models so far.
        use_buffers: Whether buffers are averaged, not copied.
        precision: ``"fp32"`` and ``"fp64"`` keep floating-point weights in at least that precision;
            the averaged model then computes in that dtype. ``"same"`` stalls for bf16 and fp16 models
            from a decay of 0.99 on; ``"stochastic"`` rounds stochastically, and ``"compensated"``
            keeps a low-order error term in the child module ``compensation``.
        on_nonfinite: What happens if a weight is infinite or NaN: ``"ignore"`` averages it,
            ``"skip"`` leaves the average as it is, ``"raise"`` raises and synchronizes with the device.
        buffers: ``"copy"``, ``"average"``, ``"ignore"``, or a dict of globs, instead of ``use_buffers``.
        include: Globs of names, or a predicate: parameters to average. The others are copied.
        exclude: Globs of names, or a predicate: parameters to copy.
        trainable_only: Average only parameters that require gradients now, and copy the others.
        seed: Seed for stochastic rounding.

    Attributes:
        module: The averaged copy; a type checker knows it by the type of ``model``.
        n_averaged: Buffer, a 0-dimensional ``int64`` tensor: number of updates.

    Raises:
        AssertionError: If both averaging functions are given.
        ValueError: If another option is invalid.

    Example:
        >>> from modkit import nn
        >>> from modkit.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
        >>> model = nn.Linear(1, 1, bias=False)
        >>> ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        >>> for value in 1.0, 2.0:
        ...     _ = nn.init.constant_(model.weight, value)
        ...     ema.update_parameters(model)
        >>> ema.module.weight.item(), ema.n_averaged.item()
        (1.25, 2)

    Differs from torch: it is typed by the class of the model, pairs tensors by name, does not
    synchronize with accelerators, and takes models that cannot be deep-copied because they hold
    results of autograd or are sharded by ``fully_shard``: the copy is sharded in the same way.
    """

    module: ModelT
    n_averaged: Tensor
    avg_fn: AvgFn | None
    multi_avg_fn: MultiAvgFn | None
    use_buffers: bool

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
        self._runtime = _Runtime(
            Options(
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
        )
        if trainable_only and isinstance(cast("object", model), torch.nn.Module):
            self._runtime.frozen = frozenset(
                name
                for name, one in NamedTensors(model).parameters.items()
                if not one.tensor.requires_grad
            )
        self._device = device
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn
        self.use_buffers = use_buffers
        if precision in {"stochastic", "compensated"}:
            self._check_rule()
        # Tensors that are made in inference mode could never be updated outside of it.
        with torch.inference_mode(False):
            self.module = self._copy_of(model)
            self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))
            if precision == "compensated":
                self.compensation = self._error_terms()

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._runtime.share(self.module)

    def _check_rule(self) -> None:
        if self.avg_fn is not None or not (
            self.multi_avg_fn is None or _is_known(self.multi_avg_fn)
        ):
            raise ValueError(
                f"AveragedModel: precision={self._runtime.options.precision!r} works with "
                "get_ema_multi_avg_fn(), get_swa_multi_avg_fn() or no averaging function"
            )

    def _copy_of(self, model: ModelT) -> ModelT:
        """Return a copy of the model, on the device and in the dtypes of the average."""
        precision = self._runtime.options.precision

        def dtype_of(tensor: Tensor) -> torch.dtype:
            return tensor.dtype if precision == "same" else kept_dtype(tensor.dtype, precision)

        copies: dict[int, Tensor] = {}
        if isinstance(cast("object", model), torch.nn.Module) and str(self._device) in {
            "None",
            "cpu",
        }:
            copies = self._runtime.flat_copies(model, dtype_of)
        copy = copy_of(model, copies)
        if self._device is not None:
            try:
                copy = copy.to(self._device)
            except TypeError as error:
                if callable(cast("object", self._device)):
                    add_note(error, "device is an averaging function: pass it as multi_avg_fn=")
                raise
        if precision != "same":

            def widened(tensor: Tensor) -> Tensor:
                return tensor.to(dtype_of(tensor))

            cast("Any", copy)._apply(widened)
        return copy

    def _error_terms(self) -> Module:
        """Return a tree of buffers, which has the same names as the parameters that it belongs to."""
        root: Module = Module()
        named = NamedTensors(self.module)
        # Those of a lazy model are made when it has its shapes.
        members = {} if named.has_lazy() else named.all()
        for name, member in members.items():
            if is_averaged(member.tensor):
                *path, last = name.split(".")
                node = root
                for part in path:
                    if part not in node._modules:
                        node.add_module(part, Module())
                    node = cast("Module", node._modules[part])
                node.register_buffer(last, torch.zeros_like(member.tensor, requires_grad=False))
        return root

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the averaged copy."""
        return self.module(*args, **kwargs)

    @override
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Update the average with the present weights of a model.

        Call it after ``optimizer.step()`` (EMA) or at the end of an epoch (SWA). The first call
        copies. Parameters and buffers are paired by name, without the parts of names that
        ``torch.compile``, data-parallel and checkpoint wrappers add. Buffers that are not persistent may
        come and go, and copied buffers may change their shape.

        Args:
            model: The model in training, on any device.

        Raises:
            NameMismatchError: If tensors are missing, unexpected, or of another shape. It is a
                ValueError and lists their names. Nothing has been changed.
            RuntimeError: If a weight is not finite and ``on_nonfinite="raise"``.

        Differs from torch, which pairs tensors by position and broadcasts their shapes.
        """
        # Whatever has no parameters is refused in torch's words.
        model.parameters  # noqa: B018
        if torch.compiler.is_compiling():
            self._update_traced(model)
            return
        runtime = self._runtime
        count = runtime.counter.read(self.n_averaged)
        if count == 0:
            self._materialize(model)
        # Functions of the user get the tensors one by one, or as lists.
        flat = self.avg_fn is None if self.multi_avg_fn is None else _is_known(self.multi_avg_fn)
        key = id(self.module), self.use_buffers, flat
        plan = runtime.plans.get(model, lambda: self._plan(model, flat=flat), key)
        if self._take(plan, count):
            plan.mark_written()
            with torch.no_grad():
                plan.copies.run()
            runtime.counter.advance(self.n_averaged)

    def _take(self, plan: Plan, count: int) -> bool:
        """Take a step; return False if there is still nothing to average."""
        policy = self._runtime.options.on_nonfinite
        if policy == "raise" or (policy == "skip" and count == 0):
            # The first update of an average is the only one that reads a flag on the host.
            bad = first_nonfinite_of(plan)
            if bad is not None and policy == "raise":
                raise RuntimeError(f"AveragedModel: {bad} is not finite. Nothing has been changed.")
            if bad is not None:
                return False
        if self._runtime.options.precision == "stochastic":
            # A seed for each step is all the state that there is.
            self._runtime.average.seed(self._runtime.options.seed + count)
        step(plan, lambda group, finite: self._step(group, count, finite), policy)
        return True

    def _step(self, group: Group, count: int, finite: Tensor | None) -> None:
        weight = 1.0 if count == 0 else self._weight(count, group)
        if weight is not None:
            with torch.no_grad():
                group.step([weight], finite)
        elif finite is not None:
            whole = self.multi_avg_fn is not None and not _is_known(self.multi_avg_fn)
            _step_masked(group, finite, lambda one: self._apply_rule(one, count), whole=whole)
        else:
            self._apply_rule(group, count)

    def _weight(self, count: Tensor | int, group: Group) -> Weight | None:
        """Return how far a step moves, for the rules of this library; None for other functions."""
        if not is_averaged(group.averages[0][0]):
            return None
        if self.multi_avg_fn is None:
            if self.avg_fn is not None:
                return None
            exact = self._runtime.options.precision in {"stochastic", "compensated"}
            fused = has_foreach_kernels(group.averages[0][0].device)
            return _swa_weight(count) if fused or exact else None
        if not _is_known(self.multi_avg_fn):
            return None
        rule = cast("Any", self.multi_avg_fn)
        return _swa_weight(count) if rule.modkit_rule == "swa" else 1 - rule.decay

    def _apply_rule(self, group: Group, count: int) -> None:
        """Take a step by a function of the user, or by torch's rule for CPU and integers."""
        averages = group.averages[0]
        if self.multi_avg_fn is not None:
            _step_lists(averages, group.currents, self.n_averaged, self.multi_avg_fn)
        elif self.avg_fn is not None:
            _step_each(averages, group.currents, self.n_averaged, self.avg_fn)
        elif has_foreach_kernels(averages[0].device):
            with torch.no_grad():
                swa_(averages, group.currents, self.n_averaged)
        else:
            with torch.no_grad():
                _swa_step(averages, group.currents, count)

    def _update_traced(self, model: torch.nn.Module) -> None:
        """Take a first or a later step in operations that can be compiled: nothing reads the count."""
        pairs = _Pairs(self, model)
        counter = self.n_averaged
        first = counter == 0
        for name, found in pairs.currents.items():
            target = pairs.averages[name].detach()
            source = found.detach().to(target.device)
            averages, currents = [target], [source]
            count = counter.to(target.device, copy=True)
            weight = self._weight(counter, Group([], [averages], [[]], currents))
            if weight is not None:
                value = torch.lerp(target, source.to(target.dtype), cast("float", weight))
            elif self.multi_avg_fn is not None:
                self.multi_avg_fn(averages, currents, count)
                value = target
            elif self.avg_fn is not None:
                value = self.avg_fn(target, source, count)
            else:
                value = swa_of(target, source, count)
            target.copy_(torch.where(first.to(target.device), source.to(value.dtype), value))
        Copies(pairs.copied, follow=False).run_traced()
        counter.add_(1)

    def _plan(self, model: torch.nn.Module, *, flat: bool) -> Plan:
        pairs = _Pairs(self, model)
        average = self._runtime.average
        average.tensors = pairs.averages
        average.errors = {}
        if self._runtime.options.precision == "compensated":
            average.errors = self._errors_for(pairs.averages)
        average.expose()
        names = {id(tensor): name for name, tensor in pairs.averages.items()}
        for flat_buffer in average.flats:
            flat_buffer.rename(names)
        copies = Copies(pairs.copied, follow=False)
        models = pairs.models
        return Plan(
            model,
            [average],
            pairs.currents,
            copies,
            models=models,
            more=pairs.averages.values(),
            flat=flat,
            buffers=self.use_buffers,
        )

    def _errors_for(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the error terms of averages; those of replaced tensors start at zero."""
        terms = _buffers_of(self.compensation)
        floats = {name: tensor for name, tensor in averages.items() if is_averaged(tensor)}
        if any(name not in terms or not _fits(terms[name], t) for name, t in floats.items()):
            with torch.inference_mode(False), torch.no_grad():
                self.compensation = self._error_terms()
                new = _buffers_of(self.compensation)
                for name in terms.keys() & new.keys():
                    if _fits(terms[name], new[name]):
                        new[name].copy_(terms[name])
            terms = new
        return {name: terms[name] for name in floats}

    def _materialize(self, model: torch.nn.Module) -> None:
        """Copy the model again if the copy was made before the model had got its shapes."""
        lazy = any(is_lazy(tensor) for tensor in self.module.parameters())
        if lazy and not any(is_lazy(tensor) for tensor in model.parameters()):
            self.module = self._copy_of(cast("ModelT", model))

    def sync_n_averaged(self) -> None:
        """Read ``n_averaged`` from the device in the next update.

        On CPU each update reads it. On accelerators an update reads it only if the buffer is another
        tensor or was written by an operation on it: reading is a host sync. Call this after any other
        write: through ``.data``, by a collective or another process, or in a CUDA graph. ``state_dict()``
        calls it, and after ``load_state_dict()`` it is not needed.
        """
        self._runtime.counter.forget()

    @override
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # Whoever has the state may write to the count.
        self.sync_n_averaged()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def export_state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights and buffers as the plain model names them.

        Where the model was compiled or wrapped, the names that wrappers add are left out, so that
        ``plain.load_state_dict(averaged.export_state_dict())`` works for the model inside.

        Returns:
            A new mapping; the tensors are those of the average.

        Example:
            >>> from modkit import nn
            >>> from modkit.optim.swa_utils import AveragedModel
            >>> list(AveragedModel(nn.Linear(2, 1)).export_state_dict())
            ['weight', 'bias']
        """
        state: dict[str, Tensor] = self.module.state_dict()
        names = canonical_names(state)
        return {names[name]: tensor for name, tensor in state.items()}


class _Runtime:
    """What an averaged model needs for its updates and does not save. Copies of it are empty."""

    def __init__(self, options: Options, frozen: frozenset[str] = frozenset()) -> None:
        self.options = options
        # Parameters that ``trainable_only`` leaves out.
        self.frozen = frozen
        self.average = Average(options)
        self.plans = PlanCache()
        self.counter = _Counter()

    def flat_copies(
        self, model: torch.nn.Module, dtype_of: Callable[[Tensor], torch.dtype]
    ) -> dict[int, Tensor]:
        """Copy small parameters into flat buffers; return the copies by the ``id`` of the parameter."""
        plain = {
            str(number): parameter
            for number, parameter in enumerate(model.parameters())
            if type(parameter) is torch.nn.Parameter
        }

        def as_parameter(name: str, tensor: Tensor) -> Tensor:
            return make_parameter(tensor, plain[name].requires_grad)

        self.average.flats = flat_buffers(plain, dtype_of, as_parameter)
        copies: dict[int, Tensor] = {}
        with torch.no_grad():
            for flat in self.average.flats:
                flat.fill(plain)
                copies.update({id(plain[name]): tensor for name, tensor in flat.tensors.items()})
        return copies

    @torch.no_grad()
    def share(self, module: torch.nn.Module) -> None:
        """Let the small parameters of a new copy use flat buffers, unless they are in shared memory."""
        plain = {
            name: one.tensor
            for name, one in NamedTensors(module).parameters.items()
            if type(one.tensor) is torch.nn.Parameter and not one.tensor.is_shared()
        }

        def moved(name: str, tensor: Tensor) -> Tensor:
            tensor.copy_(plain[name])
            plain[name].data = tensor
            return plain[name]

        self.average.flats = flat_buffers(plain, lambda tensor: tensor.dtype, moved)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Runtime":
        return _Runtime(self.options, self.frozen)

    def __reduce__(self) -> tuple[type["_Runtime"], tuple[Options, frozenset[str]]]:
        return _Runtime, (self.options, self.frozen)


class _Pairs:
    """The tensors of an averaged copy and of a model, paired by name at one moment.

    Attributes:
        averages: Tensors of the copy that are averaged, by name, tied ones once.
        currents: Those of the model, by the same names.
        copied: Where each copied tensor is in the copy, and in the model.
        models: Both models.
    """

    def __init__(self, owner: AveragedModel[Any], model: torch.nn.Module) -> None:
        kept, found = NamedTensors(owner.module), NamedTensors(model, leave_out=owner)
        self.models = kept, found
        _check_pairs(kept, found)
        options = owner._runtime.options
        if owner.use_buffers:
            options = replace(options, buffers="average")
        averaged, copied = options.split(kept)
        # The copy may be frozen as a whole, so what counts is what the model was when it was copied.
        for name in owner._runtime.frozen & averaged.keys():
            del averaged[name]
            copied.append(kept.parameters[name])
        self.averages: dict[str, Tensor] = {}
        self.currents: dict[str, Tensor] = {}
        for name, target in averaged.items():
            source = found.member(name)
            if source is None or not _have_average(target, source.tensor, kept.member(name)):
                copied.append(cast("Member", kept.member(name)))
            else:
                self.averages[name], self.currents[name] = target, source.tensor
        self.copied: list[tuple[dict[str, Any], str, Member]] = []
        for place in (*copied, *kept.empty.values()):
            source = found.member(place.name) or found.empty.get(place.name)
            if source is not None:
                self.copied.append((cast("dict[str, Any]", place.registry), place.key, source))


def _buffers_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: member.tensor for name, member in NamedTensors(module).buffers.items()}


def _fits(error: Tensor, average: Tensor) -> bool:
    """Return True if a tensor can be the error term of an average."""
    return (error.shape, error.device) == (average.shape, average.device)


def _have_average(target: Tensor, source: Tensor, member: Member | None) -> bool:
    """Return True unless these are buffers without an average: integers, or of different shapes."""
    if member is not None and member.is_parameter:
        return True
    return is_averaged(target) and is_averaged(source) and target.shape == source.shape


def _check_pairs(kept: NamedTensors, found: NamedTensors) -> None:
    """Raise unless both have the same names and shapes; buffers that are not saved may come and go."""
    facts: list[dict[str, torch.Size | None]] = []
    for one, other in ((kept, found), (found, kept)):
        names = other.names() | set(other.empty)
        shapes: dict[str, torch.Size | None] = {
            name: member.tensor.shape if member.is_parameter else None
            for name, member in one.all().items()
            if member.persistent or name in names
        }
        for alias in one.aliases:
            member = cast("Member", one.member(alias))
            shapes[alias] = member.tensor.shape if member.is_parameter else None
        shapes.update({name: None for name in one.empty if name in other.names()})
        facts.append(shapes)
    what = "AveragedModel: the model is not the one that is averaged"
    check_match(what, *facts)
    untied = [
        f"{alias} (no longer tied to {first})"
        for alias, first in kept.aliases.items()
        if found.tensor(alias) is not found.tensor(first)
    ]
    if untied:
        check_match(what, {}, dict.fromkeys(untied))


def _is_known(multi_avg_fn: MultiAvgFn) -> bool:
    """Return True for the functions of this library, which the engine has kernels for."""
    return hasattr(multi_avg_fn, "modkit_rule")


class _Counter:
    """The number of updates on the host, so that accelerators need not be synchronized.

    It is read again where that is free, and where the buffer is another one or has a new version.
    """

    def __init__(self) -> None:
        self._value = 0
        self._facts: tuple[Any, ...] = ()

    def read(self, buffer: Tensor) -> int:
        """Return the number that ``buffer`` holds."""
        if reads_are_free(buffer.device) or buffer.is_inference() or self._facts != _facts(buffer):
            self._value = int(buffer)
        return self._value

    def advance(self, buffer: Tensor) -> None:
        """Count one update, here and in ``buffer``."""
        buffer.add_(1)
        self._value += 1
        self._facts = () if buffer.is_inference() else _facts(buffer)

    def forget(self) -> None:
        """Read the buffer next time."""
        self._facts = ()


def _facts(buffer: Tensor) -> tuple[Any, ...]:
    return id(buffer), buffer.data_ptr(), buffer._version


def _swa_weight(count: Tensor | int) -> Weight:
    """Return ``1 / (count + 1)``, rounded as torch rounds it: to the default dtype."""
    if isinstance(count, Tensor):
        return 1 / (count + 1)
    size = torch.get_default_dtype().itemsize
    if size < torch.float32.itemsize:
        return (1 / torch.tensor(count + 1, device="cpu")).item()
    weight = 1 / (count + 1)
    if size == torch.float32.itemsize:
        (rounded,) = struct.unpack("f", struct.pack("f", weight))
        return float(rounded)
    return weight


def _swa_step(averages: list[Tensor], currents: list[Tensor], count: int) -> None:
    """Take one step of the equal average in the form that torch uses on CPU."""
    plain = averages[0].dtype == currents[0].dtype and not is_8bit(averages[0].dtype)
    plain = plain and averages[0].device == currents[0].device
    for target, source in zip(averages, currents, strict=True):
        if plain and is_averaged(target):
            target.add_(source.sub(target).div_(count + 1))
        else:
            current = computable(source.to(target.device))
            target.copy_(swa_of(computable(target), current, count))


# Steps by functions of the user.


def _step_each(
    averages: list[Tensor], currents: list[Tensor], counter: Tensor, avg_fn: AvgFn
) -> None:
    device = averages[0].device
    for target, source in zip(averages, currents, strict=True):
        averaged, current = target.detach(), source.detach().to(device)
        count = counter.to(device, copy=True)
        averaged.copy_(avg_fn(computable(averaged), computable(current), count))


def _step_lists(
    averages: list[Tensor], currents: list[Tensor], counter: Tensor, multi_avg_fn: MultiAvgFn
) -> None:
    device = averages[0].device
    targets = [target.detach() for target in averages]
    wide = [computable(target) for target in targets]
    sources = [computable(source.detach().to(device)) for source in currents]
    multi_avg_fn(wide, sources, counter.to(device, copy=True))
    for target, value in zip(targets, wide, strict=True):
        if value is not target:
            target.copy_(value)


def _step_masked(
    group: Group, finite: Tensor, take: Callable[[Group], None], *, whole: bool
) -> None:
    """Take a step, and undo it where the model has values that are not finite.

    Args:
        group: The tensors.
        finite: The flag.
        take: Takes the step.
        whole: Whether it needs all tensors at once, of which as many copies are then held.
    """
    averages, currents = group.averages[0], group.currents
    good = finite.to(averages[0].device)
    rows = [slice(None)] if whole else [slice(n, n + 1) for n in range(len(averages))]
    for row in rows:
        before = [tensor.detach().clone() for tensor in averages[row]]
        take(Group(group.owners, [averages[row]], [[]], currents[row]))
        with torch.no_grad():
            for tensor, old in zip(averages[row], before, strict=True):
                tensor.copy_(torch.where(good, tensor, old))


def has_foreach_kernels(device: torch.device) -> bool:
    """Return True if lists of tensors have fused kernels on a device; torch's default depends on it."""
    return device.type in foreach_devices()
