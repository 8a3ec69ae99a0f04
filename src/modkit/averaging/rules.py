"""An average, and how it moves: the one definition of a step, for eager and compiled updates.

The first update of an average copies, whatever its rule. Later ones are steps of its rule, which
computes the weight of the step, or calls a function.

Steps of ``AveragedModel`` are bitwise identical to torch's, which computes the equal average in two
forms: ``a + (b - a) / (n + 1)`` tensor by tensor, and ``lerp`` with the weight ``1 / (n + 1)``
where lists of tensors have fused kernels.
"""

import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.optim.swa_utils import get_swa_avg_fn, get_swa_multi_avg_fn
from typing_extensions import override

from modkit._messages import MSG_LEAVE_OUT, add_note
from modkit._upstream import PLAIN, copy_, copy_all_, foreach_devices, foreach_lerp_
from modkit.averaging import precision
from modkit.averaging.options import Options
from modkit.averaging.precision import Weight, where_
from modkit.averaging.sharding import is_sharded_alike, local_shard, shards_of


Tensors: TypeAlias = Mapping[str, Tensor]


class Average:
    """The average of named tensors: what is stored of it, and what a checkpoint holds of it.

    Args:
        options: Options of the average, kept as an attribute.

    Attributes:
        tensors: Averages by name.
        statistics: Batch normalization statistics that were computed for this average, by name.
    """

    def __init__(self, options: Options) -> None:
        self.options: Options = options
        self._seed = options.seed
        self.reset()

    def reset(self) -> None:
        """Drop all values, so that the next step is the first one."""
        self.tensors: dict[str, Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        # Batch normalization statistics for this average, until the next step.
        self.statistics: dict[str, Tensor] = {}

    def start(self, members: Tensors, values: Tensors | None = None) -> None:
        """Allocate an average, whose values are otherwise those of the first step, which copies.

        Args:
            members: Tensors of the model by name. They give shapes and, with the options, dtypes
                and devices.
            values: Values by name, of any dtype and device. Full ones are sharded.
        """
        self.reset()
        device = self.options.device
        # In the order of the model, which is that of the state dict.
        for name, member in members.items():
            dtype = self.options.kept_dtype(member.dtype)
            try:
                tensor = torch.empty_like(member, dtype=dtype, device=device, requires_grad=False)
            except NotImplementedError as error:
                # The class of a quantized weight, for one, does not know which tensor it is.
                add_note(error, f"EMA: {name} cannot be averaged. {MSG_LEAVE_OUT}")
                raise
            self.tensors[name] = tensor
            if values is not None:
                copy_(local_shard(tensor), local_shard(shards_of(values[name], tensor)))

    def place(self, members: Tensors) -> bool:
        """Follow a model that was moved or sharded; averages with a device of their own stay there.

        Args:
            members: Tensors of the model by name.

        Returns:
            Whether there are other tensors now.
        """
        before = [*self.tensors.values()]
        for name, current in members.items():
            device = self.options.device or current.device
            tensor = shards_of(self.tensors[name], current)
            if tensor is not self.tensors[name] or tensor.device != device:
                # A view of the full tensor would keep all of its memory.
                self.tensors[name] = tensor.to(device, copy=True)
        return not all(map(operator.is_, self.tensors.values(), before))

    def resized(self, members: Tensors, former_names: Mapping[str, str]) -> "Average":
        """Return the average of other members.

        Args:
            members: Tensors of the model by name.
            former_names: Maps names of members to their names in this average. Members without a
                name here start as a copy, and so do those of another shape.

        Returns:
            The new average, in memory of its own. This one is unchanged.
        """
        values: dict[str, Tensor] = {}
        for name, member in members.items():
            average = self.tensors.get(former_names.get(name, ""), member)
            values[name] = average if average.shape == member.shape else member
        new = Average(self.options)
        new.start(members, values)
        return new

    def set_statistics(self, statistics: Tensors) -> None:
        """Keep batch normalization statistics until the next step.

        Args:
            statistics: The statistics by name, which are moved to the device of the average.
        """
        device = self.options.device
        moved = {name: t.to(device or t.device) for name, t in statistics.items()}
        # In place: swaps watch this table.
        self.statistics.clear()
        self.statistics.update(moved)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the stochastic rounding on a device, of the host for XLA."""
        if device.type == "xla":
            # XLA has one random state for all, and no generators.
            device = torch.device("cpu")
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device).manual_seed(self._seed)
        return self._generators[device]

    def seed(self, step: int) -> None:
        """Seed the stochastic rounding of a step, whose number is its only state."""
        # Seeds of generators have 64 bits.
        self._seed = (self.options.seed + step) % (1 << 64)
        self._generators = {}


@dataclass
class Group:
    """Tensors that the kernels take together: of one device and dtype in averages and model.

    Attributes:
        owners: The averages that the group is a part of, several with several decays.
        averages: The averaged tensors, in a list for each owner.
        currents: The tensors of the model, in the order of each of these lists.
        has_average: Whether the averages are floating-point or complex: integers have no average.
        is_alike: Whether averages and model have one dtype and device, so that a kernel takes both.
    """

    owners: Sequence[Average]
    averages: list[list[Tensor]]
    currents: list[Tensor] = field(default_factory=list)
    has_average: bool = True
    is_alike: bool = False

    def add(self, name: str, current: Tensor) -> None:
        """Add a tensor of the model and its averages.

        Args:
            name: The name of both.
            current: The tensor of the model. If the averages are sharded like it, local shards are
                added; otherwise torch combines it with them, or refuses to.
        """
        is_local = is_sharded_alike(self.owners[0].tensors[name], current)
        part: Callable[[Tensor], Tensor] = local_shard if is_local else Tensor.detach
        self.currents.append(part(current))
        for owner, tensors in zip(self.owners, self.averages, strict=True):
            tensors.append(part(owner.tensors[name]))


def grouped(owners: Sequence[Average], currents: Tensors, *, alone: bool = False) -> list[Group]:
    """Group tensors of a model, and their averages, by device and dtype.

    Args:
        owners: The averages, which have the same names.
        currents: The tensors of the model by name.
        alone: Whether each tensor is a group of its own, in the order of the model.

    Returns:
        The groups. Each tensor is in one of them.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    first = owners[0]
    for name, current in currents.items():
        average = first.tensors[name]
        key: tuple[Any, ...] = (
            *(average.device, average.dtype, current.device, current.dtype),
            # Subclasses may have arithmetic of their own, or no kernels for lists.
            *(_kind(average), _kind(current), name if alone else None),
            is_sharded_alike(average, current),
        )
        if key not in groups:
            groups[key] = Group(
                owners,
                averages=[[] for _ in owners],
                has_average=precision.is_averaged(average),
                is_alike=(average.dtype, average.device) == (current.dtype, current.device),
            )
        groups[key].add(name, current)

    return list(groups.values())


def _kind(tensor: Tensor) -> type[Tensor]:
    """Return the subclass that a tensor, or its local shard, is of; plain types are one."""
    kind = type(local_shard(tensor))
    return Tensor if kind in PLAIN else kind


# The number of models averaged so far: a tensor where it is in the memory of an accelerator, and
# reading it on the host would be a host sync.
Count: TypeAlias = int | Tensor

_swa_: Final = get_swa_multi_avg_fn()
_swa_of: Final = get_swa_avg_fn()


class Rule(ABC):
    """How the averages of a group move towards the values of a model."""

    # Whether a step may be taken in parts of a group.
    can_be_cut: bool = True

    @abstractmethod
    def step(self, group: Group, count: Count) -> None:
        """Take a later step of a group.

        Args:
            group: Tensors of one device and dtype.
            count: Number of models averaged so far, 1 or more; a tensor is on the device of the
                averages.
        """

    def step_on_device(self, group: Group, count: Count, finite: bool | Tensor = True) -> None:
        """Take the step of a group as flags decide that are not read on the host.

        Where ``count`` is 0 the values are copied. Where it is negative, or ``finite`` is False,
        nothing changes: the step is taken and undone, because not taking it would need a host sync.

        Args:
            group: The group.
            count: Number of models averaged so far.
            finite: Whether the values may be averaged.
        """
        device = group.averages[0][0].device
        first: Tensor | None = None
        if isinstance(count, Tensor):
            first, later = _flags(count, finite, device)
            # Results for other counts are not used.
            count = count.clamp(min=1).to(device)
        else:
            # The first step is not masked: whether there is an average is known on the host.
            later = torch.as_tensor(finite, device=device)

        lists = [*group.averages, group.currents]
        for *averages, currents in precision.in_parts(*lists) if self.can_be_cut else [lists]:
            part = replace(group, averages=averages, currents=currents)
            tensors = [*chain.from_iterable(averages)]
            before = [tensor.detach().clone() for tensor in tensors]
            self.step(part, count)
            where_(~later, tensors, before)

            if first is not None:
                for tensors in averages:
                    where_(first, tensors, currents)


def _flags(count: Tensor, finite: bool | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return whether a step is the first one, and whether it is a later one, on a device."""
    first = count == 0
    later = count > 0
    if isinstance(finite, Tensor):
        finite = finite.to(count.device)
        first = first & finite
        later = later & finite
    return first.to(device), later.to(device)


class Ema(Rule):
    """The exponential average: ``average + weight * (current - average)``, ``weight = 1 - decay``.

    Args:
        weights: The weight of each average in this step; a tensor is in the memory of the device.
        function: Torch's function for lists of tensors, which integers need: they have no ``lerp``.
    """

    def __init__(
        self, weights: Sequence[Weight], function: Callable[..., None] | None = None
    ) -> None:
        self._weights = weights
        self._function = function

    @override
    def step(self, group: Group, count: Count) -> None:
        currents = group.currents
        if not group.has_average:
            assert self._function is not None
            _call(self._function, group, count)
            return

        lerped: list[list[Tensor]] = []
        lerp_weights: list[Weight] = []
        for owner, averages, weight in zip(
            group.owners, group.averages, self._weights, strict=True
        ):
            if isinstance(weight, float) and weight == 1.0:
                # A lerp from an infinite average would be NaN.
                copy_all_(averages, currents)
            elif owner.options.precision == "stochastic" and averages[0].dtype in precision.ROUNDED:
                generator = owner.generator(averages[0].device)
                precision.stochastic_(averages, currents, weight, generator)
            elif group.is_alike and not isinstance(weight, Tensor):
                # Nothing is created, and autograd takes a tenth of the time of small tensors.
                with torch.inference_mode():
                    foreach_lerp_(averages, currents, weight)
            else:
                lerped.append(averages)
                lerp_weights.append(weight)

        # Together, so that values of another dtype or device are cast once for all averages.
        if lerped:
            precision.lerp_(lerped, currents, lerp_weights)


class Swa(Rule):
    """The equal average of all models, in the forms that torch has.

    Args:
        by_weight: Whether each step is a ``lerp``, also where torch's default is another form.
        function: Torch's function for lists of tensors, if that was chosen.
    """

    def __init__(
        self, *, by_weight: bool = False, function: Callable[..., None] | None = None
    ) -> None:
        self._by_weight = by_weight or function is not None
        self._function = function

    @override
    def step(self, group: Group, count: Count) -> None:
        # Torch's default chooses the form by the device, and each form rounds in another way.
        has_kernels = has_foreach_kernels(group.averages[0][0].device)
        if group.has_average and (self._by_weight or has_kernels):
            Ema((_equal_weight(count),)).step(group, count)
        elif self._function is not None or has_kernels:
            _call(self._function or _swa_, group, count)
        else:
            _swa_one_by_one(group, count)


def _swa_one_by_one(group: Group, count: Count) -> None:
    """Take a step of the equal average in the form that torch uses on CPU."""
    for average, current in zip(group.averages[0], group.currents, strict=True):
        if group.has_average and group.is_alike:
            # ``average + (current - average) / (n + 1)`` without copies of the average.
            average.add_(current.sub(average).div_(count + 1))
        else:
            average.copy_(_swa_of(average, current.to(average.device), count))


class UserFunction(Rule):
    """An averaging function of the user.

    Args:
        avg_fn: Returns the average of one tensor.
        multi_avg_fn: Averages lists of tensors in place, and is used instead of ``avg_fn``.
        with_grad: Whether gradients are recorded where the update is called: functions may depend
            on it.
    """

    # It gets all tensors of a group at once.
    can_be_cut = False

    def __init__(
        self,
        avg_fn: Callable[..., Tensor] | None,
        multi_avg_fn: Callable[..., None] | None,
        *,
        with_grad: bool,
    ) -> None:
        self._avg_fn = avg_fn
        self._multi_avg_fn = multi_avg_fn
        # It is called in the order of the model, whatever the dtypes.
        self.alone: bool = multi_avg_fn is None
        self._with_grad = with_grad

    @override
    def step(self, group: Group, count: Count) -> None:
        with torch.set_grad_enabled(self._with_grad):
            _call(self._multi_avg_fn or self._call_one_by_one, group, count)

    def _call_one_by_one(
        self, averages: list[Tensor], currents: list[Tensor], count: Tensor
    ) -> None:
        assert self._avg_fn is not None
        for average, current in zip(averages, currents, strict=True):
            average.copy_(self._avg_fn(average, current, count.clone()))


def _call(function: Callable[..., None], group: Group, count: Count) -> None:
    """Call an averaging function as torch does.

    It gets detached tensors of one device, and a count of its own, which it may keep or change.
    """
    device = group.averages[0][0].device
    averages = [average.detach() for average in group.averages[0]]
    currents = [current.detach().to(device) for current in group.currents]
    # As in torch, the count is a tensor: with an int, torch's functions round integers otherwise.
    number = count.clone() if isinstance(count, Tensor) else torch.tensor(count, device=device)

    function(averages, currents, number)


def copy(group: Group) -> None:
    """Copy the current values of a group."""
    for averages in group.averages:
        copy_all_(averages, group.currents)


def _equal_weight(count: Count) -> Weight:
    """Return ``1 / (count + 1)``, rounded as torch rounds it: to the default dtype."""
    if isinstance(count, Tensor):
        return 1 / (count + 1)
    # Torch computes the weight from a tensor, whose quotient has the default dtype.
    if torch.get_default_dtype() is torch.float32:
        # Several times faster than with a tensor.
        return float(struct.unpack("f", struct.pack("f", 1 / (count + 1)))[0])
    return (1 / torch.tensor(count + 1, device="cpu")).item()


def has_foreach_kernels(device: torch.device) -> bool:
    """Return True if lists of tensors have fused kernels on a device.

    Torch's default rule is another form, with other bits, where there are none.
    """
    return device.type in foreach_devices()
