"""Copies of the tensors that are not averaged, such as integer buffers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from modkit._upstream import PLAIN, ListCopier, copier
from modkit.averaging.named_tensors import Member
from modkit.averaging.sharding import is_sharded_alike
from modkit.averaging.watch import Watch


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
            them. Valid until ``watch`` has noticed a change: then call :meth:`plan`.
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
        # Without pairs there is never anything to plan.
        self.watch: Watch = Watch(unknown=len(self.pairs) > 0)
        self._device = device
        self._follow = follow

    def plan(self) -> None:
        """Find the sources, make copies that do not fit anew, and group both for the kernels.

        Sources and copies are grouped by device and dtype, so that one call copies a whole list. It
        need not be called again until ``watch`` notices a change.
        """
        sources = [_source_of(member) for _, _, member in self.pairs]
        lists: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for (registry, key, _), source in zip(self.pairs, sources, strict=True):
            target = self._target(registry, key, source)
            if target is None or source is None:
                continue
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

        # The tables are watched too: a forward may replace a buffer by one with the same metadata.
        targets = [registry.get(key) for registry, key, _ in self.pairs]
        tensors = [tensor for tensor in sources + targets if tensor is not None]
        tables = {
            id(table): table
            for registry, _, member in self.pairs
            for table in (registry, member.registry)
        }
        self.watch = Watch(tensors=tensors, tables=tables.values())

    def run_traced(self) -> None:
        """Bring all copies up to date in operations that can be compiled."""
        for registry, key, member in self.pairs:
            source = _source_of(member)
            target = self._target(registry, key, source)
            # Detached, because a buffer may be a result of autograd.
            if target is not None and source is not None:
                target.detach().copy_(source.detach())

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


def _source_of(member: Member) -> Tensor | None:
    """Return what is registered now: forwards may replace buffers, also by None."""
    source: Tensor | None = member.registry.get(member.key)
    return source
