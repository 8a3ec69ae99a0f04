"""The parameters and buffers of a model by canonical name, found in one walk."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from modkit._tree import descend
from modkit.averaging.names import canonical_names, names_like
from modkit.averaging.sharding import reshard
from modkit.errors import NameMismatchError


# The table in which a module has its parameters, buffers or children.
Registry: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """A tensor of a model, and where it is registered.

    Attributes:
        name: Canonical name.
        tensor: What was registered when the model was walked; None in an empty slot.
        registry: ``_parameters`` or ``_buffers`` of its module.
        key: Its key there.
        is_parameter: Whether it is a parameter, and not a buffer.
        persistent: Whether ``state_dict()`` has it.
    """

    name: str
    tensor: Any
    registry: Registry
    key: str
    is_parameter: bool
    persistent: bool

    def current(self) -> Tensor:
        """Return what is registered now: forwards may replace buffers."""
        tensor: Tensor = self.registry[self.key]
        return tensor

    def required_shape(self) -> torch.Size | None:
        """Return the shape that values must have; None for a buffer, which may have had another."""
        return self.current().shape if self.is_parameter else None


class _Slot(NamedTuple):
    """The fields of a :class:`Member`, before its name is canonical."""

    name: str
    tensor: Any
    registry: Registry
    key: str
    is_parameter: bool = True
    persistent: bool = True


class NamedTensors:
    """All parameters and buffers of a model by canonical name, at one moment.

    Tied tensors are listed once, under their first name. Of a sharded model these are the shards.

    Args:
        model: The model.
        leave_out: A module below it that is skipped, with all that it contains.
        like: Another model. If all parameters of the two differ by one prefix, because one wraps
            the other, the names are those of ``like``.

    Attributes:
        modules: All modules, in the order of the walk.
        parameters: Parameters by name.
        buffers: Buffers by name, including those that are not persistent.
        aliases: Maps each further name of a tied tensor to its first name.
        empty: Buffers that are None, by name.
        states: ``__dict__`` of each module, with its tables, which are watched.
        scripted: True if a module is scripted: C++ makes new tables at each access.
        parameter_names: All names of parameters, further names of tied ones included.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        leave_out: torch.nn.Module | None = None,
        like: "NamedTensors | None" = None,
    ) -> None:
        places = _places(model, leave_out)
        self.modules: list[torch.nn.Module] = [module for _, module in places]
        # Full parameters that a forward of FSDP has left would hide the shards.
        reshard(self.modules)

        self.parameters: dict[str, Member] = {}
        self.buffers: dict[str, Member] = {}
        self.aliases: dict[str, str] = {}
        self.empty: dict[str, Member] = {}
        self.states: list[dict[str, Any]] = []
        self.scripted: bool = False

        slots = [slot for prefix, module in places for slot in self._slots_of(prefix, module)]
        names = canonical_names(slot.name for slot in slots)
        parameters = [s.name for s in slots if s.is_parameter and s.tensor is not None]
        if like is not None:
            names = names_like({names[name] for name in parameters}, names, like.parameter_names)
        self.parameter_names: set[str] = {names[name] for name in parameters}

        # The walk meets a tied tensor several times; the first name is the one that torch gives it.
        first: dict[int, str] = {}
        for slot in slots:
            member = Member(
                names[slot.name],
                slot.tensor,
                slot.registry,
                slot.key,
                slot.is_parameter,
                slot.persistent,
            )
            if member.tensor is None:
                if not member.is_parameter:
                    self.empty[member.name] = member
            elif id(member.tensor) in first:
                self.aliases[member.name] = first[id(member.tensor)]
            else:
                first[id(member.tensor)] = member.name
                members = self.parameters if member.is_parameter else self.buffers
                members[member.name] = member

    def _slots_of(self, prefix: str, module: torch.nn.Module) -> "Iterator[_Slot]":
        """Yield the parameters and buffers of a module, and note where its tables are."""
        parameters: Registry = module._parameters
        buffers: Registry = module._buffers
        if isinstance(module, torch.jit.ScriptModule):
            # C++ owns its registries, and makes new objects of them at each access.
            self.scripted = True
            parameters = dict(module.named_parameters(recurse=False))
            buffers = dict(module.named_buffers(recurse=False))
            transient: set[str] = set()
        else:
            # Not ``vars()``, which the compiler of torch 2.8 cannot follow here.
            self.states.append(module.__dict__)
            transient = module._non_persistent_buffers_set

        for key, tensor in parameters.items():
            yield _Slot(prefix + key, tensor, parameters, key)
        for key, tensor in buffers.items():
            is_saved = key not in transient
            yield _Slot(prefix + key, tensor, buffers, key, is_parameter=False, persistent=is_saved)

    def all(self) -> dict[str, Member]:
        """Return parameters and buffers together."""
        return {**self.parameters, **self.buffers}

    def names(self) -> set[str]:
        """Return all names, further names of tied tensors included."""
        return {*self.parameters, *self.buffers, *self.aliases}

    def member(self, name: str) -> Member | None:
        """Return the member of a name.

        Args:
            name: A canonical name, which may be a further name of a tied tensor.

        Returns:
            The member, or None if the model has none of this name, or a buffer that is None.
        """
        name = self.aliases.get(name, name)
        return self.parameters.get(name) or self.buffers.get(name)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a name, or raise NameMismatchError."""
        member = self.member(name)
        if member is None:
            raise NameMismatchError(
                "EMA: the state does not fit the model", missing=[], unexpected=[name], shapes=[]
            )
        tensor: Tensor = member.tensor
        return tensor

    def is_like(self, other: "NamedTensors") -> bool:
        """Return True if another model has the same names, and parameters of the same shapes.

        Args:
            other: The tensors of the other model. Its buffers may have other shapes.

        Returns:
            False also if one of them is lazy.
        """
        # Tensors that are tied in one model only would be averaged apart.
        alike = (self.names(), self.aliases) == (other.names(), other.aliases)
        if not alike or self.has_lazy() or other.has_lazy():
            return False

        return all(
            member.tensor.shape == other.parameters[name].tensor.shape
            for name, member in self.parameters.items()
        )

    def has_lazy(self) -> bool:
        """Return True if a tensor has no shape yet, because its module has not been called."""
        return any(is_lazy(member.tensor) for member in self.all().values())


def _places(
    model: torch.nn.Module, leave_out: torch.nn.Module | None
) -> list[tuple[str, torch.nn.Module]]:
    """Return each module with the prefix of its names, on every path but those to ``leave_out``."""
    if model is leave_out:
        return []
    places = [("", model)]

    # Dynamo of torch 2.8 traces this, and does not know a union among the annotations.
    def enter(name: str, child: torch.nn.Module, parent_prefix: str) -> Any:
        if child is leave_out:
            return None
        prefix = f"{parent_prefix}{name}."
        places.append((prefix, child))
        return prefix

    descend(model, "", enter)
    return places
