"""Averaging in a second thread, on copies in host memory, while training goes on."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from modkit._upstream import foreach_copy_


class Worker:
    """Runs one task at a time in a thread of its own, and none after an error."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._latest: Future[None] | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task in the thread, which must be idle."""
        if self._pool is None or self._process != os.getpid():
            # A process that was forked has the pool, but not its thread.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="modkit-ema")
            self._process = os.getpid()
        # Each thread has its own switch for gradients.
        self._latest = self._pool.submit(torch.no_grad()(task))

    def flush(self) -> None:
        """Wait until the task is done; raise RuntimeError if it has failed, now or earlier."""
        if self._latest is not None and (error := self._latest.exception()) is not None:
            text = "EMA: an update in the background has failed. Load a state to go on."
            raise RuntimeError(text) from error
        self._latest = None

    def forget(self) -> None:
        """Wait until the task is done, and forget whether it has failed."""
        if self._latest is not None:
            self._latest.exception()
        self._latest = None


class Staging:
    """Copies of tensors in host memory, in their dtype, which the thread works on.

    Those of an accelerator are in pinned memory: the copy is ordered on the current stream, as the
    next step of the optimizer is, and only the thread waits for it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.copies: dict[str, Tensor] = {}
        self._groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name, tensor in tensors.items():
            pinned = _is_accelerator(tensor.device)
            copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
            self.copies[name] = copy
            copies, sources = self._groups.setdefault((tensor.device, tensor.dtype), ([], []))
            copies.append(copy)
            sources.append(tensor)

    def fill(self) -> list[torch.Event]:
        """Begin to copy the current values; return what to wait for before they are read."""
        for copies, sources in self._groups.values():
            foreach_copy_(copies, sources, non_blocking=True)
        return events_on({device for device, _ in self._groups})


def events_on(devices: set[torch.device]) -> list[torch.Event]:
    """Mark this moment in the work of each accelerator, to wait for in another thread."""
    events = {device: torch.Event(device) for device in devices if _is_accelerator(device)}
    for device, event in events.items():
        event.record(torch.accelerator.current_stream(device))
    return [*events.values()]


def _is_accelerator(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type
