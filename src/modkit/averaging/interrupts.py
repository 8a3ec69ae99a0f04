"""Critical sections: Ctrl-C and other signals wait until a change is complete."""

import functools
import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

import torch
from typing_extensions import ParamSpec, Self


P = ParamSpec("P")
ResultT = TypeVar("ResultT")


# The functions behind ``signal.signal`` and ``signal.getsignal``. Those convert each number and handler
# to an enum and back, which takes longer than an update of a small model.
_signals: Any = importlib.import_module("_signal")

# Signals whose handlers usually raise: KeyboardInterrupt, or SystemExit before a job is preempted.
_DEFERRED: Final = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)


class uninterrupted:  # noqa: N801 - used as ``contextlib.suppress`` is
    """Let signals wait until a ``with`` block has ended.

    Python runs the handler of a signal between any two bytecodes of the main thread, so that a
    ``KeyboardInterrupt`` can leave an average half updated, half of a model swapped, or a mode of
    torch entered for good. Inside the block handlers are only noted; they run when it ends, in
    order. In other threads no handler ever runs, so the block has no effect there. Blocks may be nested.
    """

    def __enter__(self) -> Self:
        self._handlers: dict[int, Any] = {}
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._active = False
        if threading.get_ident() == threading.main_thread().ident:
            for number in _DEFERRED:
                handler = _signals.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signals.signal(number, self._wait)
        self._active = True
        return self

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if self._active:
            self._waiting.append((number, frame))
        else:
            # A signal arrived while this block was entered or left, between two other handlers.
            self._handlers[number](number, frame)

    def __exit__(self, *_: object) -> None:
        try:
            for number, handler in self._handlers.items():
                _signals.signal(number, handler)
        finally:
            self._active = False
        for number, frame in self._waiting:
            self._handlers[number](number, frame)


_lock: Final = threading.RLock()


def critical(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Run a function uninterrupted, in one thread at a time, and without recording gradients."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        with uninterrupted(), _lock, torch.no_grad():
            return function(*args, **kwargs)

    return run
