"""How averages follow a model: what is stepped and copied together, while nothing changes.

A plan is made once and reused until its watch notices a change. ``EMA`` and ``AveragedModel``
differ in where the averages live: in tensors of their own, or in the parameters of a copy of the
model. The watch runs before each step, so it consists of loops in C.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from typing import Any, Final, Generic, cast

import torch
from torch import Tensor
from typing_extensions import Self, TypeVar, override

from modkit._upstream import PLAIN, ListCopier, copier, tensor_guard
from modkit.averaging import precision
from modkit.averaging.options import Options
from modkit.averaging.rules import Average, Count, Group, Rule, Tensors, copy, grouped
from modkit.averaging.sharding import (
    groups_of,
    is_sharded,
    is_sharded_alike,
    local_shard,
    true_everywhere,
)
from modkit.averaging.tensors import Member, NamedTensors, Registry


# The tables in which a module has its members.
TABLES: Final = ("_modules", "_parameters", "_buffers")
_requires_grad: Final = operator.attrgetter("requires_grad")


class Watch:
    """Notices that tensors were added, removed, replaced, tied, renamed, moved, cast or reshaped.

    Assigning to ``parameter.data`` is not a change if the metadata stay.

    What tables hold is compared by ``is``, in loops in C: tensors compare elements, so ``==`` of
    tables is not usable, and a mode that changes ``==`` could stay entered after an interrupt. The
    tables themselves are compared, too: ``module._parameters = ...``, ``module.__dict__.update()``
    and ``__setstate__()`` put others there, and so does the end of a block of ``fast_inference``,
    if the tables are those of the block: no longer does anything bring them up to date.

    Args:
        states: ``__dict__`` of modules, whose tables of parameters and children are compared. Not
            the modules themselves, which an average does not keep alive.
        tensors: Tensors whose metadata are compared.
        buffers: Whether buffers count too: otherwise forwards may replace them under the same
            names.
        tables: Further tables.
        frozen: Parameters that must not begin to require gradients.
        unknown: Whether it is not known what there was, so that everything is a change.
    """

    def __init__(
        self,
        states: Sequence[dict[str, Any]] = (),
        tensors: Iterable[Tensor] = (),
        *,
        buffers: bool = False,
        tables: Iterable[Registry] = (),
        frozen: Iterable[Tensor] = (),
        unknown: bool = False,
    ) -> None:
        self._unknown = unknown
        self._places = [(state, name) for state in states for name in TABLES if state[name]]
        # No ``starmap``, which the compiler of torch 2.8 cannot follow.
        self._tables = [state[name] for state, name in self._places]
        compared = TABLES if buffers else ("_modules", "_parameters")
        registries = {id(table): table for table in tables}
        registries |= {id(state[name]): state[name] for state in states for name in compared}
        named = [state["_buffers"] for state in states if id(state["_buffers"]) not in registries]

        # Most tables are empty, and those are checked together.
        self._empty = [table for table in (*registries.values(), *named) if not table]
        self._filled = [table for table in registries.values() if table]
        self._views = [table.values() for table in self._filled]
        self._lengths = list(map(len, self._filled))
        self._held = list(chain.from_iterable(self._views))
        self._under = list(chain.from_iterable(self._filled))
        self._named = [table for table in named if table]
        self._names = list(chain.from_iterable(self._named))
        self._alike = metadata_guard([] if self._unknown else list(tensors))

        self._frozen = [tensor for tensor in frozen if not tensor.requires_grad]

    def changed(self) -> bool:
        """Return True if anything is not as it was."""
        if (
            self._unknown
            or list(map(len, self._filled)) != self._lengths
            or not all(map(operator.is_, chain.from_iterable(self._views), self._held))
            or list(chain.from_iterable(self._filled)) != self._under
            or any(self._empty)
            or list(chain.from_iterable(self._named)) != self._names
        ):
            return True

        tables = list(starmap(operator.getitem, self._places))
        if not all(map(operator.is_, tables, self._tables)):
            # A block that began since has put tables in front of these, which stay up to date.
            lasting = [getattr(table, "original", table) for table in tables]
            if not all(map(operator.is_, lasting, self._tables)):
                return True

        return not self._alike() or any(map(_requires_grad, self._frozen))


def metadata_guard(tensors: list[Tensor]) -> Callable[[], bool]:
    """Return a function that compares the metadata of tensors with the present ones.

    Args:
        tensors: The tensors, of any kind. Those of FSDP are compared by their shards.

    Returns:
        A function that returns True while shapes, strides, dtypes and devices are as they are now:
        torch's guard, in C++, where it knows the tensors.
    """
    if not tensors:
        return partial(bool, True)
    sharded = [tensor for tensor in tensors if is_sharded(tensor)]
    if sharded:
        return _alike_with_shards(tensors, sharded)

    if all(type(tensor) in PLAIN and tensor.layout is torch.strided for tensor in tensors):
        guard = tensor_guard(tensors)
        if guard is not None:
            return guard

    # Torch's guard does not take subclasses and other layouts: compare in Python.
    facts = metadata_of(tensors)
    return lambda: metadata_of(tensors) == facts


def _alike_with_shards(tensors: list[Tensor], sharded: list[Tensor]) -> Callable[[], bool]:
    """Return a guard that also compares the memory of shards, which FSDP may replace.

    ``to_local()`` makes a new tensor at each call, of the same memory.
    """
    alike = metadata_guard([local_shard(tensor) for tensor in tensors])

    def memory() -> list[int]:
        with torch.no_grad():
            return [cast("Any", tensor).to_local().data_ptr() for tensor in sharded]

    before = memory()
    return lambda: memory() == before and alike()


def metadata_of(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    """Return what a cast, a move or another shape changes."""
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


class Copies:
    """Tensors that are copied rather than averaged, planned once and then copied list by list.

    Args:
        pairs: For each copy the table that holds it, its name there, and the member it is a copy
            of.
        device: Device of the copies. Default: that of each source.
        follow: Whether copies get the device and dtype of their source. An averaged model does not
            follow: its buffers stay where the user moved the averaged model to.

    Attributes:
        lists: Lists of targets and sources that have one device and dtype each, with what copies
            them, as the latest :meth:`plan` has found them.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[dict[str, Any], str, Member]],
        device: torch.device | None = None,
        *,
        follow: bool = True,
    ) -> None:
        self.pairs: list[tuple[dict[str, Any], str, Member]] = list(pairs)
        self.lists: list[tuple[ListCopier, list[Tensor], list[Tensor]]] = []
        self._device = device
        self._follow = follow

    def plan(self) -> None:
        """Find the sources, make copies that do not fit anew, and group both for the kernels.

        Sources and copies are grouped by device and dtype, so that one call copies a whole list.
        """
        lists: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in self._found():
            # A kernel takes lists of one dtype and device on either side, of plain tensors.
            places = target.device, target.dtype, source.device, source.dtype
            kernel_key = *places, type(target) in PLAIN, type(source) in PLAIN
            target_list, source_list = lists.setdefault(kernel_key, ([], []))
            target_list.append(target)
            source_list.append(source)
        self.lists = [
            (copier(targets[0], sources[0]), targets, sources)
            for targets, sources in lists.values()
        ]

    def run_traced(self) -> None:
        """Bring all copies up to date in operations that can be compiled."""
        for target, source in self._found():
            # Detached, because a buffer may be a result of autograd.
            target.detach().copy_(source.detach())

    def _found(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each target with its source, as forwards and users have registered them by now."""
        for registry, key, member in self.pairs:
            source: Tensor | None = member.registry.get(member.key)
            target = self._target(registry, key, source)
            if target is not None and source is not None:
                yield target, source

    def _target(self, registry: dict[str, Any], key: str, source: Tensor | None) -> Tensor | None:
        """Return the tensor to copy into, made anew if it does not fit; None if there is none."""
        target: Tensor | None = registry.get(key)
        # A buffer may be shared by the model and its copy on purpose; then it is up to date.
        if source is None or target is source:
            registry[key] = source
            return None

        device = self._device or source.device
        dtype = source.dtype
        if target is not None and not self._follow:
            device = target.device
            dtype = target.dtype

        fitting = source.shape, device, dtype
        fits = target is not None and (target.shape, target.device, target.dtype) == fitting
        # The model may have been sharded since. torch refuses to combine the two in a copy that
        # does not follow.
        if not fits or (self._follow and not is_sharded_alike(target, source)):
            registry[key] = target = source.detach().to(device, dtype, copy=True)
        return target


class Watched:
    """A value that is valid until ``watch`` notices a change, unless it adapts to that."""

    watch: Watch

    def adapt(self) -> bool:
        """Return True if the value is still valid after the change."""
        return False


class Walk(Watched):
    """The tensors of a model. It keeps them and the model alive."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.named: NamedTensors = NamedTensors(model)
        self.watch: Watch = Watch(self.named.states, buffers=True, unknown=self.named.scripted)


class Plan(Watched):
    """One model's tensors with their averages, grouped; valid until ``watch`` notices a change.

    It does not keep the model alive.

    Args:
        options: The options of the averages, of which ``owner`` and ``on_nonfinite`` are used.
        averages: The averages, which all have the names of ``currents``.
        currents: The tensors of the model that are averaged, by name.
        copies: The tensors that are copied.
        models: The models whose tensors end the plan if they are replaced.
        more: Further tensors that end the plan if their metadata change.
        alone: Whether each tensor is stepped by itself, in the order of ``currents``.
        buffers: Whether all buffers end the plan if they are replaced; else those that are
            averaged.
        frozen: Parameters that end the plan if they begin to require gradients.
    """

    def __init__(
        self,
        options: Options,
        averages: Sequence[Average],
        currents: Tensors,
        copies: Copies,
        models: Sequence[NamedTensors],
        *,
        more: Iterable[Tensor] = (),
        alone: bool = False,
        buffers: bool = False,
        frozen: Iterable[Tensor] = (),
    ) -> None:
        self._options = options
        self._currents = currents
        self._copies = copies
        self._groups: list[Group] = grouped(averages, currents, alone=alone)
        self._ranks = groups_of(currents.values(), options.process_group)
        members = [member for model in models for member in model.buffers.values()]
        # Forwards may replace buffers; those that are averaged end the plan.
        self._tables = [member.registry for member in members if member.name in currents]
        self._watching = partial(
            Watch,
            [state for model in models for state in model.states],
            buffers=buffers,
            frozen=[*frozen],
            # A scripted model cannot be watched, so it is walked again each time.
            unknown=any(model.scripted for model in models),
        )
        self._tensors = [*currents.values(), *more]
        # Notices what ends the plan; ``watch`` also notices sources of copies that were replaced.
        self._ending: Watch = self._watching(self._tensors, tables=self._tables)
        self.watch: Watch = self._ending
        self._has_copies = not copies.pairs

    @override
    def adapt(self) -> bool:
        """Return True if the change is one of copies, which the next step finds anew."""
        if self._ending.changed():
            return False
        self._has_copies = False
        return True

    def _find_copies(self) -> None:
        self._copies.plan()
        # Users replace sources, and copies in an averaged model; other plans replace copies.
        places = [(member.registry, member.key) for _, _, member in self._copies.pairs]
        places += [(registry, key) for registry, key, _ in self._copies.pairs]
        copies = [table[key] for table, key in places if table.get(key) is not None]
        # The tables are watched too: a forward may replace a buffer by one with the same metadata.
        tables = [*self._tables, *(table for table, _ in places)]
        self.watch = self._watching([*self._tensors, *copies], tables=tables)
        self._has_copies = True

    def step(self, rule: Rule, count: Count) -> bool | Tensor:
        """Take one step of all averages, and bring the copies up to date, without gradients.

        Args:
            rule: How the averages move. At 0 they are copies, whatever the rule.
            count: Number of models averaged so far. Below 0 nothing moves, as in torch.

        Returns:
            Whether the values were averaged: a flag in device memory where reading it is a host
            sync.

        Raises:
            RuntimeError: If a value is not finite, with ``on_nonfinite="raise"``.
        """
        finite: bool | Tensor = True
        is_first = not isinstance(count, Tensor) and count == 0
        skips = self._options.on_nonfinite == "skip"
        ranks = self._options.process_group
        if self._options.on_nonfinite == "raise":
            precision.check_finite(self._options.owner, self._currents, ranks)
        # The only flag of a device that is read on the host: whether there is an average decides
        # what reading, saving and swapping do.
        if skips and is_first and precision.first_nonfinite(self._currents, ranks) is not None:
            return False

        if not self._has_copies:
            self._find_copies()
        if skips and not is_first:
            finite = self._all_finite()

        on_device = isinstance(count, Tensor) or isinstance(finite, Tensor)
        if finite is not False and (on_device or count >= 0):
            for group in self._groups:
                if on_device:
                    rule.step_on_device(group, count, finite)
                elif is_first:
                    copy(group)
                else:
                    rule.step(group, count)
        for copy_list, targets, sources in self._copies.lists:
            copy_list(targets, sources)
        return finite

    def _all_finite(self) -> bool | Tensor:
        """Return whether all values are finite on all ranks, without a host sync.

        Returns:
            A bool if the values are in host memory, a tensor of one bool if they are on a device.
        """
        tensors = [tensor for group in self._groups for tensor in group.currents]
        flag = true_everywhere(precision.all_finite(tensors), self._ranks)
        return bool(flag) if flag.device.type in precision.HOST_DEVICES else flag


ValueT = TypeVar("ValueT", bound=Watched)


# Values are cached for so many models, averages and modes: a training loop may take two averages
# in turn, and evaluate in another mode than it trains in.
_MOST_ENTRIES: Final = 4


@dataclass(frozen=True)
class _Entry(Generic[ValueT]):
    """A cached value, with what it is for."""

    model: weakref.ref[torch.nn.Module]
    key: object
    value: ValueT


class Cache(Generic[ValueT]):
    """Values cached for the latest models, without keeping those alive. Copies are empty.

    A value may hold the tensors and the children of its model, but not the model itself: it is
    dropped with the model.
    """

    def __init__(self) -> None:
        # Replaced in one assignment, so that no interrupt leaves a value with another one's model.
        self._entries: tuple[_Entry[ValueT], ...] = ()

    def get(self, model: torch.nn.Module, key: object, make: Callable[[], ValueT]) -> ValueT:
        """Return the cached value, made anew if what it watches has changed.

        Args:
            model: The model that the value belongs to.
            key: Which of the values for this model, compared by ``==``.
            make: Makes the value.
        """
        # The guards of torch compare the modes, too.
        key = (key, torch.is_inference_mode_enabled(), torch.is_autocast_enabled())
        key = (*key, torch.is_autocast_enabled("cpu"))
        others: list[_Entry[ValueT]] = []
        for entry in self._entries:
            if entry.model() is not model or entry.key != key:
                others.append(entry)
            elif not entry.value.watch.changed() or entry.value.adapt():
                return entry.value

        # After an error in ``make`` there is no value: the old one is out of date, and so are all
        # if ``make`` clears the cache.
        self._entries = tuple(others)
        value = make()
        # A method as the callback would make a cycle, which keeps the averages until collected.
        reference = weakref.ref(model, partial(_forget, weakref.ref(self)))
        entry = _Entry(reference, key, value)
        self._entries = (entry, *self._entries[: _MOST_ENTRIES - 1])
        return value

    def clear(self) -> None:
        """Drop all values."""
        self._entries = ()

    @override
    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def _forget(cache: weakref.ref[Cache[Any]], model: weakref.ref[torch.nn.Module]) -> None:
    # No global name: as the interpreter exits, those of this module may be None before the model
    # dies.
    owner = cache()
    if owner is not None:
        owner._entries = (*(entry for entry in owner._entries if entry.model is not model),)
