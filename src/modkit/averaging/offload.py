"""Averaging in a second thread, on copies in host memory, while training goes on."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from modkit._upstream import foreach_copy_


class Worker:
    """Runs tasks one after the other in a thread of its own.

    After an error no further task is run.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._latest: Future[None] | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task in the thread, which has nothing else to do."""
        if self._pool is None or self._process != os.getpid():
            # A process that was forked has the pool, but not its thread.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="modkit-ema")
            self._process = os.getpid()
        self._latest = self._pool.submit(_without_gradients, task)

    def flush(self) -> None:
        """Wait until the task is done.

        Raises:
            RuntimeError: It has failed, now or earlier.
        """
        if self._latest is None:
            return
        error = self._latest.exception()
        if error is not None:
            raise RuntimeError(
                "EMA: an update in the background has failed. Load a state to go on."
            ) from error
        self._latest = None

    def forget(self) -> None:
        """Wait until the task is done, and forget whether it has failed."""
        if self._latest is not None:
            self._latest.exception()
        self._latest = None


def _without_gradients(task: Callable[[], None]) -> None:
    # Whether gradients are on is a matter of each thread.
    with torch.no_grad():
        task()


class Staging:
    """Copies of tensors in host memory, which the thread works on.

    They have the dtype of the tensors, so that a 16-bit weight crosses the link as 2 bytes. Those of an
    accelerator are in pinned memory: the copy is ordered on the present stream, as the next step
    of the optimizer is, and nobody waits for it but the thread.

    Args:
        tensors: What is copied each time.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.copies = {name: _host_copy(tensor) for name, tensor in tensors.items()}
        self._groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name, tensor in tensors.items():
            key = tensor.device, tensor.dtype
            copies, sources = self._groups.setdefault(key, ([], []))
            copies.append(self.copies[name])
            sources.append(tensor)

    def fill(self) -> list[torch.Event]:
        """Begin to copy the present values; return what to wait for before they are read."""
        for copies, sources in self._groups.values():
            foreach_copy_(copies, sources, non_blocking=True)
        return events_on({device for device, _ in self._groups})


def events_on(devices: set[torch.device]) -> list[torch.Event]:
    """Mark this moment in the work of each accelerator, to wait for in another thread."""
    events: list[torch.Event] = []
    for device in devices:
        if _is_accelerator(device):
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            events.append(event)
    return events


def _host_copy(tensor: Tensor) -> Tensor:
    pinned = _is_accelerator(tensor.device)
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)


def _is_accelerator(device: torch.device) -> bool:
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device.type
