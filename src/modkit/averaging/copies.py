"""Copies of the tensors that are not averaged, such as integer buffers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from modkit._upstream import foreach_copy_
from modkit.averaging.named_tensors import Member
from modkit.averaging.watch import Snapshot, metadata_guard


class Copies:
    """Tensors that are copied rather than averaged, planned once and then copied list by list."""

    def __init__(
        self,
        pairs: Iterable[tuple[dict[str, Any], str, Member]],
        device: torch.device | None = None,
        *,
        follow: bool = True,
    ) -> None:
        self.pairs: list[tuple[dict[str, Any], str, Member]] = list(pairs)
        self._device = device
        self._follow = follow
        self._tables: Snapshot | None = None
        # Without pairs there is nothing to plan.
        self._alike: Callable[[], bool] = lambda: not self.pairs
        self._lists: list[tuple[list[Tensor], list[Tensor]]] = []

    def sources(self) -> list[Any]:
        """Return what is registered now: forwards may replace buffers, also by None."""
        return [member.registry.get(member.key) for _, _, member in self.pairs]

    def run(self) -> None:
        """Bring all copies up to date. A copy is replaced if its source has another shape."""
        changed = self._tables is not None and self._tables.changed()
        if changed or not self._alike():
            self._plan(self.sources())
        for kept, found in self._lists:
            foreach_copy_(kept, found)

    def _plan(self, sources: list[Any]) -> None:
        lists: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for (registry, key, _), source in zip(self.pairs, sources, strict=True):
            kept = self._target(registry, key, source)
            if kept is None:
                continue
            place = kept.device, kept.dtype, source.device, source.dtype
            to, by = lists.setdefault(place, ([], []))
            to.append(kept)
            by.append(source)
        self._lists = list(lists.values())
        targets = [registry.get(key) for registry, key, _ in self.pairs]
        self._alike = metadata_guard([one for one in sources + targets if one is not None])
        tables = {id(t): t for to, _, member in self.pairs for t in (to, member.registry)}
        self._tables = Snapshot(tables.values())

    def run_traced(self) -> None:
        """Bring all copies up to date in operations that can be compiled."""
        for (registry, key, _), source in zip(self.pairs, self.sources(), strict=True):
            kept = self._target(registry, key, source)
            if kept is not None:
                kept.detach().copy_(source.detach())

    def _target(self, registry: dict[str, Any], key: str, source: Tensor | None) -> Tensor | None:
        """Return the tensor to copy into, made anew if it does not fit; None if there is none."""
        kept: Tensor | None = registry.get(key)
        if source is None or kept is source:
            registry[key] = source
            return None
        device, dtype = self._device or source.device, source.dtype
        if kept is not None and not self._follow:
            device, dtype = kept.device, kept.dtype
        if kept is None or (kept.shape, kept.device, kept.dtype) != (source.shape, device, dtype):
            registry[key] = kept = source.detach().to(device, dtype, copy=True)
        return kept
