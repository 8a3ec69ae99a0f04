"""Re-basing: how a layer of torch becomes a layer of modkit."""

import inspect
from typing import Final, TypeVar

import torch


ModuleClassT = TypeVar("ModuleClassT", bound=type[torch.nn.Module])

# Maps each re-based class to the module name of the torch class that it stands for.
# fx decides by ``instance.__module__.startswith("torch.nn")`` whether a module is a leaf, so an
# instance whose exact type is listed here carries that name in its own ``__dict__``.
TORCH_HOME: Final[dict[type, str]] = {}


class _SourceOf:
    """Class attribute ``__wrapped__`` that leads ``inspect`` from our class to torch's source.

    TorchScript compares the line of an overloaded method with the lines of the class that
    holds it, so ``LSTM`` and ``GRU`` must be found where torch wrote them. Instances and
    subclasses have their own source, and therefore do not see the attribute.
    """

    def __init__(self, owner: type, source: type) -> None:
        self.owner = owner
        self.source = source

    def __get__(self, instance: object, owner: type) -> type:
        if instance is not None or owner is not self.owner:
            raise AttributeError("__wrapped__")
        return self.source


def rebased(cls: ModuleClassT) -> ModuleClassT:
    """Finish a class ``class X(torch.nn.X, Module)``: documentation, annotations, fx home.

    The first base is torch's layer. Its docstring and annotations are taken over by reference:
    TorchScript reads ``__annotations__`` from the instance's class, and touching the attribute
    of a class without annotations would create an empty dict that hides the inherited one.
    """
    layer = cls.__bases__[0]
    if cls.__doc__ is None:
        cls.__doc__ = layer.__doc__
    cls.__annotations__ = {**inspect.get_annotations(layer), **inspect.get_annotations(cls)}
    cls.__wrapped__ = _SourceOf(cls, layer)  # type: ignore[attr-defined]
    TORCH_HOME[cls] = layer.__module__
    return cls
