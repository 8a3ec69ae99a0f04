"""Which tensors of a model are averaged, which are copied, and which are left out."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from modkit.averaging._members import Member, Members
from modkit.averaging._options import checked_choice
from modkit.averaging._precision import is_averaged


# Globs of names (``"head.*"``), or a function that tells of a name whether it is meant.
Names: TypeAlias = str | Iterable[str] | Callable[[str], bool] | None
BufferPolicy: TypeAlias = Literal["copy", "average", "ignore"]
# One policy for all buffers, or one for each glob of names; the first glob that fits counts.
Buffers: TypeAlias = BufferPolicy | Mapping[str, BufferPolicy]

_POLICIES = ("copy", "average", "ignore")


@dataclass(frozen=True)
class NameFilter:
    """Tells whether a name is among those that are meant; an object, so that it can be pickled."""

    names: Names
    default: bool

    def __call__(self, name: str) -> bool:
        """Return whether ``name`` is meant; ``default`` where no names are given."""
        if self.names is None:
            return self.default
        if callable(self.names):
            return bool(self.names(name))
        globs = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


@dataclass(frozen=True)
class PolicyOf:
    """Tells what is done with a buffer; an object, so that it can be pickled."""

    buffers: Buffers

    def __post_init__(self) -> None:
        """Refuse policies that do not exist."""
        policies = [self.buffers] if isinstance(self.buffers, str) else self.buffers.values()
        for policy in policies:
            checked_choice("buffers", policy, _POLICIES)

    def __call__(self, name: str) -> BufferPolicy:
        """Return the policy for the buffer ``name``."""
        if isinstance(self.buffers, str):
            return self.buffers
        for glob, policy in self.buffers.items():
            if fnmatch.fnmatchcase(name, glob):
                return policy
        return "copy"


@dataclass(frozen=True)
class Selection:
    """The choice of parameters by name, and of buffers by policy."""

    included: NameFilter
    excluded: NameFilter
    policy: PolicyOf

    def chooses(self, name: str) -> bool:
        """Tell whether the parameter ``name`` is averaged."""
        return self.included(name) and not self.excluded(name)

    def split(self, members: Members) -> tuple[dict[str, Tensor], list[Member]]:
        """Return the tensors to average, and those to copy: integers have no average."""
        averaged: dict[str, Tensor] = {}
        copied: list[Member] = []
        for name, member in members.parameters.items():
            if self.chooses(name):
                if is_averaged(member.tensor):
                    averaged[name] = member.tensor
                else:
                    copied.append(member)
        for name, member in members.buffers.items():
            policy = self.policy(name) if is_averaged(member.tensor) else "copy"
            if policy == "average":
                averaged[name] = member.tensor
            elif policy == "copy":
                copied.append(member)
        return averaged, copied
