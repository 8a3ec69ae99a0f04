"""The engine of ``EMA``: averages in tensors of their own, matched with the tensors of models by name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, SupportsIndex, cast

import torch
from torch import Tensor

from modkit._messages import MSG_NOTHING_CHOSEN, MSG_REBIND, add_note
from modkit.averaging import precision, state as ema_state
from modkit.averaging.averages import Average, Tensors
from modkit.averaging.copies import Copies
from modkit.averaging.named_tensors import Member, NamedTensors
from modkit.averaging.names import check_match, shapes_of
from modkit.averaging.options import Options
from modkit.averaging.plan import Cache, Plan
from modkit.averaging.rules import Rule
from modkit.averaging.sharding import MSG_FLATTENED, is_flattened, local_shard, reshard
from modkit.averaging.swap import Pairs, Registered, pairs_for
from modkit.averaging.watch import Watch
from modkit.errors import NameMismatchError


class Pairing:
    """The pairs of an average with the tensors of a model, valid until ``watch`` notices a change."""

    def __init__(self, named: NamedTensors, values: Tensors) -> None:
        self.pairs: Pairs = pairs_for(named, values)
        self.registered: Registered = Registered(named, self.pairs)
        tensors = [tensor for _, tensor, _ in self.pairs]
        self.watch: Watch = Watch([named], tensors, buffers=True, unknown=named.has_lazy())


class Engine:
    """The averages of an ``EMA``, in tensors of their own; ``begun`` is True once they hold values."""

    def __init__(self, model: torch.nn.Module, count: int, options: Options) -> None:
        check_model(model)
        named = NamedTensors(model)
        check_not_flattened(named)
        options.check_selection(model, named)

        self.model = model
        self.options: Options = options
        self.begun: bool = False
        self.averages: list[Average] = [Average(options) for _ in range(count)]
        self._copies: dict[str, Any] = {}
        self._plans: Cache[Plan] = Cache()
        self._swaps: Cache[Pairing] = Cache()
        # The model's tensors when they were last seen under these names, each with its address.
        self._seen: dict[str, tuple[Tensor, int]] = {}

    def step(self, model: torch.nn.Module, rule: Rule, count: int) -> bool:
        """Take one step towards a model's tensors, which must be those that are averaged.

        Args:
            model: The model, or another one of the same names and shapes.
            rule: How the averages move.
            count: Number of steps since the averages were copies of the model; they are at 0.

        Returns:
            False if the step is known to be skipped; an accelerator keeps that to itself.
        """
        plan = self._plans.get(model, None, lambda: self._plan(model))
        taken = plan.step(rule, count) is not False
        self.begun = self.begun or taken
        for average in self.averages:
            average.statistics = {}
        return taken

    def _named(self, model: torch.nn.Module) -> NamedTensors:
        """Return the tensors of a model under the names of those that are averaged."""
        check_model(model)
        like = None if model is self.model else NamedTensors(self.model)
        named = NamedTensors(model, like=like)
        check_not_flattened(named)
        return named

    def _plan(self, model: torch.nn.Module) -> Plan:
        named = self._named(model)
        _check_materialized(named)
        known = self.averages[0].tensors
        averaged, copied = self.options.split(named, known)
        _check_layouts(averaged, copied)
        if known:
            self._check_known(averaged)
        else:
            _check_any(averaged)
            self.options.check_globs(model)
        for average in self.averages:
            if not known:
                average.start(averaged)
            average.place(averaged)
        self._see(averaged)
        # Buffers may come and go.
        names = {member.name for member in copied}
        for name in self._copies.keys() - names:
            del self._copies[name]
        copies = Copies([(self._copies, one.name, one) for one in copied], self.options.device)
        parameters = named.parameters.items() if self.options.trainable_only else ()
        frozen = [one.tensor for name, one in parameters if name not in averaged]
        return Plan(self.options, self.averages, averaged, copies, [named], frozen=frozen)

    def _check_known(self, averaged: Tensors) -> None:
        """Raise NameMismatchError unless these tensors are those that are averaged."""
        what = "EMA: the model is not the one that is averaged"
        try:
            check_match(what, shapes_of(self.averages[0].tensors), shapes_of(averaged))
        except NameMismatchError as error:
            add_note(error, MSG_REBIND)
            raise

    def check_index(self, index: int) -> None:
        """Raise IndexError unless there is an average of this index, and TypeError unless it is an int."""
        if isinstance(index, bool) or not isinstance(cast("object", index), SupportsIndex):
            raise TypeError(f"EMA: index must be an int, got {index!r}")
        if not 0 <= index < len(self.averages):
            count = len(self.averages)
            raise IndexError(
                f"EMA: index is {index}, and there are {count} averages, numbered from 0"
            )

    def named(self, index: int) -> dict[str, Tensor]:
        """Return an average, the copies and its statistics by name; nothing before the first step."""
        self.check_index(index)
        average = self.averages[index]
        return {**average.values(), **self._copied(), **average.statistics} if self.begun else {}

    def _copied(self) -> dict[str, Tensor]:
        return {name: copy for name, copy in self._copies.items() if copy is not None}

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors that hold what ``named`` returns, without their error terms."""
        average = self.averages[index]
        return {**average.tensors, **self._copied(), **average.statistics} if self.begun else {}

    def names(self) -> dict[str, None]:
        """Return the names of what any average replaces in the model."""
        return {name: None for index in range(len(self.averages)) for name in self.tensors(index)}

    def pairing(self, model: torch.nn.Module, index: int) -> Pairing:
        """Pair an average with the tensors of a model."""
        check_model(model)
        # Only then can it be seen whether the tensors are others.
        reshard(model.modules())
        values = self.named(index)
        # The pairing keeps the tensors alive, so no other tensor can get the id of one.
        key = (*values, *map(id, values.values()))
        return self._swaps.get(model, key, lambda: Pairing(self._named(model), values))

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the copies. Tensors are not copied."""
        # A first update that was refused may have allocated averages.
        averages = self.averages if self.begun else [Average(self.options) for _ in self.averages]
        buffers = self._copied() if self.begun else {}
        return {"averages": [one.state_dict() for one in averages], "buffers": buffers}

    def load(self, loaded: ema_state.LoadedState, named: NamedTensors) -> None:
        """Load a state; it is checked before anything is changed."""
        bound, wanted, found = ema_state.matched(loaded, named, self.options)
        _check_layouts(bound)
        averages = [Average(self.options) for _ in self.averages]
        self._see({} if named.has_lazy() else bound)
        for average, state, tensors in zip(averages, loaded.averages, found, strict=True):
            average.start(bound)
            average.load_state_dict({**state, "tensors": tensors})
            statistics = state.get("statistics", {}).items()
            average.set_statistics({n: one.clone() for n, one in statistics if n in named.buffers})
        buffers = {name: value for name, value in loaded.buffers.items() if name in wanted}
        device = self.options.device
        self._copies = {name: one.to(device, copy=True) for name, one in buffers.items()}
        self._plans, self.averages, self.begun = Cache(), averages, True

    def reset(self) -> None:
        """Drop all values, so that the next step is the first one."""
        self._plans, self._copies, self._seen, self.begun = Cache(), {}, {}, False
        for average in self.averages:
            average.reset()

    def rebind(self) -> None:
        """Take in parameters that the model has got, and drop those that it has lost."""
        named = self._named(self.model)
        _check_materialized(named)
        if not self.begun:
            self.reset()
            return
        former = self._former_names(named)
        averaged, copied = self.options.split(named, former)
        _check_any(averaged)
        _check_layouts(averaged, copied)
        if self.options.on_nonfinite != "ignore":
            known = shapes_of(self.averages[0].tensors)
            new = {
                n: one for n, one in averaged.items() if known.get(former.get(n, "")) != one.shape
            }
            precision.check_finite("EMA", new)
        self._plans = Cache()
        self.averages = [one.resized(averaged, self.options, former) for one in self.averages]
        self._see(averaged)
        names = named.names()
        self._copies = {name: copy for name, copy in self._copies.items() if name in names}
        for average in self.averages:
            average.statistics = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The tensors of a copy have addresses of their own.
        self._see({name: tensor for name, (tensor, _) in self._seen.items()})

    def _see(self, averaged: Tensors) -> None:
        """Remember which tensors are averaged under these names."""
        self._seen = {name: (tensor, _address(tensor)) for name, tensor in averaged.items()}

    def _former_names(self, named: NamedTensors) -> dict[str, str]:
        """Map names of the model to those that their averages have.

        The same tensor may have another name now: adapters and parametrizations wrap its layer, and
        removing a layer of a list renumbers the others. If it also has other memory, it may hold
        something else (the original of a parametrization is what ``right_inverse`` returns), so
        only an equal name counts. A name whose tensor is elsewhere in the model now is a new one.
        """
        former_of = {id(tensor): name for name, (tensor, _) in self._seen.items()}
        members = named.all()
        present = {id(member.tensor) for member in members.values()}
        found: dict[str, str] = {}
        for name, member in members.items():
            former = former_of.get(id(member.tensor))
            if former is None:
                seen = self._seen.get(name)
                if name in self.averages[0].tensors and (
                    seen is None or id(seen[0]) not in present
                ):
                    found[name] = name
            elif former == name or self._seen[former][1] == _address(member.tensor):
                found[name] = former
        return found

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Move and cast the averages, and keep later ones there."""
        options = self.options
        options = replace(options, device=device or options.device, dtype=dtype or options.dtype)
        averaged: dict[str, Tensor] = {}
        if known := self.averages[0].tensors:
            averaged, _ = options.split(NamedTensors(self.model), known)
            self._check_known(averaged)
        names = {name: name for name in averaged}
        self.averages = [one.resized(averaged, options, names) for one in self.averages]
        self.options = options
        self._plans = Cache()
        if device is not None:
            self._copies = {name: copy.to(device) for name, copy in self._copied().items()}


def _address(tensor: Tensor) -> int:
    """Return where the elements of a tensor are, or 0 if it has no memory of its own."""
    try:
        return local_shard(tensor).data_ptr()
    except RuntimeError:
        return 0


def check_model(model: object) -> None:
    """Raise TypeError unless the argument is a module: other libraries take parameters."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"EMA: model must be a torch.nn.Module, got {type(model).__name__}. Pass the "
            "model, not parameters: EMA averages by name and swaps them itself."
        )


def check_not_flattened(named: NamedTensors) -> None:
    """Raise TypeError if a model is sharded by ``FullyShardedDataParallel``."""
    if is_flattened(named.modules):
        raise TypeError(f"EMA: {MSG_FLATTENED}. Nothing has been changed.")


def _check_any(averaged: Tensors) -> None:
    if not averaged:
        raise ValueError(f"EMA: {MSG_NOTHING_CHOSEN}")


def _check_layouts(averaged: Tensors, copied: Sequence[Member] = ()) -> None:
    """Raise RuntimeError, by name, for tensors that torch's kernels do not average or copy in place."""
    for name, tensor in (*averaged.items(), *((one.name, one.tensor) for one in copied)):
        # The older kind of nested tensors is of the strided layout.
        is_opaque = tensor.is_nested or tensor.is_mkldnn
        if is_opaque or (name in averaged and tensor.layout is not torch.strided):
            layout = f"{tensor.layout} (nested)" if tensor.is_nested else tensor.layout
            policy = "ignore" if is_opaque else "copy"
            raise RuntimeError(
                f"EMA: {name} has the layout {layout}, for which torch has no kernels. Leave it "
                f"out with exclude={name!r}, or buffers={{{name!r}: {policy!r}}} if it is a "
                "buffer. Nothing has been changed."
            )


def _check_materialized(named: NamedTensors) -> None:
    if named.has_lazy():
        raise RuntimeError("EMA: a parameter is uninitialized; call the model once before update()")
    for name, member in named.parameters.items():
        if member.tensor.is_meta:
            raise RuntimeError(
                f"EMA: {name} is on the meta device and has no values; call model.to_empty() and "
                "initialize or load the model before update(). Nothing has been changed."
            )
