"""Critical sections: signals and other threads wait until a change is complete."""

import functools
import importlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar, cast

import torch
from typing_extensions import ParamSpec, Self


P = ParamSpec("P")
ResultT = TypeVar("ResultT")


# The functions behind ``signal.signal`` and ``signal.getsignal``. Those convert each number and
# handler to an enum and back, which takes longer than an update of a small model.
_signals: Any = importlib.import_module("_signal")

# Signals whose handlers usually raise: KeyboardInterrupt, or SystemExit before a job is preempted.
_DEFERRED: Final = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
    if hasattr(signal, name)
)


# Held in each section. A handler that runs in a section of its own thread may enter another one.
_lock: Final = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A thread that held it does not exist in the child.
    os.register_at_fork(after_in_child=cast("Any", _lock)._at_fork_reinit)


class uninterrupted:  # noqa: N801 - used as ``contextlib.suppress`` is
    """Let signals, and the sections of other threads, wait until a ``with`` block has ended.

    Python runs the handler of a signal between any two bytecodes of the main thread, so that a
    ``KeyboardInterrupt`` can leave an average half updated, half of a model swapped, or a mode of
    torch entered for good. Inside the block handlers are only noted; they run when it ends, in
    order. In other threads no handler ever runs. Two threads may use one average: only one of them
    is in a block at a time. Blocks may be nested.
    """

    def __enter__(self) -> Self:
        self._handlers: dict[int, Any] = {}
        self._replaced: list[int] = []
        self._waiting: list[tuple[int, FrameType | None]] = []
        if threading.get_ident() != threading.main_thread().ident:
            _lock.acquire()
            return self

        try:
            for number in _DEFERRED:
                handler = _signals.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    # In this order: restoring a handler that was not replaced has no effect.
                    self._replaced.append(number)
                    _signals.signal(number, self._wait)
        except BaseException:
            # A signal arrived before its own handler was replaced, and after that of another one.
            self._leave()
            raise
        _lock.acquire()
        return self

    def _restore(self) -> None:
        """Give the signals their handlers back. It may be called again after an exception."""
        while self._replaced:
            number = self._replaced[-1]
            _signals.signal(number, self._handlers[number])
            self._replaced.pop()

    def _wait(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append((number, frame))

    def __exit__(self, *_: object) -> None:
        _lock.release()
        self._leave()

    def _leave(self) -> None:
        """Give the signals their handlers back, and call those that have waited."""
        try:
            self._restore()
        except BaseException:
            # A signal that has its handler back may raise before the next one has.
            self._restore()
            raise
        for number, frame in self._waiting:
            self._handlers[number](number, frame)


def critical(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Run a function uninterrupted, in one thread at a time, and without recording gradients.

    Args:
        function: The function. It may call another critical one.

    Returns:
        The function in a critical section.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        with uninterrupted(), torch.no_grad():
            return function(*args, **kwargs)

    return run
