"""Swapping averages into a model and restoring the training weights, without copies.

A swap is registered before its first write, and undoing it may be repeated. So whatever raises in
between, an error or a signal, the training weights can be restored from what is registered.
"""

import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import override

from modkit._interrupts import critical
from modkit._messages import (
    MSG_BUFFER_OPTION,
    MSG_CONVERTED_INSIDE,
    MSG_REPLACED_INSIDE,
    MSG_WRITTEN_IN_VAIN,
    MSG_WRITTEN_INSIDE,
    add_note,
)
from modkit.averaging.recipe import Watch, Watched
from modkit.averaging.sharding import is_sharded, local_shard, reshard
from modkit.averaging.tensors import (
    NamedTensors,
    forget_casts,
    get_version,
    is_wrapper,
    pairs_for,
    pointers_of,
    versions_of,
)


# Loops in C: no signal handler runs between two tensors.
_get_data: Final = operator.attrgetter("data")
_set_data: Final[Callable[[Tensor, Tensor], None]] = cast("Any", Tensor.data).__set__

# The tables that are put back into a module, and how each is copied. Those of buffers are among
# them: a parametrization that is removed may leave its tensor as a buffer, and a mask that is
# removed is a buffer that the layer needs.
_PUT_BACK: Final[Mapping[str, Callable[[Any], Any]]] = {
    "_parameters": dict,
    "_buffers": dict,
    "_non_persistent_buffers_set": set,
    "_modules": dict,
}


def _computing_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """Return the hooks that compute a tensor: of pruning, and the older weight and spectral norm.

    Torch tells them by a method ``remove``, which ends the computation. Other hooks are not part of
    a swap: they may come and go, inside blocks too.
    """
    hooks = module._forward_pre_hooks.items()
    return {key: hook for key, hook in hooks if hasattr(hook, "remove")}


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


class Pairing(Watched):
    """Values for the tensors of a model, prepared once for all swaps until something changes.

    Fusing layers, removing parametrizations, ``load_state_dict(assign=True)``, ``to()`` and
    assignments put other objects into a model. A swap restores the data of tensors, so its tensors
    have to be there, and are put back. Buffers that are not swapped may be replaced, as forwards
    do, unless their module has to be put back.

    Args:
        named: The tensors and modules of the model.
        values: The values by name.
        copied: Names of copied buffers, which a block may write to and replace.
        frozen: Parameters that end the pairing if they begin to require gradients.
        tables: Tables in which the values are: another value there ends the pairing.

    Attributes:
        names: Names of the tensors; the next two are lists of the same order.
        tensors: Tensors of the model.
        values: The values that they are to have.
        places: Index of each tensor in these lists, by its ``id``.
        by_element: Indices of shards and of wrappers, whose data are not theirs: elements are
            exchanged.
        casts: Indices of values that have another dtype or device, or are for inference tensors.
        recurrent: Recurrent layers of the model.
        watch: Notices tensors that were replaced, moved, cast or reshaped.

    Raises:
        NameMismatchError: If names or shapes do not match.
    """

    def __init__(
        self,
        named: NamedTensors,
        values: Mapping[str, Tensor],
        copied: Iterable[str] = (),
        frozen: Iterable[Tensor] = (),
        tables: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        pairs = pairs_for(named, values)
        self.names: list[str] = [name for name, _, _ in pairs]
        self.tensors: list[Tensor] = [tensor for _, tensor, _ in pairs]
        self.values: list[Tensor] = [value for _, _, value in pairs]
        self.copied: frozenset[str] = frozenset(copied)
        self.places: dict[int, int] = {id(t): index for index, t in enumerate(self.tensors)}
        self.by_element: list[int] = [
            index for index, t in enumerate(self.tensors) if is_sharded(t) or is_wrapper(t)
        ]
        self.casts: list[int] = [
            index
            for index, (_, tensor, value) in enumerate(pairs)
            if (value.dtype, value.device) != (tensor.dtype, tensor.device) or tensor.is_inference()
        ]

        # A value that was sharded or gathered for this model does not follow its average.
        is_stale = any(value is not values[name] for name, _, value in pairs)
        self.watch: Watch = Watch(
            named.states,
            [*self.tensors, *self.values],
            buffers=True,
            tables=tables,
            frozen=frozen,
            unknown=is_stale or named.has_lazy() or named.scripted,
        )

        self._before: list[_Before] = []
        for module in named.modules:
            # C++ owns the registries of a scripted module, and makes new objects at each access.
            if not isinstance(module, torch.jit.ScriptModule):
                copies = {name: copy(getattr(module, name)) for name, copy in _PUT_BACK.items()}
                hooks = _computing_hooks(module)
                self._before.append(_Before(weakref.ref(module), type(module), copies, hooks))
        # A parametrized module has a class to itself. Removing the parametrization also deletes the
        # property that computes the tensor from that class.
        kinds = [row.kind for row in self._before if "parametrizations" in row.tables["_modules"]]
        self._classes = [(kind, dict(vars(kind))) for kind in kinds]
        recurrent = (each for each in named.modules if isinstance(each, torch.nn.RNNBase))
        self.recurrent: list[weakref.ref[torch.nn.RNNBase]] = [*map(weakref.ref, recurrent)]

    @override
    def adapt(self) -> bool:
        """Return True if only a forward of FSDP has registered full parameters over the shards."""
        if not self.by_element:
            return False
        self.reshard()
        return not self.watch.changed()

    def reshard(self) -> None:
        """Free the full parameters that a forward of FSDP may have left registered."""
        reshard(before.module for before in self._before)

    def compact(self) -> None:
        """Give recurrent layers on CUDA averaged weights in one piece, as cuDNN wants them.

        They are in new memory then. A layer keeps what it has if only some weights are swapped: the
        others would stay in that memory when the block ends.
        """
        for reference in self.recurrent:
            module = reference()
            if module is not None and all(
                id(weight) in self.places for weight in module._flat_weights
            ):
                module.flatten_parameters()

    def put_back(self) -> list[str]:
        """Put back swapped tensors, and modules of them, that were replaced; return their names."""
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
                # A module without swapped parameters may be replaced, as an adapter without an
                # average is.
                if member is not None and current.get(key) is not member:
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
        return [self.names[self.places[id(t)]] for t in tensors if id(t) in self.places]


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
        pairing: The tensors and the values that they are to have.

    Attributes:
        written: Names of copied buffers that the block has written to or replaced.
        raws: The data that :meth:`undo` restores, in the order of the pairing.
        versions: Version counters after the exchange, by which writes of the user are detected.
    """

    # While the interpreter exits, the globals of this file may be gone, and no model is used again.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, pairing: Pairing) -> None:
        self._pairing = pairing
        self.written: list[str] = []
        # Lists of one order, that of the pairing. ``_held`` has local shards of sharded tensors.
        self._held = pairing.tensors
        self._values = [*pairing.values]
        self.raws: list[Tensor] = []
        self._pointers: list[int] = []
        self.versions: list[int] = []

    @critical
    def apply(self) -> None:
        """Exchange the data. If that raises, or a signal arrives, :meth:`undo` restores them."""
        pairing = self._pairing
        self.raws = list(map(_get_data, pairing.tensors))
        for index in pairing.casts:
            raw = self.raws[index]
            # An inference tensor computes with the storage of another one only.
            with torch.inference_mode(raw.is_inference()):
                self._values[index] = self._values[index].to(raw.device, raw.dtype, copy=True)
        if pairing.by_element:
            self._take_elements()

        # In this order: a swap that is registered can be undone, whatever interrupts the exchange.
        active_swaps.append(self)
        self._exchange(self._values)
        forget_casts()
        if pairing.recurrent and not pairing.by_element:
            pairing.compact()
        # By these, changes in the block are detected.
        self._pointers, self.versions = self._marks()

    def _take_elements(self) -> None:
        """Clone the elements of shards and wrappers, which are restored by writing to them."""
        self._held = [*self._held]
        for index in self._pairing.by_element:
            # FSDP has a pointer of its own to the shard, and a wrapper holds other tensors. In
            # inference mode, a DTensor cannot be detached.
            tensor = self._held[index]
            with torch.inference_mode(False):
                self.raws[index] = tensor.detach().clone()
            self._held[index] = local_shard(tensor)

    def _exchange(self, values: list[Tensor]) -> None:
        """Give the tensors other data: as pointers in one loop in C, unless some need copies."""
        pairing = self._pairing
        if not pairing.by_element:
            # A deque of no length runs an iterator to its end.
            deque(map(_set_data, pairing.tensors, values), maxlen=0)
            return
        for index, value in enumerate(values):
            self._set(index, value)

    def _set(self, index: int, value: Tensor) -> None:
        tensor = self._pairing.tensors[index]
        if index in self._pairing.by_element:
            _write_elements(tensor, value)
        else:
            tensor.data = value

    def _marks(self) -> tuple[list[int], list[int]]:
        """Return the present addresses and versions of the tensors."""
        tensors = self._pairing.tensors
        try:
            pointers = list(map(Tensor.data_ptr, self._held))
            versions = list(map(get_version, tensors))
        except RuntimeError:
            pointers = pointers_of(self._held)
            versions = versions_of(tensors)
        for index in self._pairing.by_element:
            # A write to a sharded tensor counts there, one to its local shard here. Torch counts no
            # write by its kernels for lists.
            versions[index] += versions_of([self._held[index]])[0]
        return pointers, versions

    def position(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor in the lists, or None if it is not swapped."""
        return self._pairing.places.get(id(tensor))

    def undo(self) -> str | None:
        """Restore the data, in any order of swaps; return a message if the tensors were changed.

        Each step may be repeated, so calling it again completes what an exception has interrupted;
        after that it has no effect. A swap that is undone first hands its training weights to a
        later one of the same tensors, which restores them in its turn.

        Returns:
            The message of a RuntimeError that names the first tensor that the block has changed or
            replaced; None if there is none.
        """
        if self._is_finalizing() or self not in active_swaps:
            return None
        return self._undo(has_changed=self._pairing.watch.changed(metadata=False))

    @critical
    def _undo(self, *, has_changed: bool) -> str | None:
        """Restore the data, and members of the model that were replaced."""
        pairing = self._pairing
        later = active_swaps[active_swaps.index(self) + 1 :]
        try:
            problem = self._problem(later)
        finally:
            if later:
                self._undo_each(later)
            else:
                self._exchange(self.raws)
            forget_casts()

        if pairing.by_element:
            # Full parameters of a forward would hide what the shards hold.
            pairing.reshard()
        replaced = pairing.put_back() if has_changed else []
        active_swaps.remove(self)
        for name in replaced:
            if name not in pairing.copied:
                return self._message(pairing.names.index(name), MSG_REPLACED_INSIDE)
        self.written += replaced
        return problem

    def _undo_each(self, later: list["Swap"]) -> None:
        """Restore the tensors that no later swap holds; the next later one gets the others' data.

        What it found as training weights was the data of this swap. It now restores what this one
        found.
        """
        for index, (tensor, raw) in enumerate(zip(self._pairing.tensors, self.raws, strict=True)):
            above = next((swap for swap in later if swap.position(tensor) is not None), None)
            if above is None:
                self._set(index, raw)
            else:
                above.raws[above._pairing.places[id(tensor)]] = raw

    def _problem(self, later: list["Swap"]) -> str | None:
        """Return a message for the first tensor that was changed and is not swapped again."""
        pointers, versions = self._marks()
        if not self._pointers or (pointers == self._pointers and versions == self.versions):
            return None

        pairing = self._pairing
        for index, (name, tensor) in enumerate(zip(pairing.names, pairing.tensors, strict=True)):
            if any(swap.position(tensor) is not None for swap in later):
                # The later swap exchanged its data on purpose, and compares what it noted.
                continue
            # Memory that was moved as a whole, by ``share_memory()``, is still that of the value.
            is_moved = pointers[index] != self._pointers[index]
            is_replaced = is_moved and pointers[index] != pointers_of([self._values[index]])[0]
            is_written = versions[index] != self.versions[index]
            if not (is_replaced or is_written):
                continue
            if name not in pairing.copied:
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
        (pointer,) = pointers_of([local_shard(self._pairing.values[index])])
        # A wrapper has no address, and was written to.
        is_shared = pointer != 0 and pointer == self._pointers[index]
        return MSG_WRITTEN_INSIDE if is_shared else MSG_WRITTEN_IN_VAIN

    def _message(self, index: int, template: str) -> str:
        if not isinstance(self._pairing.tensors[index], torch.nn.Parameter):
            template = f"{template}. {MSG_BUFFER_OPTION}"
        return template.format(name=self._pairing.names[index])


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
def exchanged(pairing: Pairing, note: Callable[[list[str]], None] | None = None) -> Generator[None]:
    """Exchange data for the length of a block, which must not change or replace the tensors.

    Args:
        pairing: The tensors of a model, and the values that they have in the block.
        note: Called with the names of copied buffers that the block has written to or replaced.

    Yields:
        Nothing.

    Raises:
        RuntimeError: At the end, if the block has changed or replaced them. If it has raised an
            error of its own, that one gets a note.
    """
    swap = Swap(pairing)
    # It undoes the swap if a signal prevents all of what follows.
    owner = _Owner()
    owner.swap = swap

    try:
        try:
            swap.apply()
            yield
        except BaseException as error:
            problem = swap.undo()
            if problem is not None:
                add_note(error, problem)
            raise
        problem = swap.undo()
    finally:
        # This completes what a signal has interrupted, and otherwise has no effect. An error of the
        # block keeps this frame in a cycle, so the owner may go only when garbage is collected.
        swap.undo()
        owner.swap = None

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
