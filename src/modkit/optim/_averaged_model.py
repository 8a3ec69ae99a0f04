"""``AveragedModel``: torch's face of the averaging engine."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, cast

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel as _TorchAveragedModel
from typing_extensions import TypeVar, override

from modkit._interrupts import uninterrupted
from modkit._messages import add_note
from modkit._upstream import never_compiled
from modkit.averaging.options import Buffers, Names, Options
from modkit.averaging.precision import HOST_DEVICES, OnNonfinite, Precision, is_averaged
from modkit.averaging.recipe import Cache, Copies, Plan
from modkit.averaging.rules import Average, Count, Group, Rule, Swa, UserFunction
from modkit.averaging.sharding import check_not_partitioned
from modkit.averaging.tensors import Member, NamedTensors, canonical_names, check_match, copy_of
from modkit.nn.module import Module
from modkit.optim.averaging_functions import AveragingFunction, AvgFn, MultiAvgFn


ModelT_co = TypeVar("ModelT_co", bound=torch.nn.Module, default=torch.nn.Module, covariant=True)


class _Base(_TorchAveragedModel, Module):
    """Stands behind ``AveragedModel`` in ``super()``: a module without initialization of its own.

    Torch's class is a base only for ``isinstance``. Subclasses that set its attributes by
    themselves pass its initialization by, as they would ``torch.nn.Module``'s in torch.
    """

    def __init__(self) -> None:
        super(_TorchAveragedModel, self).__init__()


class AveragedModel(_Base, Generic[ModelT_co]):
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
        multi_avg_fn: Averages lists of tensors of one device and dtype in place, instead of
            ``avg_fn``.
        use_buffers: Whether buffers are averaged. If False they are copied: call ``update_bn``
            at the end of training.
        precision: Dtype and rounding of the average. Default: the dtype of the model.
        on_nonfinite: How infinite and NaN weights are treated.
        buffers: How buffers are treated, instead of ``use_buffers``.
        include: Parameters to average.
        exclude: Parameters to copy.
        trainable_only: Whether only parameters that require gradients are averaged.
        seed: Seed for stochastic rounding.

    modkit: Tensors are paired by name, and a model that does not match is refused before anything
    is written. Integer, boolean and quantized buffers are copied, also with ``use_buffers=True``,
    and so are buffers whose shape has changed. An update does not synchronize with an accelerator,
    except with an average on another device, with ``on_nonfinite="raise"``, and the first one with
    ``"skip"`` if ``n_averaged`` is in host memory. The model may be lazy, may have another dtype
    than the average, and may hold results of autograd or its own average. With the averaging
    functions of this module, an average can be pickled. ``AveragedModel[Net].module`` is a ``Net``.

    Keyword Args:
        precision: ``"same"`` keeps the dtype of the model: bf16 and fp16 averages stall for decays
            close to 1. ``"fp32"`` and ``"fp64"`` keep the average in at least that precision; an
            update after it was cast to fewer bits is refused. ``"stochastic"`` rounds
            stochastically. The averaged model computes in the dtype of the average.
        on_nonfinite: ``"ignore"`` averages infinite and NaN weights, ``"skip"`` skips the update,
            ``"raise"`` raises. A skipped update counts only if ``n_averaged`` is in host memory and
            the model on an accelerator.
        buffers: ``"copy"``, ``"average"`` or ``"ignore"`` floating-point buffers, or a dict from
            globs of names to one of the three, instead of ``use_buffers``.
        include: Globs of names, or a predicate: parameters to average. The others are copied.
        exclude: Globs of names, or a predicate: parameters to copy.
        trainable_only: Average only parameters that require gradients now, and copy the others.
        seed: Seed for stochastic rounding.

    Raises:
        AssertionError: If both averaging functions are given, as in torch; or if the model is
            sharded, which torch refuses to copy.
        ValueError: If an option is invalid, ``use_buffers`` and ``buffers`` are both given, the
            precision does not work with the averaging function, or a glob other than ``"*"``
            matches no name; for a lazy model the first update checks the globs.
        TypeError: If ``device`` is not a device, such as an averaging function in its place, or the
            model is sharded by DeepSpeed ZeRO-3.

    Attributes:
        module: The averaged copy, typed by the class of ``model``.
        n_averaged: Buffer, a 0-dimensional ``int64`` tensor: number of models averaged so far. An
            update copies the model at 0, averages above, and only counts below.
        avg_fn: The averaging function of single tensors, or None.
        multi_avg_fn: The averaging function of lists of tensors, or None.
        use_buffers: Whether buffers are averaged.

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
    """

    module: ModelT_co
    n_averaged: Tensor
    avg_fn: AvgFn | None
    multi_avg_fn: MultiAvgFn | None
    use_buffers: bool
    _device: int | torch.device | None = None

    def __init__(
        self,
        model: ModelT_co,
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
        super().__init__()
        if avg_fn is not None and multi_avg_fn is not None:
            raise AssertionError("Only one of avg_fn and multi_avg_fn should be provided")
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
        check_not_partitioned("AveragedModel", getattr(model, "modules", tuple)())
        options.check_globs(model)

        members = NamedTensors(model).parameters.values() if trainable_only else ()
        frozen = frozenset(member.name for member in members if not member.tensor.requires_grad)
        self._runtime = _Runtime(options, frozen)
        self._device = device
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn
        self.use_buffers = use_buffers
        if precision == "stochastic" and isinstance(self._rule(), UserFunction):
            raise ValueError(
                "AveragedModel: precision='stochastic' works with get_ema_multi_avg_fn(), "
                "get_swa_multi_avg_fn() or no averaging function"
            )
        # Tensors that are made in inference mode could never be updated outside of it.
        with torch.inference_mode(False):
            self.module = self._copy_of(model)
            self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))

    @cached_property
    def _runtime(self) -> "_Runtime":
        """The options of torch's class, where a subclass sets its attributes by itself."""
        return _Runtime(Options(copy_rest=True, integers=True, owner="AveragedModel"))

    def _copy_of(self, model: torch.nn.Module) -> ModelT_co:
        """Return a copy of the model, on the device and in the dtypes of the average."""
        options = self._runtime.options
        copy = cast("ModelT_co", copy_of(model))

        if self._device is not None:
            try:
                copy = copy.to(self._device)
            except TypeError as error:
                if callable(cast("object", self._device)):
                    add_note(error, "device is an averaging function: pass it as multi_avg_fn=")
                raise

        if options.precision != "same":

            def widened(tensor: Tensor) -> Tensor:
                return tensor.to(options.kept_dtype(tensor.dtype))

            cast("Any", copy)._apply(widened)
        return copy

    @override
    def update_parameters(self, model: torch.nn.Module) -> None:
        """Update the average with the present weights of a model, on any device.

        modkit: Tensors are paired by name, not by position, and are not broadcast; nothing is
        written unless all of them match. Names are compared without the parts that
        ``torch.compile``, data-parallel and checkpoint wrappers add, and without one prefix that
        all names have because the model, or the average, is in a wrapper. Averaging functions get a
        copy of the count. If the count is on an accelerator, they are also called in updates that
        copy, with a count of 1, and the result is not used.

        Call it after ``optimizer.step()`` (EMA) or at the end of an epoch (SWA).

        Args:
            model: The model in training, or a wrapper of it, on any device and in any dtype.

        Raises:
            NameMismatchError: If names, shapes or ties are not those of the average. It is a
                ``ValueError``.
            ValueError: If the average was cast to fewer bits than ``precision`` promises, or a glob
                matches no name of a model that was lazy before.
            RuntimeError: If a value is not finite, with ``on_nonfinite="raise"``.
            TypeError: If ``model`` is sharded by DeepSpeed ZeRO-3.
            AttributeError: If ``model`` is not a module.
        """
        # An object without parameters is refused in torch's words.
        model.parameters  # noqa: B018
        if torch.compiler.is_compiling() and self._runtime.can_be_traced:
            self._update_traced(model)
        else:
            self._update(model)

    @never_compiled
    def _update(self, model: torch.nn.Module) -> None:
        runtime = self._runtime
        counter = self.n_averaged
        rule = self._rule()

        # Writes through ``.data``, by collectives and other processes leave no trace, so no number
        # on the host can stand for the buffer. Where reading it is a host sync, the device decides.
        on_device = counter.device.type not in HOST_DEVICES and not counter.is_meta
        count: Count = counter.detach() if on_device else int(counter)

        with uninterrupted(), torch.no_grad():
            # Functions of the user get the tensors one by one, or as lists.
            alone = isinstance(rule, UserFunction) and rule.alone
            # The plan keeps this dict, so no other module's has the same id.
            key = id(self.module.__dict__), self.use_buffers, alone
            plan = runtime.plans.get(model, key, lambda: self._plan(model, alone=alone))
            if runtime.options.precision == "stochastic":
                runtime.seed(counter)

            taken = plan.step(rule, count)
            # A count on the host does not wait for a flag on the device.
            counter.add_(taken if on_device else taken is not False)

    def _rule(self) -> Rule:
        """Return how the average moves: the functions may be replaced at any time."""
        function = self.multi_avg_fn
        if isinstance(function, AveragingFunction) and function.rule is not None:
            return function.rule
        if function is None and self.avg_fn is None:
            return self._runtime.default_rule
        return UserFunction(self.avg_fn, function, with_grad=torch.is_grad_enabled())

    def _update_traced(self, model: torch.nn.Module) -> None:
        """Take a step in operations that can be compiled: nothing reads the count."""
        averages, currents, copies, _ = self._paired(model)
        average = self._runtime.average
        rule = self._rule()

        # One group per tensor: the compiler fuses operations by itself.
        with torch.no_grad():
            for name, current in currents.items():
                group = Group(
                    [average],
                    averages=[[averages[name]]],
                    currents=[current.detach()],
                    has_average=is_averaged(averages[name]),
                )
                rule.step_on_device(group, self.n_averaged)

        copies.run_traced()
        self.n_averaged.add_(1)

    def _plan(self, model: torch.nn.Module, *, alone: bool) -> Plan:
        """Pair the copy with a model, and group the pairs."""
        if NamedTensors(self.module).has_lazy() and not NamedTensors(model, self).has_lazy():
            # The copy was made before the model had got its shapes.
            self._runtime.options.check_globs(model)
            self.module = self._copy_of(model)
        averages, currents, copies, models = self._paired(model)

        average = self._runtime.average
        average.tensors = averages
        return Plan(
            options=self._runtime.options,
            averages=[average],
            currents=currents,
            copies=copies,
            models=models,
            more=averages.values(),
            alone=alone,
            buffers=self.use_buffers,
        )

    def _paired(
        self, model: torch.nn.Module
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Copies, tuple[NamedTensors, NamedTensors]]:
        """Pair the tensors of the copy with those of a model by name."""
        check_not_partitioned("AveragedModel", model.modules())
        average_members = NamedTensors(self.module)
        model_members = NamedTensors(model, leave_out=self, like=average_members)
        _check_pairs(average_members, model_members)

        options = self._runtime.options
        if self.use_buffers:
            options = replace(options, buffers="average")
        averaged, copied = options.split(average_members)
        averages: dict[str, Tensor] = {}
        currents: dict[str, Tensor] = {}
        for name, target in averaged.items():
            source = model_members.member(name)
            member = cast("Member", average_members.member(name))
            if source is None or not self._has_average(member, source):
                copied.append(member)
                continue
            options.check_width(
                f"AveragedModel: {name} was cast to",
                target.dtype,
                "Cast the average back, or a copy of it.",
            )
            averages[name] = target
            currents[name] = source.tensor

        pairs: list[tuple[dict[str, Any], str, Member]] = []
        for member in (*copied, *average_members.empty.values()):
            source = model_members.member(member.name) or model_members.empty.get(member.name)
            if source is not None:
                pairs.append((cast("dict[str, Any]", member.registry), member.key, source))
        # The copy stays where the user has moved it, in the dtype that the user has cast it to.
        copies = Copies(pairs, follow=False)
        return averages, currents, copies, (average_members, model_members)

    def _has_average(self, member: Member, source: Member) -> bool:
        """Return True if a tensor of the copy is an average of the model's, not a copy."""
        # The copy may be frozen as a whole, so what counts is what the model was when copied.
        if member.name in self._runtime.frozen:
            return False
        has_average = member.is_parameter or is_averaged(source.tensor)
        # A buffer may have got another shape.
        return has_average and bool(member.tensor.shape == source.tensor.shape)

    def export_state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights and buffers under the names of the model without wrappers.

        The parts of names that ``torch.compile``, data-parallel and checkpoint wrappers add are
        left out, so ``plain.load_state_dict(average.export_state_dict())`` works for the model
        inside.

        Returns:
            A new dict. The tensors are those of the average, not copies.

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
    """Unsaved state for the updates of an averaged model. Copies are empty."""

    def __init__(self, options: Options, frozen: frozenset[str] = frozenset()) -> None:
        self.options = options
        # Parameters that ``trainable_only`` leaves out.
        self.frozen = frozen
        self.average = Average(options)
        self.plans: Cache[Plan] = Cache()
        # Stochastic rounding has kernels for a step by a weight only.
        self.default_rule = Swa(by_weight=options.precision == "stochastic")
        # A generator cannot be traced, and neither can a step that depends on the values. Such
        # updates are a graph break in compiled code.
        self.can_be_traced = options.precision != "stochastic" and options.on_nonfinite == "ignore"
        # How often the average was stepped, and the count that it was read from.
        self._steps = 0
        self._facts: tuple[Any, ...] = ()

    def seed(self, counter: Tensor) -> None:
        """Seed the step that follows ``counter`` updates, the only state of stochastic rounding.

        A write to the count of an accelerator can be missed, so the count only seeds. Steps that
        the accelerator skips are counted here, and not in the buffer: a run that is resumed after
        one draws other numbers.
        """
        # The step adds one to the count, which is one more version.
        version = () if counter.is_inference() else (counter._version,)
        facts = (id(counter), counter.data_ptr(), *version)
        if counter.device.type in HOST_DEVICES or not version or facts != self._facts:
            self._steps = int(counter)

        self.average.seed(self._steps)
        self._steps += 1
        self._facts = (*facts[:2], *(v + 1 for v in version))

    @override
    def __reduce__(self) -> tuple[type["_Runtime"], tuple[Options, frozenset[str]]]:
        return _Runtime, (self.options, self.frozen)


def _check_pairs(average_members: NamedTensors, model_members: NamedTensors) -> None:
    """Raise NameMismatchError unless both have the same names, shapes of parameters, and ties.

    Buffers that are not saved, or that are None, may come and go.
    """
    problem = "AveragedModel: the model is not the one that is averaged"
    expected = _required_shapes(average_members, model_members)
    check_match(problem, expected, _required_shapes(model_members, average_members))

    untied = [
        f"{alias} (no longer tied to {first})"
        for alias, first in average_members.aliases.items()
        if model_members.tensor(alias) is not model_members.tensor(first)
    ]
    check_match(problem, {}, dict.fromkeys(untied))


def _required_shapes(
    members: NamedTensors, counterparts: NamedTensors
) -> dict[str, torch.Size | None]:
    """Return the shapes of what must be, or is, on both sides, by name; None for buffers."""
    # Dynamo of torch 2.9 does not join a set with the keys of a dict.
    names_there = {*counterparts.names(), *counterparts.empty}
    aliased = {name: cast("Member", members.member(name)) for name in members.aliases}

    shapes: dict[str, torch.Size | None] = {}
    for name, member in {**members.all(), **aliased, **members.empty}.items():
        is_required = member.persistent and name not in members.empty
        if is_required or name in names_there:
            shapes[name] = member.tensor.shape if member.is_parameter else None
    return shapes
