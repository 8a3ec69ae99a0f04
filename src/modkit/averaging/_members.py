"""The tensors of a model by name, found once and then only looked at."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modkit._errors import NameMismatchError
from modkit.averaging._sharded import reshard
from modkit.averaging._watch import Watch


_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def canonical_name(name: str) -> str:
    """Return the name of a tensor without what compilers and distributed wrappers put into it.

    Example:
        >>> canonical_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its canonical one, or to itself if two would become the same.

    A model of one's own may have a child that is called ``module``.
    """
    found = {name: canonical_name(name) for name in names}
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def check_match(
    what: str, expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size]
) -> None:
    """Raise if the names or the shapes of the found tensors are not the expected ones.

    Raises:
        NameMismatchError: It lists the names that are missing, unexpected, or of another shape.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    shapes = [
        f"{name} ({tuple(found[name])} instead of {tuple(expected[name])})"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if missing or unexpected or shapes:
        raise NameMismatchError(what, missing=missing, unexpected=unexpected, shapes=shapes)


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of a model, and where it is registered."""

    name: str
    tensor: Tensor
    registry: Mapping[str, Any]
    key: str
    is_parameter: bool

    def current(self) -> Tensor:
        """Return what is registered there now; a buffer may be replaced in each step."""
        tensor: Tensor = self.registry[self.key]
        return tensor


class Members:
    """All parameters and buffers of a model at one moment, those that are tied once.

    Of a model that is split up they are the shards.

    Attributes:
        parameters: The parameters by canonical name.
        buffers: The buffers by canonical name, those that are not persistent included.
        aliases: The first name of each tensor that has another one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # Whole parameters, which a forward may have left, are not those that are trained.
        reshard(model)
        self.parameters: dict[str, Member] = {}
        self.buffers: dict[str, Member] = {}
        self.aliases: dict[str, str] = {}
        self._registries: list[Mapping[str, Any]] = []
        self._buffer_registries: list[Mapping[str, Any]] = []
        raw: list[tuple[str, Mapping[str, Any], str, Tensor, bool]] = []
        for path, module in model.named_modules(remove_duplicate=False):
            raw += self._look_at(path, module)
        names = canonical_names(name for name, *_ in raw)
        first: dict[int, str] = {}
        for name, registry, key, tensor, is_parameter in raw:
            member = Member(names[name], tensor, registry, key, is_parameter)
            if id(tensor) in first:
                self.aliases[member.name] = first[id(tensor)]
                continue
            first[id(tensor)] = member.name
            (self.parameters if is_parameter else self.buffers)[member.name] = member
        # Lazy tensors have no shape yet, and nobody asks whether they have changed.
        self._watch = None if self.has_lazy() else self._watched()

    def _watched(self) -> Watch:
        tensors = [member.tensor for member in self.parameters.values()]
        return Watch(self._registries, self._buffer_registries, tensors)

    def _look_at(
        self, path: str, module: torch.nn.Module
    ) -> list[tuple[str, Mapping[str, Any], str, Tensor, bool]]:
        prefix = f"{path}." if path else ""
        found: list[tuple[str, Mapping[str, Any], str, Tensor, bool]] = []
        parameters: Mapping[str, Any] = module._parameters
        buffers: Mapping[str, Any] = module._buffers
        if isinstance(module, torch.jit.ScriptModule):
            # Its registries belong to C++, and make their objects anew.
            parameters = dict(module.named_parameters(recurse=False))
            buffers = dict(module.named_buffers(recurse=False))
        else:
            self._registries.append(module._modules)
        self._registries.append(parameters)
        self._buffer_registries.append(buffers)
        for registry, is_parameter in ((parameters, True), (buffers, False)):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                found.append((prefix + key, registry, key, tensor, is_parameter))
        return found

    def changed(self) -> bool:
        """Tell whether a parameter has been added, removed, replaced, moved, cast or tied since."""
        return self._watch is None or self._watch.changed()

    def names(self) -> set[str]:
        """Return all names, further names of tied tensors included."""
        return {*self.parameters, *self.buffers, *self.aliases}

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of a name.

        Raises:
            NameMismatchError: There is none.
        """
        member = self.parameters.get(name) or self.buffers.get(name)
        if member is None:
            raise NameMismatchError(
                "EMA: the state does not fit the model", missing=[], unexpected=[name], shapes=[]
            )
        return member.tensor

    def has_lazy(self) -> bool:
        """Tell whether a tensor has no shape yet, since its module has not been called."""
        members = (*self.parameters.values(), *self.buffers.values())
        return any(torch.nn.parameter.is_lazy(member.tensor) for member in members)
