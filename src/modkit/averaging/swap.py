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
from itertools import chain
from typing import Any, Final, cast

import torch
from torch import Tensor
from typing_extensions import override

from modkit._interrupts import critical
from modkit._messages import (
    MSG_BUFFER_OPTION,
    MSG_CONVERTED_INSIDE,
    MSG_REPLACED_INSIDE,
    MSG_WRITTEN_INSIDE,
    add_note,
)
from modkit.averaging.recipe import TABLES, Watch, Watched, metadata_of
from modkit.averaging.sharding import is_sharded, local_shard, reshard
from modkit.averaging.tensors import NamedTensors, forget_casts, is_wrapper, pairs_for


# Loops in C: no signal handler runs between two tensors.
_get_data: Final = operator.attrgetter("data")
_set_data: Final[Callable[[Tensor, Tensor], None]] = cast("Any", Tensor.data).__set__
_get_version: Final = operator.attrgetter("_version")


def versions_of(tensors: list[Tensor], by_element: Iterable[int] = ()) -> list[int]:
    """Return the version counters of tensors; inference tensors have none.

    At the indices ``by_element`` may be sharded tensors: a write to one counts there, and a write
    to its local shard here. Torch counts no write by its kernels for lists.
    """
    try:
        versions = list(map(_get_version, tensors))
    except RuntimeError:
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    for index in by_element:
        versions[index] += versions_of([local_shard(tensors[index])])[0]
    return versions


class Pairing(Watched):
    """Values for the tensors of a model, prepared once for all swaps until something changes.

    Fusing layers, ``load_state_dict(assign=True)``, ``to()`` and assignments put other objects into
    a model. A swap restores the data of tensors, so the tables that have lost one of them are put
    back. Buffers that are not swapped may be replaced, as forwards do.

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
        recurrent: Recurrent layers of the model that are swapped as a whole.
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
            self.tensors,
            buffers=True,
            tables=tables,
            frozen=frozen,
            unknown=is_stale or named.has_lazy() or named.scripted,
        )

        # The model itself is not kept alive by what is cached for it.
        self._before = [
            (state, {table: dict(state[table]) for table in TABLES}) for state in named.states
        ]
        self._modules = [*map(weakref.ref, named.modules)]
        # If only some weights are swapped, the others would stay in the memory of the one piece.
        self.recurrent: list[weakref.ref[torch.nn.RNNBase]] = [
            weakref.ref(module)
            for module in named.modules
            if isinstance(module, torch.nn.RNNBase)
            and all(id(weight) in self.places for weight in module._flat_weights)
        ]

    @override
    def adapt(self) -> bool:
        """Return True if only a forward of FSDP has registered full parameters over the shards."""
        if not self.by_element:
            return False
        self.reshard()
        return not self.watch.changed()

    def reshard(self) -> None:
        """Free the full parameters that a forward of FSDP may have left registered."""
        modules = (reference() for reference in self._modules)
        reshard(module for module in modules if module is not None)

    def compact(self) -> None:
        """Give recurrent layers on CUDA averaged weights in one piece, as cuDNN wants them.

        They are in new memory then.
        """
        for reference in self.recurrent:
            module = reference()
            if module is not None:
                module.flatten_parameters()

    def put_back(self) -> list[str]:
        """Put back the tables by which the model has lost swapped tensors; return their names."""
        model = self._modules[0]()
        assert model is not None, "the model of a swap is alive"
        present = set(map(id, chain(model.parameters(), model.buffers())))
        rows = zip(self.names, self.tensors, strict=True)
        lost = {id(tensor): name for name, tensor in rows if id(tensor) not in present}

        for state, tables in self._before if lost else ():
            for table, members in tables.items():
                current = state[table]
                gone = [member for key, member in members.items() if current.get(key) is not member]
                # Buffers that are not swapped stay as forwards have replaced them.
                if any(table != "_buffers" or id(member) in lost for member in gone):
                    current.clear()
                    current.update(members)
                    for key in members:
                        # A plain tensor that took the place of the member would hide it.
                        state.pop(key, None)
        return [*lost.values()]


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
        # Lists of one order, that of the pairing.
        self._values = [*pairing.values]
        self.raws: list[Tensor] = []
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
        for index in pairing.by_element:
            # FSDP has a pointer of its own to the shard, and a wrapper holds other tensors, so they
            # are restored by writing to them. In inference mode, a DTensor cannot be detached.
            with torch.inference_mode(False):
                self.raws[index] = pairing.tensors[index].detach().clone()

        # In this order: a swap that is registered can be undone, whatever interrupts the exchange.
        active_swaps.append(self)
        self._exchange(self._values)
        forget_casts()
        if pairing.recurrent and not pairing.by_element:
            pairing.compact()
        # By these, writes in the block are detected.
        self.versions = versions_of(pairing.tensors, pairing.by_element)

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
        return self._undo(has_changed=self._pairing.watch.changed())

    @critical
    def _undo(self, *, has_changed: bool) -> str | None:
        """Restore the data, and members of the model that were replaced."""
        pairing = self._pairing
        later = active_swaps[active_swaps.index(self) + 1 :]
        try:
            problem = self._problem(later, has_changed=has_changed)
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

    def _problem(self, later: list["Swap"], *, has_changed: bool) -> str | None:
        """Return a message for the first tensor that was changed and is not swapped again."""
        pairing = self._pairing
        versions = versions_of(pairing.tensors, pairing.by_element)
        if not self.versions or (versions == self.versions and not has_changed):
            return None

        for index, (name, tensor) in enumerate(zip(pairing.names, pairing.tensors, strict=True)):
            if any(swap.position(tensor) is not None for swap in later):
                # The later swap exchanged its data on purpose, and compares what it noted.
                continue
            is_converted = metadata_of([tensor]) != metadata_of([self.raws[index]])
            if versions[index] == self.versions[index] and not is_converted:
                continue
            if name not in pairing.copied:
                template = MSG_CONVERTED_INSIDE if is_converted else MSG_WRITTEN_INSIDE
                return self._message(index, template)
            self.written.append(name)
        return None

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
