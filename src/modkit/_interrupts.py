"""Critical sections: signals, threads and garbage wait until a change is complete."""

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeVar

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


def _nothing(*_: object) -> None:
    """Take the place of a function that this platform lacks."""


# Setting a handler in Python also replaces what C code has installed over it, such as a chained
# ``faulthandler``, and the flag of ``signal.siginterrupt``. Both are in the action that the C
# library keeps, which is read and written as it is. Without POSIX there is none.
_sigaction: Any = ctypes.PyDLL(None).sigaction if hasattr(signal, "siginterrupt") else _nothing
# Of the outermost section, with more bytes than any C library needs.
_actions: Final = {number: ctypes.create_string_buffer(256) for number in _DEFERRED}


class _Process:
    """The state that all sections share."""

    # A handler that runs in a section of its own thread may enter another one.
    lock = threading.RLock()
    # The outermost section of the main thread.
    outermost: "uninterrupted | None" = None


class uninterrupted:  # noqa: N801 - used as ``contextlib.suppress`` is
    """Let signals, and the sections of other threads, wait until a ``with`` block has ended.

    Python runs the handler of a signal between any two bytecodes of the main thread, so that a
    ``KeyboardInterrupt`` can leave an average half updated, half of a model swapped, or a mode of
    torch entered for good. Inside the block handlers are only noted; they run when it ends, in
    order. In other threads no handler ever runs. One thread at a time is in a block. Blocks may be
    nested. Nor is garbage collected: that may end an abandoned block of the user, which swaps
    weights in the middle of another change.

    Masks of signals would not do: any thread of torch may receive a signal, whose handler then runs
    in the main thread all the same.
    """

    def __enter__(self) -> Self:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._replaced: list[int] = []
        self._waiting: list[tuple[int, FrameType | None]] = []
        if threading.get_ident() == threading.main_thread().ident and _Process.outermost is None:
            try:
                _Process.outermost = self
                for number in _DEFERRED:
                    handler = _signals.getsignal(number)
                    if not callable(handler):
                        continue
                    _sigaction(number, None, _actions[number])
                    self._handlers[number] = handler
                    # In this order: restoring a handler that was not replaced has no effect.
                    self._replaced.append(number)
                    _signals.signal(number, self._wait)
                    _sigaction(number, _actions[number], None)
            except BaseException:
                # A signal arrived before its own handler was replaced, and after that of another.
                self._leave()
                raise

        self._lock = _Process.lock
        self._lock.acquire()
        self._collects = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()
        self._lock.release()
        self._leave()

    def _wait(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append((number, frame))

    def _restore(self) -> None:
        """Give the signals their handlers back. It may be called again after an exception."""
        while self._replaced:
            number = self._replaced[-1]
            _signals.signal(number, self._handlers[number])
            _sigaction(number, _actions[number], None)
            self._replaced.pop()
        if _Process.outermost is self:
            _Process.outermost = None

    def _leave(self) -> None:
        """Restore the handlers, and call those that have waited."""
        try:
            self._restore()
        except BaseException:
            # A signal that has its handler back may raise before the next one has.
            self._restore()
            raise
        finally:
            if self._waiting:
                # In order, also those after one that raises.
                with contextlib.ExitStack() as calls:
                    for number, frame in reversed(self._waiting):
                        calls.callback(self._handlers[number], number, frame)


def _after_fork() -> None:
    # Threads that held the lock, or were in a section, do not exist in the child.
    if not _Process.lock.acquire(blocking=False):
        gc.enable()
    _Process.lock = threading.RLock()
    if _Process.outermost is not None:
        _Process.outermost._restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def critical(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Run a function uninterrupted, in one thread at a time, and without recording gradients."""
    is_finalizing = sys.is_finalizing

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        # While the interpreter exits, the globals of this file may be gone.
        if is_finalizing():
            return function(*args, **kwargs)
        with uninterrupted(), torch.no_grad():
            return function(*args, **kwargs)

    return run
