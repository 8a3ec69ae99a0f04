"""Re-basing: how a layer of torch becomes a layer of modkit.

A layer is torch's class with modkit's ``Module`` slipped in below it, so its code is torch's and
its behaviour as a module is modkit's. Classes are written out in ``modules/``; this file finishes
them, and turns layers that torch has built into modkit's, in place.
"""

import bisect
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import torch
from typing_extensions import deprecated

from modkit._types import FunctionT
from modkit._upstream import trace_instead
from modkit.nn._quantization import QuantizationConfig


ClassT = TypeVar("ClassT", bound=type)
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

# Maps each re-based class to the module name of the torch class that it stands for.
# fx decides by ``instance.__module__.startswith("torch.nn")`` whether a module is a leaf, so an
# instance whose exact type is listed here carries that name in its own ``__dict__``.
TORCH_HOME: Final[dict[type, str]] = {}

# Maps each class of torch to the class that was re-based from it.
REBASED: Final[dict[type, type]] = {}


# Since Python 3.13 the compiler strips the indentation from docstrings.
_DOC_INDENT: Final = "" if sys.version_info >= (3, 13) else "    "


class SourceOf:
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


def rebased(cls: ClassT) -> ClassT:
    """Finish a class ``class X(torch.nn.X, Module)`` and enter it in the tables above.

    The documentation is torch's, with a last line that says so. Annotations are copied, because
    code that reads ``X.__annotations__`` sees those of exactly one class; where torch's class has
    none, none are set, since an empty dict would hide the inherited ones from TorchScript.
    """
    layer = cls.__bases__[0]
    if cls.__doc__ is None and layer.__doc__ is not None:
        public = getattr(torch.nn, layer.__name__, None) is layer
        name = f"{'torch.nn' if public else layer.__module__}.{layer.__name__}"
        cls.__doc__ = f"{layer.__doc__.rstrip()}\n\n{_DOC_INDENT}Same as ``{name}``."
    annotations = {**inspect.get_annotations(layer), **inspect.get_annotations(cls)}
    if annotations:
        cls.__annotations__ = annotations
    if "__deprecated__" in vars(layer):
        _deprecate(cls, layer)
    cls.__wrapped__ = SourceOf(cls, layer)  # type: ignore[attr-defined]
    cls.qconfig = QuantizationConfig(cls, layer)  # type: ignore[attr-defined]
    TORCH_HOME[cls] = layer.__module__
    REBASED[layer] = cls
    return cls


def _deprecate(cls: type, layer: type) -> None:
    """Make ``cls`` warn where torch's deprecated class does: when it is built or subclassed.

    Torch's class would stay silent about the first, as it looks for instances of exactly itself,
    and warn a second time about the second, so its hook for subclasses is passed over.
    """

    def __init_subclass__(subclass: type, **kwargs: Any) -> None:  # noqa: N807
        super(layer, subclass).__init_subclass__(**kwargs)  # type: ignore[arg-type]

    cls.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[arg-type, assignment]
    deprecated(vars(layer)["__deprecated__"], category=FutureWarning)(cls)


def leaf_forward(layer: type[torch.nn.Module]) -> Callable[[FunctionT], FunctionT]:
    """Let a ``forward`` of our own stand for that of ``layer``, which stays the one to be read.

    Such a ``forward`` takes tensors straight from the registries, in a third less time for a small
    layer than the attributes take. It does so only for instances of exactly its class with nothing
    in the way: subclasses, which parametrizations make too, attributes of the instance, and missing
    entries, as weight normalization and pruning leave them, go to torch's own ``forward``.

    Functions are looked up in ``torch.nn.functional`` at each call, since libraries replace them.
    TorchScript finds torch's source through ``__wrapped__``, and resolves its names in the globals
    of the file of ours: they need ``F`` where that source does.

    Dynamo traces torch's function, so that graphs, guards and the time to compile are torch's.

    The code says that it is from torch's file, and its first ``return`` from the line of torch's:
    dynamo decides by the file not to compile a layer for itself where its caller was not compiled,
    and graphs and tracebacks tell lines, which are then those of the source that can be read.
    """
    original: Any = layer.forward

    def finish(function: FunctionT) -> FunctionT:
        code, source = function.__code__, original.__code__
        moved = _return_lines(source)[-1] - _return_lines(code)[0]
        function.__code__ = code.replace(
            co_filename=source.co_filename, co_firstlineno=code.co_firstlineno + moved
        )
        function.__doc__ = original.__doc__
        function.__annotations__ = original.__annotations__
        function.__wrapped__ = original  # type: ignore[attr-defined]
        trace_instead(function, original)
        return function

    return finish


def _return_lines(code: types.CodeType) -> list[int]:
    lines = dict(dis.findlinestarts(code))
    at = sorted(lines)
    return [
        lines[at[bisect.bisect_right(at, found.offset) - 1]]
        for found in dis.get_instructions(code)
        if found.opname == "RETURN_VALUE"
    ]


def composite(
    copies: Callable[[Any], Iterable[object]] = lambda _: (),
) -> Callable[[ClassT], ClassT]:
    """Finish a class whose constructor builds children: they become modkit layers.

    Modules among the constructor's arguments are the user's, and stay as they are.

    Args:
        copies: Tells, for a built instance, which of its children the constructor has copied
            from an argument. They keep the class of what was copied.
    """

    def finish(cls: ClassT) -> ClassT:
        construct = cls.__init__  # type: ignore[misc]

        @functools.wraps(construct)
        def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            construct(self, *args, **kwargs)
            rebase_children(self, keep=(*args, *kwargs.values(), *copies(self)))

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return finish


def mark_leaf(module: torch.nn.Module) -> None:
    """Let fx see ``module`` as a leaf, if its class is exactly one of the re-based layers."""
    home = TORCH_HOME.get(type(module))
    if home is not None:
        # Not through its dict, which takes memory once somebody has asked for it.
        object.__setattr__(module, "__module__", home)


def rebase(module: ModuleT) -> ModuleT:
    """Turn ``module`` into modkit's layer in place, if it is exactly one of torch's layers."""
    layer = REBASED.get(type(module))
    if layer is not None:
        module.__class__ = layer
        mark_leaf(module)
    return module


def rebase_children(module: torch.nn.Module, *, keep: Iterable[object] = ()) -> None:
    """Turn all torch layers below ``module`` into modkit's, in place.

    Args:
        module: The module below which to look; it is not changed itself.
        keep: Modules to leave as they are, together with all that is below them.
    """
    seen = {id(module), *map(id, keep)}
    waiting = [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(rebase(child))
