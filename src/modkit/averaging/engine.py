"""The engine of ``EMA``: averages in tensors of their own, matched with models by name."""

import operator
from typing import Any

import torch
from torch import Tensor

from modkit._interrupts import uninterrupted
from modkit._messages import MSG_NOTHING_CHOSEN, MSG_REBIND, MSG_UNFROZEN
from modkit.averaging import batch_norm, precision, state as ema_state
from modkit.averaging.options import Options, check_index
from modkit.averaging.recipe import Cache, Copies, Plan, Walk
from modkit.averaging.rules import Average, Rule, Tensors
from modkit.averaging.sharding import check_shards, is_sharded, shards_of
from modkit.averaging.swap import Pairing, versions_of
from modkit.averaging.tensors import (
    Member,
    NamedTensors,
    address_of,
    check_match,
    copy_of,
    is_wrapper,
    pairs_for,
    shapes_of,
    write,
    write_all,
)


class Engine:
    """The averages of an ``EMA``, in tensors of their own.

    Args:
        model: The model in training.
        count: Number of averages, one for each schedule.
        options: The options, which all averages share.

    Attributes:
        model: The model in training.
        options: The options.
        begun: True once the averages hold values.
        averages: The averages, in the order of the schedules.
        swaps: The latest pairings of averages with models.

    Raises:
        TypeError: If ``model`` is not a module, or is sharded by FSDP1 or DeepSpeed ZeRO-3.
        ValueError: If the options select no parameter, or a glob matches no name.
    """

    def __init__(self, model: torch.nn.Module, count: int, options: Options) -> None:
        check_model(model)
        named = NamedTensors(model)
        check_shards("EMA", named.modules)
        options.check_selection(model, named)

        self.model = model
        self.options: Options = options
        self.begun: bool = False
        self.averages: list[Average] = [Average(options) for _ in range(count)]
        # Copied buffers by name; None where the model's buffer is None.
        self._copies: dict[str, Any] = {}
        self._plans: Cache[Plan] = Cache()
        self._walks: Cache[Walk] = Cache()
        self.swaps: Cache[Pairing] = Cache()
        # The model's tensors when they were last seen under these names, each with its address.
        self._seen: dict[str, tuple[Tensor, int]] = {}
        # The copy of the model that stays at the first average, and the tensors that it was given.
        self._module: torch.nn.Module | None = None
        self._followed: dict[str, Tensor] = {}
        # Whether parameters that begin to train get averages, with trainable_only=True.
        self.follows_unfrozen: bool = False
        # Names of the parameters that were there, whether or not they train.
        self._names = {*named.parameters}

    def step(self, model: torch.nn.Module, rule: Rule, count: int) -> bool:
        """Take one step towards a model's tensors, which must be those that are averaged.

        Args:
            model: The model, or another one of the same names and shapes.
            rule: How the averages move.
            count: Number of steps since the averages were copies of the model; they are at 0.

        Returns:
            False if the step was skipped. Whether an accelerator skips it is known on the device
            only, and reading that flag would be a host sync, so then it is True.

        Raises:
            TypeError: If ``model`` is not a module, or is sharded by FSDP1 or DeepSpeed ZeRO-3.
            NameMismatchError: If names or shapes are not those of the averages.
            RuntimeError: If a tensor has no values, no kernels, or, with ``on_nonfinite="raise"``,
                is not finite.
        """
        # The plan of the latest model, made anew if anything about it has changed.
        plan = self._plans.get(model, None, lambda: self._plan(model))
        # A flag on a device is not read: it counts as taken.
        if self.options.precision == "stochastic":
            for average in self.averages:
                average.seed(count)
        taken = plan.step(rule, count) is not False
        self.begun = self.begun or taken
        for average in self.averages:
            average.statistics.clear()
        if self._module is not None:
            self.follow()
        return taken

    def own(self) -> NamedTensors:
        """Return the tensors of the model in training."""
        return self._walks.get(self.model, None, lambda: Walk(self.model)).named

    def _named(self, model: torch.nn.Module) -> NamedTensors:
        """Return the tensors of a model under the names of those that are averaged."""
        check_model(model)
        like = None if model is self.model else self.own()
        named = NamedTensors(model, like=like)
        check_shards("EMA", named.modules)
        return named

    def _plan(self, model: torch.nn.Module) -> Plan:
        """Match the model with the averages, and allocate those before the first step."""
        named = self._named(model)
        _check_materialized(named)
        averaged, copied = self._split(model, named)
        _check_layouts(averaged)

        if self.begun:
            self._check_averaged(averaged)
        else:
            # A first step that was refused may have left averages, of a part of the model if memory
            # ran out. They hold no values, so they are made anew.
            _check_any(averaged)
            # A lazy model had no names to compare the globs with when the EMA was created.
            self.options.check_globs(model)
            for average in self.averages:
                average.start(averaged)
            self._forget_plans()
        # Plans of other models would step what was there before.
        if sum(average.place(averaged) for average in self.averages):
            self._forget_plans()
        # Those of another model would be kept alive.
        own = self.own()
        self._see({name: own.tensor(name) for name in averaged if own.member(name) is not None})

        # Buffers may come and go.
        for name in self._copies.keys() - {member.name for member in copied}:
            del self._copies[name]
        pairs = [(self._copies, member.name, member) for member in copied]
        copies = Copies(pairs, self.options.device)

        return Plan(
            options=self.options,
            averages=self.averages,
            currents=averaged,
            copies=copies,
            models=[named],
            frozen=self._frozen(named, averaged),
        )

    def _split(
        self, model: torch.nn.Module, named: NamedTensors
    ) -> tuple[dict[str, Tensor], list[Member]]:
        """Return the tensors of a model that are to be averaged, and those to be copied."""
        present = self.averages[0].tensors if self.begun else {}
        averaged, copied = self.options.split(named, present)
        if model is not self.model:
            # Which parameters train is a matter of the tracked model, not of another one.
            own = self.own()
            frozen = own.parameters.keys() - self.options.split(own, present)[0].keys()
            averaged = {name: tensor for name, tensor in averaged.items() if name not in frozen}
        return averaged, copied

    def _frozen(self, named: NamedTensors, averaged: Tensors) -> list[Tensor]:
        """Return the parameters that must not begin to train: they would have no average."""
        if not self.options.trainable_only:
            return []
        return [m.tensor for name, m in named.parameters.items() if name not in averaged]

    def _check_averaged(self, averaged: Tensors) -> None:
        """Raise NameMismatchError unless these tensors are those that are averaged."""
        present = self.averages[0].tensors
        new = averaged.keys() - present.keys()
        # Parameters that were there when the averages were created, and did not train.
        is_unfrozen = new and self.options.trainable_only and new <= self._names
        if is_unfrozen and self.follows_unfrozen and present.keys() <= averaged.keys():
            with uninterrupted(), torch.inference_mode(False), torch.no_grad():
                self.rebind()
            return
        check_match(
            "EMA: the model is not the one that is averaged",
            shapes_of(present),
            shapes_of(averaged),
            end=MSG_UNFROZEN if is_unfrozen else MSG_REBIND,
        )

    def writes(self) -> int:
        """Return how often a parameter that is averaged was written to, as far as torch counts."""
        return max(versions_of(self.averaged_parameters()), default=0)

    def averaged_parameters(self) -> list[Tensor]:
        """Return the model's parameters that are averaged, or will be from the first step on."""
        members = self.own().parameters.values()
        return [member.tensor for member in members if self.options.chooses(member)]

    def check_index(self, index: int) -> None:
        """Check the index of an average.

        Args:
            index: Index of the average, from 0.

        Raises:
            TypeError: If it is not an int.
            IndexError: If there is no average of this index.
        """
        check_index(index, len(self.averages))

    def named(self, index: int) -> dict[str, Tensor]:
        """Return the values of an average by name, with the copies and its statistics.

        Args:
            index: Index of the average.

        Returns:
            Tensors by name, which are not copied; none before the first step.

        Raises:
            TypeError, IndexError: If ``index`` is not that of an average.
        """
        self.check_index(index)
        if not self.begun:
            return {}
        average = self.averages[index]
        return {**average.tensors, **self.copied(), **average.statistics}

    def copied(self) -> dict[str, Tensor]:
        """Return the copied buffers by name."""
        return {name: copy for name, copy in self._copies.items() if copy is not None}

    def matched(self, model: torch.nn.Module, index: int) -> tuple[NamedTensors, dict[str, Tensor]]:
        """Return the tensors of a model that has what is averaged, and the values for them.

        Args:
            model: The model, or another one of the same names and shapes.
            index: Index of the average.

        Raises:
            TypeError: If ``model`` is not a module, is sharded by FSDP1 or DeepSpeed ZeRO-3, or
                ``index`` is not an int.
            IndexError: If there is no average ``index``.
            NameMismatchError: If names or shapes do not match.
        """
        self.check_index(index)
        named = self._named(model)
        averaged, _ = self._split(model, named)
        if self.begun and not named.has_lazy():
            self._check_averaged(averaged)
        return named, self.named(index)

    def pair(self, model: torch.nn.Module, index: int) -> Pairing:
        """Pair an average with a model, as :meth:`matched` compares them."""
        named, values = self.matched(model, index)
        # The kernels of batch normalization write means and variances without a trace. Only
        # its count shows an evaluation in training mode, which is a mistake.
        copied = self._copies.keys() - batch_norm.statistics_of(named).keys()
        average = self.averages[index]
        tables = (average.tensors, average.statistics, self._copies)
        return Pairing(named, values, copied, self._frozen(named, average.tensors), tables)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on; tensors are not copied.

        Returns:
            The states of the ``"averages"`` in a list, and the copied ``"buffers"`` by name;
            without tensors before the first step.
        """
        # A first update that was refused may have allocated averages.
        averages = self.averages if self.begun else [Average(self.options) for _ in self.averages]
        stored = [{"tensors": dict(a.tensors), "statistics": dict(a.statistics)} for a in averages]
        return {"averages": stored, "buffers": self.copied() if self.begun else {}}

    def load(self, loaded: ema_state.LoadedState, named: NamedTensors) -> None:
        """Load a state; it is compared with the model before anything is changed.

        Args:
            loaded: A valid state with averages. Its tensors are copied.
            named: The tensors of the model in training.

        Raises:
            NameMismatchError: If names or shapes of the state are not those of the model.
            ValueError: If an average is complex and its parameter real, or the other way round.
            RuntimeError: If torch has no kernels for the layout of a parameter, or it is lazy or on
                the meta device.
        """
        _check_materialized(named)
        averaged, copied, saved_averages = ema_state.matched(loaded, named, self.options)
        _check_layouts(averaged)

        averages = [Average(self.options) for _ in self.averages]
        for index, (average, tensors) in enumerate(zip(averages, saved_averages, strict=True)):
            with ema_state.constructing(f"averages[{index}]"):
                average.start(averaged, tensors)
                # Those of a layer that the model has lost since are dropped.
                statistics = loaded.averages[index]["statistics"].items()
                average.set_statistics({n: t.clone() for n, t in statistics if n in named.buffers})

        device = self.options.device
        copies: dict[str, Any] = {}
        for name, buffer in loaded.buffers.items():
            if name in copied:
                with ema_state.constructing(f"buffers[{name!r}]"):
                    copies[name] = shards_of(buffer, copied[name]).to(device, copy=True)

        # Nothing below fails.
        self._see(averaged)
        self._copies = copies
        self._forget_plans()
        self.averages = averages
        self.begun = True
        self.follow()

    def _forget_plans(self) -> None:
        """Drop what is cached of averages that are replaced."""
        self._plans.clear()
        self.swaps.clear()

    def reset(self) -> None:
        """Drop all values, so that the next step is the first one."""
        self._forget_plans()
        self._copies = {}
        self._seen = {}
        self.begun = False
        for average in self.averages:
            average.reset()
        self.follow()

    def rebind(self) -> None:
        """Take in parameters that the model has got, and drop those that it has lost.

        Raises:
            TypeError: If the model is sharded by FSDP1 or DeepSpeed ZeRO-3 now.
            RuntimeError: If a tensor has no values or no kernels, or a new one is not finite unless
                ``on_nonfinite`` is ``"ignore"``.
            ValueError: If no parameter is selected any more.
        """
        named = self._named(self.model)
        _check_materialized(named)
        if not self.begun:
            self.reset()
            return

        former_names = self._former_names(named)
        averaged, _ = self.options.split(named, former_names)
        _check_any(averaged)
        _check_layouts(averaged)
        if self.options.on_nonfinite != "ignore":
            # The average of a new one starts as a copy.
            precision.check_finite("EMA", averaged, self.options.process_group)

        self._forget_plans()
        # Without statistics, which were computed for other weights.
        self.averages = [average.resized(averaged, former_names) for average in self.averages]
        self._see(averaged)
        for name in self._copies.keys() - named.names():
            del self._copies[name]
        self.follow()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_module": None, "_followed": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # Copied tensors have other addresses.
        self._see({name: tensor for name, (tensor, _) in self._seen.items()})

    def _see(self, averaged: Tensors) -> None:
        """Remember which tensors are averaged under these names."""
        self._seen = {name: (tensor, address_of(tensor)) for name, tensor in averaged.items()}

    def _former_names(self, named: NamedTensors) -> dict[str, str]:
        """Map names of the model to those that their averages have.

        The same tensor may have another name now: adapters and parametrizations wrap its layer, and
        removing a layer of a list renumbers the others. If it also has other memory, it may hold
        something else (the original of a parametrization is what ``right_inverse`` returns), so
        only an equal name counts. A name whose tensor is elsewhere in the model now is a new one.

        Args:
            named: The tensors of the model.

        Returns:
            The name in the averages, by the name in the model. New tensors are left out.
        """
        former_of = {id(tensor): name for name, (tensor, _) in self._seen.items()}
        members = named.all()
        present = {id(member.tensor) for member in members.values()}

        former_names: dict[str, str] = {}
        for name, member in members.items():
            former = former_of.get(id(member.tensor))
            if former is None:
                seen = self._seen.get(name)
                has_average = name in self.averages[0].tensors
                if has_average and (seen is None or id(seen[0]) not in present):
                    former_names[name] = name
            elif former == name or self._seen[former][1] == address_of(member.tensor):
                former_names[name] = former
        return former_names

    def averaged_model(self, index: int) -> Any:
        """Return a copy of the model with an average, in eval mode, without gradients."""
        model = copy_of(self.model)
        named, values = self.matched(model, index)
        pairs = pairs_for(named, values)
        write_all([tensor for _, tensor, _ in pairs], [value for _, _, value in pairs])
        # One by one: a ScriptModule has no ``requires_grad_``.
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return model.eval()

    def module(self) -> Any:
        """Return the copy of the model that stays at the first average."""
        self.follow(always=True)
        if self._module is None:
            self._module = self.averaged_model(0)
            self.follow(always=True)
        return self._module

    def follow(self, *, always: bool = False) -> None:
        """Give the module, to which the user may have a reference, the memory of the averages.

        What has another dtype or device, wraps other tensors or is not averaged is copied.
        """
        averages = self.named(0)
        before = self._followed
        is_current = len(averages) == len(before) and all(
            map(operator.is_, averages.values(), before.values())
        )
        if self._module is None or (is_current and not always):
            return

        own = self.own()
        named = NamedTensors(self._module)
        self._followed = averages
        if own.layout() != named.layout():
            # References keep its present values; the next access makes another one.
            for member in named.all().values():
                member.tensor.data = member.tensor.data.clone()
            self._module = None
            self._followed = {}
            return

        for name, member in named.all().items():
            source = own.tensor(name)
            value = averages.get(name, source)
            if is_wrapper(member.tensor) or is_sharded(value):
                write(member.tensor, value)
            else:
                copied = value is source
                member.tensor.data = value.detach().to(source.device, source.dtype, copy=copied)


def check_model(model: object) -> None:
    """Check that an argument is a model: other libraries take parameters.

    Args:
        model: The argument.

    Raises:
        TypeError: If it is not a ``torch.nn.Module``.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"EMA: model must be a torch.nn.Module, got {type(model).__name__}. Pass the "
            "model, not parameters: EMA averages by name and swaps them itself."
        )


def _check_any(averaged: Tensors) -> None:
    if not averaged:
        raise ValueError(f"EMA: {MSG_NOTHING_CHOSEN}")


def _check_layouts(averaged: Tensors) -> None:
    """Raise RuntimeError, by name, for tensors that torch cannot average in place."""
    for name, tensor in averaged.items():
        # The older kind of nested tensors is of the strided layout.
        if tensor.is_nested or tensor.layout is not torch.strided:
            layout = f"{tensor.layout} (nested)" if tensor.is_nested else tensor.layout
            raise RuntimeError(
                f"EMA: {name} has the layout {layout}, for which torch has no kernels. Leave it "
                f"out with exclude={name!r}, or buffers={{{name!r}: 'ignore'}} if it is a buffer. "
                "Nothing has been changed."
            )


def _check_materialized(named: NamedTensors) -> None:
    """Raise RuntimeError for a parameter without values, on the meta device by name."""
    if named.has_lazy():
        raise RuntimeError("EMA: a parameter is uninitialized; call the model once before update()")
    for name, member in named.parameters.items():
        if member.tensor.is_meta:
            raise RuntimeError(
                f"EMA: {name} is on the meta device and has no values; call model.to_empty() and "
                "initialize or load the model first. Nothing has been changed."
            )
