"""Swapping averages into a model and restoring the training weights, without copies.

A swap is registered before its first write, and undoing it may be repeated. So whatever raises in
between, an error or a signal, the training weights can be restored from what is registered.
"""

import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Set as AbstractSet
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from modkit._interrupts import critical
from modkit._messages import (
    MSG_BUFFER_OPTION,
    MSG_CONVERTED_INSIDE,
    MSG_REPLACED_INSIDE,
    MSG_WRITTEN_IN_VAIN,
    MSG_WRITTEN_INSIDE,
    add_note,
)
from modkit.averaging.recipe import Watch
from modkit.averaging.sharding import (
    local_shard,
    reshard,
    sharded_places,
)
from modkit.averaging.tensors import (
    NamedTensors,
    Pair,
    forget_casts,
    pointers_of,
    versions_of,
    wrapper_places,
)


# Loops in C: no signal handler runs between two tensors.
_get_data: Final = operator.attrgetter("data")
_set_data: Final[Callable[[Tensor, Tensor], None]] = cast("Any", Tensor.data).__set__


def _set_all(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    # A deque of no length runs an iterator to its end.
    deque(map(_set_data, tensors, values), maxlen=0)


# The tables that are put back into a module, and how each is copied. Those of buffers are among
# them: a parametrization that is removed may leave its tensor as a buffer, and a mask that is
# removed is a buffer that the layer needs.
_PUT_BACK: Final[Mapping[str, Callable[[Any], Any]]] = {
    "_parameters": dict,
    "_buffers": dict,
    "_non_persistent_buffers_set": set,
    "_modules": dict,
}


class _Before(NamedTuple):
    """A module as it was when a swap was prepared.

    The tables of its parents keep it alive, and nothing the model itself, which a cached swap must
    not.
    """

    reference: weakref.ref[torch.nn.Module]
    kind: type
    tables: dict[str, Any]
    hooks: dict[int, Any]

    @property
    def module(self) -> torch.nn.Module:
        module = self.reference()
        assert module is not None, "the model of a swap is alive"
        return module


def _computing_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """Return the hooks that compute a tensor: of pruning, and the older weight and spectral norm.

    Torch tells them by a method ``remove``, which ends the computation.
    """
    hooks = module._forward_pre_hooks.items()
    return {key: hook for key, hook in hooks if hasattr(hook, "remove")}


class Registered:
    """The members of a model's modules that a swap needs, at one moment, to undo replacements.

    Fusing layers, removing parametrizations, ``load_state_dict(assign=True)``, ``to()`` and
    assignments put other objects into a model. A swap restores the data of tensors, so its tensors
    have to be there. Buffers that are not swapped may be replaced, as forwards do, unless their
    module has to be put back.

    Args:
        named: The tensors and modules of the model.
        pairs: The pairs of the swap.
        watch: Notices that members of these modules were replaced.
    """

    def __init__(self, named: NamedTensors, pairs: Iterable[Pair], watch: Watch) -> None:
        self._watch = watch
        self._names = {id(tensor): name for name, tensor, _ in pairs}
        self._before: list[_Before] = []
        recurrent = (each for each in named.modules if isinstance(each, torch.nn.RNNBase))
        self._recurrent = [*map(weakref.ref, recurrent)]
        for module in named.modules:
            # C++ owns the registries of a scripted module, and makes new objects at each access.
            if isinstance(module, torch.jit.ScriptModule):
                continue
            tables = {name: copied(getattr(module, name)) for name, copied in _PUT_BACK.items()}
            hooks = _computing_hooks(module)
            self._before.append(_Before(weakref.ref(module), type(module), tables, hooks))

        # A parametrized module has a class to itself. Removing the parametrization also deletes the
        # property that computes the tensor from that class.
        kinds = [row.kind for row in self._before if "parametrizations" in row.tables["_modules"]]
        self._classes = [(kind, dict(vars(kind))) for kind in kinds]

    def compact(self) -> None:
        """Give recurrent layers on CUDA averaged weights in one piece, as cuDNN wants them.

        They are in new memory then. A layer keeps what it has if only some weights are swapped: the
        others would stay in that memory when the block ends.
        """
        for reference in self._recurrent:
            module = cast("torch.nn.RNNBase", reference())
            if all(id(weight) in self._names for weight in module._flat_weights):
                module.flatten_parameters()

    @critical
    def undo(self) -> list[str]:
        """Put back swapped tensors, and modules of them, that were replaced; return their names."""
        if not self._watch.changed():
            return []
        # After a forward, FSDP's full parameters are registered in place of the shards.
        reshard(before.module for before in self._before)

        replaced: list[str] = []
        # From the leaves up, so that a child that was removed has its own members back.
        for before in reversed(self._before):
            names = self._replaced_in(before)
            if names:
                replaced = names + replaced
                _put_back(before)

        if replaced:
            for kind, members in self._classes:
                for name in members.keys() - vars(kind).keys():
                    setattr(kind, name, members[name])
        return replaced

    def _replaced_in(self, before: _Before) -> list[str]:
        """Return the names of swapped tensors that a module, or a child of it, no longer has."""
        names: list[str] = []
        for table in ("_parameters", "_modules", "_buffers"):
            current = getattr(before.module, table)
            for key, member in before.tables[table].items():
                if member is None or current.get(key) is member:
                    continue
                # A module without swapped parameters may be replaced, as an adapter without an
                # average is.
                names += self._names_in(member)
        return names

    def _names_in(self, member: Any) -> list[str]:
        """Return the names of swapped tensors: of one, or of all parameters below a module."""
        tensors = [member]
        if isinstance(member, torch.nn.Module):
            below = set(map(id, member.modules()))
            tensors = []
            for before in self._before:
                if id(before.module) in below:
                    tensors += before.tables["_parameters"].values()
        return [self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names]


def _put_back(before: _Before) -> None:
    """Give a module the members that it had, and the hooks that compute tensors."""
    module = before.module
    for table, members in before.tables.items():
        current = getattr(module, table)
        current.clear()
        current.update(members)
        for key in members:
            # A plain tensor that took the place of the member would hide it.
            module.__dict__.pop(key, None)

    for key in _computing_hooks(module).keys() - before.hooks.keys():
        del module._forward_pre_hooks[key]
    module._forward_pre_hooks.update(before.hooks)
    module.__class__ = before.kind


class Swap:
    """An exchange of the data of tensors for other data, which can be undone.

    The tensors stay the same objects, so optimizers, hooks and tied names are not affected. Data of
    the same dtype and device are exchanged as pointers; other data are cast or moved first.
    Creating a swap changes nothing; :meth:`apply` does.

    Args:
        pairs: Name, tensor of a model, and the value that it is to have.
        copied: Names of copied buffers, which the block may write to and replace.

    Attributes:
        written: Names of copied buffers that the block has written to or replaced.
        raws: The data that :meth:`undo` restores, in the order of ``pairs``.
        versions: Version counters after the exchange, by which writes of the user are detected.
    """

    # While the interpreter exits, the globals of this file may be gone, and no model is used again.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, pairs: Iterable[Pair], copied: AbstractSet[str] = frozenset()) -> None:
        self._pairs = list(pairs)
        self._copied = copied
        self.written: list[str] = []
        # Lists of one order, that of the pairs. ``_held`` has the local shards of sharded tensors.
        self._tensors = [tensor for _, tensor, _ in self._pairs]
        # Places of shards and of wrappers, whose data are not theirs: elements are exchanged.
        self._by_element = frozenset(
            [*sharded_places(self._tensors), *wrapper_places(self._tensors)]
        )
        self._held: list[Tensor] = []
        self._values: list[Tensor] = []
        self.raws: list[Tensor] = []
        self._pointers: list[int] = []
        self.versions: list[int] = []

    @critical
    def apply(self, registered: Registered | None = None) -> None:
        """Exchange the data. If that raises, or a signal arrives, :meth:`undo` restores them.

        Args:
            registered: The modules, whose recurrent layers get their weights in one piece.
        """
        self.raws = list(map(_get_data, self._tensors))
        self._held = list(self._tensors)
        values = [value for _, _, value in self._pairs]
        for index, (raw, value) in enumerate(zip(self.raws, values, strict=True)):
            if index in self._by_element:
                # FSDP has a pointer of its own to the shard, and a wrapper holds other tensors. In
                # inference mode, a DTensor cannot be detached.
                with torch.inference_mode(False):
                    self.raws[index] = self._tensors[index].detach().clone()
                self._held[index] = local_shard(self._tensors[index])
            elif value.dtype is not raw.dtype or value.device != raw.device:
                values[index] = value.to(raw.device, raw.dtype)

        self._values = values
        # In this order: a swap that is registered can be undone, whatever interrupts the exchange.
        active_swaps.append(self)
        self._exchange(values)
        forget_casts()
        if registered is not None and not self._by_element:
            registered.compact()
        self._note()

    def _exchange(self, values: list[Tensor]) -> None:
        """Give the tensors other data: as pointers in one loop in C, unless some need copies."""
        if not self._by_element:
            _set_all(self._tensors, values)
            return
        for index, value in enumerate(values):
            self._set(index, value)

    def _set(self, index: int, value: Tensor) -> None:
        if index in self._by_element:
            _write_elements(self._tensors[index], value)
        else:
            self._tensors[index].data = value

    def _note(self) -> None:
        """Note versions and addresses, by which changes in the block are detected."""
        self.versions = self._versions_now()
        self._pointers = pointers_of(self._held)

    def _versions_now(self) -> list[int]:
        versions = versions_of(self._tensors)
        for index in self._by_element:
            # A write to a sharded tensor counts there, one to its local shard here. Torch counts no
            # write by its kernels for lists.
            versions[index] += versions_of([self._held[index]])[0]
        return versions

    @cached_property
    def _index(self) -> dict[int, int]:
        # Only needed while several averages are swapped in, or elements are written.
        return {id(tensor): index for index, tensor in enumerate(self._tensors)}

    def position(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor in the lists, or None if it is not swapped."""
        return self._index.get(id(tensor))

    def undo(self, registered: Registered | None = None) -> str | None:
        """Restore the data, in any order of swaps; return a message if the tensors were changed.

        Each step may be repeated, so calling it again completes what an exception has interrupted;
        after that it has no effect. A swap that is undone first hands its training weights to a
        later one of the same tensors, which restores them in its turn.

        Args:
            registered: The modules as they were, to put back parameters that were replaced.

        Returns:
            The message of a RuntimeError that names the first tensor that the block has changed or
            replaced; None if there is none.
        """
        if self._is_finalizing() or self not in active_swaps:
            return None
        later = active_swaps[active_swaps.index(self) + 1 :]
        try:
            problem = self._problem(later)
        finally:
            if later:
                self._undo_each(later)
            else:
                self._exchange(self.raws)
            forget_casts()

        replaced = [] if registered is None else registered.undo()
        active_swaps.remove(self)
        self.written += [name for name in replaced if name in self._copied]
        lost = [name for name in replaced if name not in self._copied]
        if not lost:
            return problem
        names = [name for name, *_ in self._pairs]
        return self._message(names.index(lost[0]), MSG_REPLACED_INSIDE)

    def _undo_each(self, later: list["Swap"]) -> None:
        """Restore the tensors that no later swap holds; the next later one gets the others' data.

        What it found as training weights was the data of this swap. It now restores what this one
        found.
        """
        for index, (tensor, raw) in enumerate(zip(self._tensors, self.raws, strict=True)):
            above = next((swap for swap in later if swap.position(tensor) is not None), None)
            if above is None:
                self._set(index, raw)
            else:
                above.raws[above._index[id(tensor)]] = raw

    def _problem(self, later: list["Swap"]) -> str | None:
        """Return a message for the first tensor that was changed and is not swapped again."""
        pointers = pointers_of(self._held)
        versions = self._versions_now()
        if not self._pointers or (pointers == self._pointers and versions == self.versions):
            return None

        for index, (name, tensor, _) in enumerate(self._pairs):
            if any(swap.position(tensor) is not None for swap in later):
                # The later swap exchanged its data on purpose, and compares what it noted.
                continue
            # Memory that was moved as a whole, by ``share_memory()``, is still that of the value.
            is_moved = pointers[index] != self._pointers[index]
            is_replaced = is_moved and pointers[index] != pointers_of([self._values[index]])[0]
            is_written = versions[index] != self.versions[index]
            if not (is_replaced or is_written):
                continue
            if name not in self._copied:
                template = MSG_CONVERTED_INSIDE if is_replaced else self._written(index)
                return self._message(index, template)
            self.written.append(name)
            # A block around this one, with an average of the same model, is not told again.
            for swap in active_swaps:
                place = swap.position(tensor)
                if place is not None:
                    swap.versions[place] = versions[index]
        return None

    def _written(self, index: int) -> str:
        """Return the message for a write, which has reached the average if the memory is shared."""
        (pointer,) = pointers_of([local_shard(self._pairs[index][2])])
        # A wrapper has no address, and was written to.
        is_shared = pointer != 0 and pointer == self._pointers[index]
        return MSG_WRITTEN_INSIDE if is_shared else MSG_WRITTEN_IN_VAIN

    def _message(self, index: int, template: str) -> str:
        name, tensor, _ = self._pairs[index]
        if not isinstance(tensor, torch.nn.Parameter):
            template = f"{template}. {MSG_BUFFER_OPTION}"
        return template.format(name=name)


class _Owner:
    """Undoes a swap when the block that made it is gone without having ended.

    A signal can arrive between the end of a block and the first line of the code that undoes it.
    Then only the deallocation of the block's frame, which holds this object, is certain to happen.
    """

    swap: Swap | None = None

    def __del__(self) -> None:
        if self.swap is not None:
            self.swap.undo()


# All swaps that have not been undone, in order, so that several averages, and models that share
# tensors, lose no training weights. Readers go through a copy, since an undone swap moves the
# others.
active_swaps: list[Swap] = []


def raw_value(tensor: Tensor) -> Tensor | None:
    """Return the training weights of a tensor.

    Args:
        tensor: A parameter or buffer of a model.

    Returns:
        The data that it had before the first swap, or None if nothing is swapped in.
    """
    # The first swap of a tensor found its training weights; a later one found the average.
    positions = ((swap, swap.position(tensor)) for swap in tuple(active_swaps))
    return next((swap.raws[index] for swap, index in positions if index is not None), None)


def any_swapped(model: torch.nn.Module) -> bool:
    """Return True if an average is swapped into one of the model's parameters."""
    if not active_swaps:
        return False
    reshard(model.modules())
    return any(raw_value(parameter) is not None for parameter in model.parameters())


@torch.no_grad()
def _write_elements(tensor: Tensor, value: Tensor) -> None:
    """Copy into a tensor, and adapt the versions by which writes of the user are detected."""
    held = local_shard(tensor)
    before = sum(versions_of([tensor, held]))
    held.copy_(local_shard(value))
    for swap in active_swaps:
        index = swap.position(tensor)
        # The latest swap has noted no versions yet while it writes.
        if index is not None and swap.versions:
            swap.versions[index] += sum(versions_of([tensor, held])) - before


@contextmanager
def exchanged(
    pairs: Iterable[Pair],
    registered: Registered | None = None,
    copied: AbstractSet[str] = frozenset(),
    note: Callable[[list[str]], None] | None = None,
) -> Generator[None]:
    """Exchange data for the length of a block, which must not change or replace the tensors.

    Args:
        pairs: Name, tensor of a model, and value that it has in the block.
        registered: The modules as they are, to put back parameters that the block replaces.
        copied: Names of copied buffers, which the block may write to and replace.
        note: Called with the names of those that it has written to or replaced.

    Yields:
        Nothing.

    Raises:
        RuntimeError: At the end, if the block has changed or replaced them. If it has raised an
            error of its own, that one gets a note.
    """
    swap = Swap(pairs, copied)
    # It undoes the swap if a signal prevents all of what follows.
    owner = _Owner()
    owner.swap = swap

    try:
        try:
            swap.apply(registered)
            yield
        except BaseException as error:
            problem = swap.undo(registered)
            if problem is not None:
                add_note(error, problem)
            raise
        problem = swap.undo(registered)
    finally:
        # This completes what a signal has interrupted, and otherwise has no effect. An error of the
        # block keeps this frame in a cycle, so the owner may go only when garbage is collected.
        swap.undo(registered)

    if problem is not None:
        raise RuntimeError(problem)
    if note is not None and swap.written:
        note(swap.written)


def raw_values(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the training weights of the tensors that averages are swapped into.

    Args:
        model: The model.

    Returns:
        The weights by canonical name; none if nothing is swapped in.
    """
    if not active_swaps:
        return {}
    members = NamedTensors(model).all().items()
    raws = {name: raw_value(member.current()) for name, member in members}
    return {name: raw for name, raw in raws.items() if raw is not None}
