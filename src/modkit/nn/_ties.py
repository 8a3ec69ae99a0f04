"""Keeping shared tensors shared while the tensors of a tree are converted.

A parameter that stands in several places is converted once, and if it has to be replaced by a new
one, the new one is put in all of its places; likewise a buffer. The memory for that lasts from the
outermost call of ``_apply`` to its end, whatever overrides of ``_apply`` lie in between, and is
kept apart for each thread.
"""

import threading
import weakref
from typing import Any

import torch

from modkit._types import TensorFunction


class Replacements(dict[int, tuple[weakref.ref[Any], Any]]):
    """Maps tensors, by identity, to what they were replaced by.

    The references to them are weak, because the memory of a tensor that nobody else holds must be
    free at once: a model may fill the device.
    """

    def find(self, tensor: torch.Tensor) -> Any:
        """Return what ``tensor`` was replaced by; None if it was not."""
        reference, replacement = self.get(id(tensor), (None, None))
        # Another tensor may have got the identity of one that is gone.
        return replacement if reference is not None and reference() is tensor else None

    def note(self, tensor: torch.Tensor, replacement: torch.Tensor) -> None:
        """Remember what ``tensor`` was replaced by."""
        self[id(tensor)] = (weakref.ref(tensor), replacement)


class Ties:
    """What a function has been applied to so far.

    Attributes:
        finished: the modules whose own tensors are all converted, by identity.
        converted: the parameters that are results, by identity.
        parameters: the parameters that were replaced, by this function or one around it.
        buffers: the buffers that were replaced, by this function.
    """

    __slots__ = ("buffers", "converted", "finished", "parameters")

    def __init__(self, parameters: Replacements) -> None:
        self.finished: dict[int, torch.nn.Module] = {}
        self.converted: dict[int, torch.Tensor] = {}
        self.parameters = parameters
        self.buffers = Replacements()


class _Running(threading.local):
    """The functions that are being applied in this thread, by identity, outermost first."""

    def __init__(self) -> None:
        self.ties: dict[int, Ties] = {}


_running = _Running()


class Applying:
    """A context in which a function is applied; contexts of the same function share their ties."""

    __slots__ = ("_fn", "_outermost")

    def __init__(self, fn: TensorFunction) -> None:
        self._fn = fn

    def __enter__(self) -> Ties:
        """Return the ties to use."""
        running = _running.ties
        ties = running.get(id(self._fn))
        self._outermost = ties is None
        if ties is None:
            around = next(iter(running.values()), None)
            ties = running[id(self._fn)] = Ties(around.parameters if around else Replacements())
        return ties

    def __exit__(self, *_: object) -> None:
        """Forget what the function has been applied to, at the end of the outermost context."""
        if self._outermost:
            del _running.ties[id(self._fn)]
