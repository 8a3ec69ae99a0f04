"""Which tensors of an averaged copy belong to which tensors of the model, found once and then checked.

Tensors belong together by name. What compilers and wrappers put into a name does not count.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modkit._errors import NameMismatchError
from modkit.averaging._members import canonical_names
from modkit.averaging._sharded import local_shard, meshes_of, reshard
from modkit.averaging._watch import Watch


class _Slot(NamedTuple):
    """A place where a tensor is registered."""

    registry: dict[str, Any]
    key: str
    tensor: Tensor | None
    persistent: bool = True


@dataclass
class _Members:
    """What one model has registered, by name."""

    parameters: dict[str, _Slot]
    buffers: dict[str, _Slot]
    registries: list[dict[str, Any]]
    buffer_registries: list[dict[str, Any]]
    children: list[dict[str, Any]]


class Pairs:
    """The tensors of one copy and one model, paired at one moment.

    Attributes:
        targets: The tensors of the copy that are averaged, each once.
        sources: Those of the model, in the same order.
        copied: The buffers that are copied: where they are in the copy and in the model.
        meshes: What processes the model is split up among.
    """

    def __init__(
        self, copy: torch.nn.Module, model: torch.nn.Module, owner: Any, *, use_buffers: bool
    ) -> None:
        reshard(copy)
        reshard(model)
        kept, found = _members(copy, None), _members(model, owner)
        parameters = _pair("parameters", kept.parameters, found.parameters)
        _check_shapes(parameters)
        buffers = _pair("buffers", kept.buffers, found.buffers)
        averaged, self.copied = [], []
        for name, target, source in buffers:
            if use_buffers and _can_be_averaged(target.tensor, source.tensor):
                averaged.append((name, target, source))
            else:
                self.copied.append((target, source))
        unique: dict[int, tuple[str, _Slot, _Slot]] = {}
        copies: list[tuple[_Slot, _Slot]] = []
        for name, target, source in (*parameters, *averaged):
            first = unique.setdefault(id(target.tensor), (name, target, source))
            if first[2].tensor is not source.tensor:
                message = "The model does not fit its average"
                untied = f"{name} (no longer tied to {first[0]})"
                raise NameMismatchError(message, missing=[], unexpected=[untied], shapes=[])
            if not _is_floating(target.tensor):
                copies.append((target, source))
        every = [
            (target.tensor, source.tensor)
            for _, target, source in unique.values()
            if _is_floating(target.tensor)
        ]
        self.copied += copies
        self.targets: list[Tensor] = [target for target, _ in every if target is not None]
        self.sources: list[Tensor] = [source for _, source in every if source is not None]
        self.groups = self._grouped()
        self.meshes = meshes_of(self.sources)
        self._models = kept, found
        self._use_buffers = use_buffers

    def _grouped(self) -> list["Group"]:
        groups: dict[tuple[torch.device, torch.dtype], Group] = {}
        for target, source in zip(self.targets, self.sources, strict=True):
            group = groups.setdefault((target.device, target.dtype), Group([], []))
            group.targets.append(local_shard(target))
            group.sources.append(local_shard(source))
            if (source.device, source.dtype) != (target.device, target.dtype):
                group.uniform = False
        return list(groups.values())

    def watch(self) -> Watch:
        """Return what sees whether both models still have the same tensors at the same places."""
        registries = [one for model in self._models for one in (*model.registries, *model.children)]
        buffers = [one for model in self._models for one in model.buffer_registries]
        # Buffers that are copied are looked up each time: only their names matter.
        watched, named = (registries + buffers, []) if self._use_buffers else (registries, buffers)
        return Watch(watched, named, self.targets + self.sources)


@dataclass
class Group:
    """Tensors of one device and dtype, with what belongs to them in the model."""

    targets: list[Tensor]
    sources: list[Tensor]
    uniform: bool = True


class PairCache:
    """Keeps the pairs of the model that an average follows, without keeping that model alive.

    Copies of a cache, and those that come out of a pickle, are empty.
    """

    def __init__(self) -> None:
        self._pairs: Pairs | None = None
        self._watch: Watch | None = None
        self._key: object = None
        self._model: weakref.ref[torch.nn.Module] | None = None

    def pairs(
        self, copy: torch.nn.Module, model: torch.nn.Module, owner: Any, *, use_buffers: bool
    ) -> Pairs:
        """Return the pairs of two models, with the checks that nothing has changed since.

        Raises:
            NameMismatchError: The models do not have the same tensors.
        """
        if (
            self._pairs is None
            or self._watch is None
            or self._model is None
            or self._model() is not model
            or self._key != (id(copy), use_buffers)
            or self._watch.changed()
        ):
            self._pairs = Pairs(copy, model, owner, use_buffers=use_buffers)
            self._watch = self._pairs.watch()
            self._key = id(copy), use_buffers
            self._model = weakref.ref(model, self._forget)
        return self._pairs

    def _forget(self, _: object) -> None:
        self._pairs = self._watch = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "PairCache":
        return PairCache()

    def __reduce__(self) -> tuple[type["PairCache"], tuple[()]]:
        return PairCache, ()


def _members(root: torch.nn.Module, leave_out: Any) -> _Members:
    """Collect what is registered in a model and below, other than in ``leave_out``."""
    found = _Members({}, {}, [], [], [])
    for prefix, module in _walk(root, "", leave_out):
        parameters, buffers = module._parameters, module._buffers
        found.registries.append(parameters)
        found.buffer_registries.append(buffers)
        found.children.append(module._modules)
        for key, parameter in parameters.items():
            if parameter is not None:
                found.parameters[prefix + key] = _Slot(parameters, key, parameter)
        transient = module._non_persistent_buffers_set
        for key, buffer in buffers.items():
            found.buffers[prefix + key] = _Slot(buffers, key, buffer, key not in transient)
    found.parameters = _with_plain_names(found.parameters)
    found.buffers = _with_plain_names(found.buffers)
    return found


def _walk(module: torch.nn.Module, prefix: str, leave_out: Any) -> Iterator[tuple[str, Any]]:
    if module is leave_out:
        return
    yield prefix, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{key}.", leave_out)


def _with_plain_names(slots: dict[str, _Slot]) -> dict[str, _Slot]:
    names = canonical_names(slots)
    return {names[name]: slot for name, slot in slots.items()}


def _pair(
    kind: str, kept: dict[str, _Slot], found: dict[str, _Slot]
) -> list[tuple[str, _Slot, _Slot]]:
    """Pair by name; what is not saved and has no partner, or no value at all, has no part."""
    missing = [n for n, slot in kept.items() if _matters(slot) and n not in found]
    unexpected = [n for n, slot in found.items() if _matters(slot) and n not in kept]
    if missing or unexpected:
        what = f"The {kind} of the model are not those of its average"
        raise NameMismatchError(what, missing=missing, unexpected=unexpected, shapes=[])
    return [(name, slot, found[name]) for name, slot in kept.items() if name in found]


def _matters(slot: _Slot) -> bool:
    return slot.persistent and slot.tensor is not None


def _check_shapes(pairs: list[tuple[str, _Slot, _Slot]]) -> None:
    shapes = [
        f"{name} ({tuple(source.tensor.shape)} instead of {tuple(target.tensor.shape)})"
        for name, target, source in pairs
        if target.tensor is not None
        and source.tensor is not None
        and source.tensor.shape != target.tensor.shape
    ]
    if shapes:
        what = "The parameters of the model are not those of its average"
        raise NameMismatchError(what, missing=[], unexpected=[], shapes=shapes)


def _is_floating(tensor: Tensor | None) -> bool:
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def _can_be_averaged(target: Tensor | None, source: Tensor | None) -> bool:
    """Tell whether two buffers have an average: integers have none, nor have different shapes."""
    return (
        target is not None
        and source is not None
        and _is_floating(target)
        and _is_floating(source)
        and target.shape == source.shape
    )


def copy_slots(pairs: list[tuple[_Slot, _Slot]]) -> None:
    """Bring the values of the copy up to date; one that has got another shape is replaced."""
    for target, source in pairs:
        old, new = target.registry.get(target.key), source.registry.get(source.key)
        if old is new or (new is None and old is None):
            continue
        if new is None:
            target.registry[target.key] = None
        elif old is None:
            target.registry[target.key] = new.detach().clone()
        elif old.shape == new.shape:
            old.detach().copy_(new.detach())
        else:
            target.registry[target.key] = new.detach().to(old.device, old.dtype, copy=True)
