"""Which methods of ``torch.nn.Module`` are overridden: by a class, an instance or a patch.

One contract holds for all of them: whatever torch would call is called. A function that a library
has put into ``torch.nn.Module`` is the method of modkit's modules too, and a mechanism that walks a
tree calls what a class or an instance overrides, with torch's signature, instead of walking on.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Final

import torch

from modkit._messages import add_note
from modkit._tree import descend
from modkit._upstream import FunctionT, original_methods


TorchModule: Final = torch.nn.Module
is_dynamo_compiling: Final = torch.compiler.is_dynamo_compiling

# The methods whose behaviour the mechanisms know: torch's functions as torch wrote them, and ours.
# By identity, since what a class has under the name of a method need not be hashable. All of these
# functions live as long as the process, so no other object gets the identity of one.
STANDARD: Final[set[int]] = {
    id(value) for value in original_methods.values() if isinstance(value, types.FunctionType)
}

# Names of methods, each with the function that torch wrote.
Methods = tuple[tuple[str, object], ...]


def standard(function: FunctionT) -> FunctionT:
    """Declare a function as ours for torch's of that name."""
    STANDARD.add(id(function))
    function.__qualname__ = f"Module.{function.__name__}"
    return function


def of_torch(module: torch.nn.Module, name: str) -> Any:
    """Return a method of ``torch.nn.Module`` as it is now, bound to a module.

    What is put there need not be a function: it is bound as Python binds attributes of a class. A
    mock, for instance, is called without the module.
    """
    if is_dynamo_compiling():
        # Dynamo traces functions.
        return functools.partial(getattr(TorchModule, name), module)
    value = TorchModule.__dict__[name]
    bind = getattr(type(value), "__get__", None)
    return value if bind is None else bind(value, module, type(module))


def patchable(function: FunctionT) -> FunctionT:
    """Declare a method of ours that leaves to torch's of that name where it is patched or compiled.

    Compiled code has the graphs that it has with torch: dynamo traces torch's method. What it
    cannot trace it calls, and that is ours.
    """
    name = function.__name__
    original = original_methods[name]

    @functools.wraps(function)
    def method(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or getattr(TorchModule, name) is not original:
            return of_torch(self, name)(*args, **kwargs)
        try:
            # A plain call takes half the time of one that unpacks, and most have no arguments.
            return function(self, *args, **kwargs) if args or kwargs else function(self)
        except AttributeError as error:
            _note_forgotten_init(error)
            raise

    # Otherwise ``inspect.getfullargspec`` would find ``*args, **kwargs``.
    method.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    standard(function)
    return standard(method)  # type: ignore[return-value]


def _note_forgotten_init(error: AttributeError) -> None:
    """Name the cause of an error about the state of a module that has none."""
    # Python sets it, to the module that lacks the attribute.
    module: object = getattr(error, "obj", None)
    if isinstance(module, TorchModule) and "_modules" not in module.__dict__:
        note = f"{type(module).__qualname__}.__init__() must call super().__init__() first."
        if note not in getattr(error, "__notes__", ()):
            add_note(error, note)


def methods(*names: str) -> Methods:
    """Return methods as ``all_standard`` takes them."""
    return tuple((name, original_methods[name]) for name in names)


def class_is_standard(cls: Any, asked: Methods) -> bool:
    """Return True if neither a class nor a patch overrides one of some methods."""
    # It may return another method than the class has. A table may hold what is not a module, but
    # every object has this method.
    if cls.__getattribute__ is not object.__getattribute__:
        return False
    for name, original in asked:
        function = getattr(cls, name, None)
        # A class that has torch's function has it whether or not ``torch.nn.Module`` is patched.
        if function is not original and (
            id(function) not in STANDARD or getattr(TorchModule, name) is not original
        ):
            return False
    return True


def all_standard(module: torch.nn.Module, asked: Methods) -> bool:
    """Return True if no class, instance or patch overrides one of some methods."""
    # In this order: what is not a module need not have a dict.
    return class_is_standard(type(module), asked) and not any(
        name in module.__dict__ for name, _ in asked
    )


def is_standard(module: torch.nn.Module, method: str) -> bool:
    """Return True if no class, instance or patch overrides a method."""
    return all_standard(module, ((method, original_methods[method]),))


class StandardClasses(dict[type, bool]):
    """Caches for one walk which classes override none of some methods; instances still may.

    The methods belong to the class: a walk of two modules would notice the time of an ``__init__``.

    Attributes:
        asked: The methods, from ``methods()``.
    """

    asked: Methods

    def __missing__(self, cls: Any) -> bool:
        """Check a class that this walk has not met before."""
        self[cls] = class_is_standard(cls, self.asked)
        return self[cls]


@functools.cache
def standard_classes(*names: str) -> type[StandardClasses]:
    """Return the caches for walks that ask for some methods."""
    return type("StandardClasses", (StandardClasses,), {"asked": methods(*names)})


_CHILDREN: Final = ("children", "named_children")
_CHILDREN_METHODS: Final = methods(*_CHILDREN)


def walk(
    root: torch.nn.Module,
    method: Callable[..., object],
    argument: object,
    leave: Callable[[Any, object], object],
) -> None:
    """Visit each module below ``root``, as a method that torch calls for ``children()`` does.

    A module whose class or instance overrides the method, or its children, is called instead.
    ``leave`` gets each of the others after its children.
    """
    name = method.__name__

    def call(child: torch.nn.Module) -> None:
        if is_standard(child, name):
            method(child, argument)
        else:
            getattr(child, name)(argument)

    if not all_standard(root, _CHILDREN_METHODS):
        for child in root.children():
            call(child)
        return

    classes = standard_classes(name, *_CHILDREN)()

    # The state of a module are those of its children that were met, as each is visited once. They
    # are told apart by identity, as some modules cannot be hashed. The values keep them alive, so
    # that no identity is used twice while a caller replaces children.
    def enter_once(
        _: str, child: torch.nn.Module, met: dict[int, torch.nn.Module]
    ) -> dict[int, torch.nn.Module] | None:
        key = id(child)
        if key in met:
            return None
        met[key] = child

        plain = classes[type(child)]
        if plain:
            # Only here: what is not a module, which a table may hold, need not have a dict.
            state = child.__dict__
            plain = not (name in state or "children" in state or "named_children" in state)
        if not plain:
            call(child)
            return None
        return {}

    children_met: dict[int, torch.nn.Module] = {}
    descend(root, children_met, enter_once, leave)
