"""Turning a model that others have built into a modkit one, in place, and back.

An instance of exactly one of torch's layers becomes an instance of modkit's. For any other class
``X`` there is one class that derives from ``X`` and puts modkit's ``Module`` below it; it looks
like ``X``, and its instances are pickled as instances of ``X`` that are to be adopted. No class of
others is changed, and none of their code runs when the class is made: neither a metaclass nor an
``__init_subclass__`` gets to know of it, so registries of classes stay as they are.
"""

import abc
import copyreg
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
from torch.nn.utils import parametrize

from modkit._types import ModuleT
from modkit.nn._call import note_state
from modkit.nn._layers import REBASED, TORCH_HOME, SourceOf
from modkit.nn.module import Module


_ENTRY: Final = "__wrapped__"
_lock: Final = threading.RLock()
# A class may define a `__class__` or a `__setattr__` of its own, neither of which is meant here.
_set_class: Final[Callable[[object, type], None]] = object.__dict__["__class__"].__set__


def _entry(cls: type) -> SourceOf | None:
    """Return what leads from one of our classes to that of others for which it stands."""
    entry = vars(cls).get(_ENTRY)
    return entry if isinstance(entry, SourceOf) else None


def _is_parametrized(cls: type) -> bool:
    """Tell whether ``cls`` was made by ``parametrize``, for one module and its copies."""
    return cls.__module__ == parametrize.__name__ and cls.__name__.startswith("Parametrized")


def _bases_for(cls: type) -> tuple[type, ...]:
    """Return the modkit classes for what ``cls`` derives from, in its order, the nearest alone."""
    found = [*(REBASED[base] for base in cls.__mro__ if base in REBASED), Module]
    return tuple(
        one for one in found if not any(two is not one and issubclass(two, one) for two in found)
    )


def _make_class(cls: type, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """Make a class named like ``cls``; raises TypeError where the bases do not fit together."""
    # Tools look for annotations in the dict of a class, where an access to them creates them.
    kept = ("__module__", "__qualname__", "__doc__", "__annotations__")
    members = {name: vars(cls)[name] for name in kept if name in vars(cls)}
    members.setdefault("__qualname__", cls.__qualname__)
    meta = type(cls)
    create = abc.ABCMeta.__new__ if issubclass(meta, abc.ABCMeta) else type.__new__
    made: type = create(meta, cls.__name__, (Module,), {**members, **namespace})
    # The bases come last, because to give them at once would call `__init_subclass__`.
    type.__setattr__(made, "__bases__", bases)
    type.__setattr__(made, _ENTRY, SourceOf(made, cls))
    return made


def _adopted_class(cls: type) -> type:
    """Return the one class that stands for ``cls``, a class of users."""
    # It lives as long as something uses it; `cls` knows it by a weak reference.
    subclasses: list[type] = type.__subclasses__(cls)
    for known in subclasses:
        entry = _entry(known)
        if entry is not None and entry.source is cls:
            return known

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        reduce = super(cast("Any", made), self).__reduce_ex__
        return _reduce(self, cls, reduce, protocol) if type(self) is made else reduce(protocol)

    namespace: dict[str, Any] = {"__reduce_ex__": __reduce_ex__}
    # A lazy module turns into an instance of this class when it is called for the first time.
    later = getattr(cls, "cls_to_become", None)
    if isinstance(later, type) and issubclass(later, torch.nn.Module):
        namespace["cls_to_become"] = _modkit_class(later, {}) or later
    made = _make_class(cls, (cls, *_bases_for(cls)), namespace)
    return made


def _reduce(module: Any, cls: type, reduce: Callable[[Any], Any], protocol: Any) -> Any:
    """Describe ``module`` as ``cls`` does, with ``cls`` in place of the class that stands for it."""
    made, registered = type(module), copyreg.dispatch_table.get(cls)
    reduced: Any = registered(module) if registered else reduce(protocol)
    if isinstance(reduced, str):
        return reduced
    function, args, *rest = reduced
    function, *args = (cls if item is made else item for item in (function, *args))
    return (_rebuild, (cls, function, tuple(args)), *rest)


def _rebuild(cls: type, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Create what ``_reduce`` has described, as a module that is adopted."""
    module = cast("torch.nn.Module", function(*args))
    return adopt(module) if type(module) is cls else module


def _reparametrized(cls: type, base: type) -> type:
    """Return a class like ``cls``, which ``parametrize`` made, that is based on ``base``."""
    not_copied = {"__dict__", "__weakref__", _ENTRY}
    own = {name: value for name, value in vars(cls).items() if name not in not_copied}
    return _make_class(cls, (base,), own)


def _modkit_class(cls: type, made: dict[type, type]) -> type | None:
    """Return the class that instances of ``cls`` are to have, or None if it is modkit's already.

    Those that have been made for parametrized modules of this model are in ``made``.
    """
    if cls is torch.nn.Module:
        return Module
    if cls in REBASED:
        return REBASED[cls]
    if issubclass(cls, Module):
        return None
    if not _is_parametrized(cls):
        return _adopted_class(cls)
    # To remove a parametrization deletes a member of this very class, and goes back to its base.
    if cls not in made:
        made[cls] = _reparametrized(cls, _modkit_class(cls.__bases__[0], made) or cls.__bases__[0])
    return made[cls]


def _original_class(cls: type, made: dict[type, type]) -> type | None:
    """Return the class that instances of ``cls`` had before, or None if none is known."""
    if cls is Module:
        return torch.nn.Module
    entry = _entry(cls)
    if not _is_parametrized(cls):
        return entry.source if entry is not None else None
    if entry is not None and vars(cls).keys() ^ vars(entry.source).keys() <= {_ENTRY}:
        return entry.source
    # The module was parametrized, or lost a parametrization, after it was adopted.
    if cls not in made:
        base = _original_class(cls.__bases__[0], made)
        if base is None:
            return None
        made[cls] = _reparametrized(cls, base)
        type.__delattr__(made[cls], _ENTRY)
    return made[cls]


def _modules_below(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each module with its path; what a ScriptModule holds is not looked at."""
    waiting, seen = [("", model)], {id(model)}
    while waiting:
        path, module = waiting.pop()
        yield path, module
        if isinstance(module, torch.jit.ScriptModule):
            continue
        prefix = f"{path}." if path else ""
        for name, child in reversed(module.__dict__.get("_modules", {}).items()):
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append((prefix + name, child))


def _called(path: str) -> str:
    return f"the module {path!r}" if path else "the model itself"


_Swap = tuple[str, torch.nn.Module, type]


def _plan(
    model: torch.nn.Module,
    function: str,
    find_class: Callable[[type, dict[type, type]], type | None],
) -> tuple[list[_Swap], list[str]]:
    """Find each module's new class, and which modules are left alone; change nothing, or raise."""
    swaps, made = list[_Swap](), dict[type, type]()
    left, compiled = list[str](), list[str]()
    for path, module in _modules_below(model):
        state = module.__dict__
        if state.get("_compiled_call_impl") or "_orig_mod" in state.get("_modules", ()):
            compiled.append(path)
        kinds = [k for k in (torch.jit.ScriptModule, torch.fx.GraphModule) if isinstance(module, k)]
        if kinds:
            if not isinstance(module, Module):
                left.append(f"{_called(path)} ({kinds[0].__name__})")
            continue
        cls = type(module)
        try:
            target = find_class(cls, made)
        except TypeError as error:
            raise _refusal(function, path, cls, error) from error
        if target is not None:
            swaps.append((path, module, target))
    if compiled and swaps:
        raise RuntimeError(
            f"modkit.{function} cannot change a model that is compiled, as {_called(compiled[0])} "
            f"is; call modkit.{function} first, then compile. Nothing has been changed."
        )
    return swaps, left


def _refusal(function: str, path: str, cls: type, error: TypeError) -> TypeError:
    return TypeError(
        f"modkit.{function} cannot change the class of {_called(path)}, "
        f"{cls.__module__}.{cls.__qualname__}: {error}. Nothing has been changed."
    )


def _home(cls: type) -> str | None:
    """Return the module name that fx is to see on instances of ``cls``; see ``TORCH_HOME``."""
    if _is_parametrized(cls):
        cls = cls.__bases__[0]
    return torch.nn.Module.__module__ if cls is Module else TORCH_HOME.get(cls)


def _carry_out(swaps: list[_Swap], function: str) -> None:
    """Give each module its new class, or, if one does not take it, change none."""
    before: list[tuple[torch.nn.Module, type]] = []
    try:
        for _, module, target in swaps:
            before.append((module, type(module)))
            _set_class(module, target)
    except TypeError as error:
        for module, cls in before:
            _set_class(module, cls)
        path, module, _ = swaps[len(before) - 1]
        raise _refusal(function, path, type(module), error) from error
    for module, cls in before:
        note_state(module)
        old, new = _home(cls), _home(type(module))
        if new is not None:
            module.__dict__["__module__"] = new
        elif old is not None and module.__dict__.get("__module__") == old:
            del module.__dict__["__module__"]


def adopt(model: ModuleT) -> ModuleT:
    """Turn a model that others have built into a modkit one, in place.

    For models of transformers, timm, torchvision and the like: calls, ``load_state_dict`` and
    walks get as fast as those of modkit's own, and the fixes apply. Every module stays the same
    object, with its parameters, buffers and hooks, and is still an instance of its class; an
    optimizer that was built before goes on. Adopted models can be copied, pickled, compiled,
    exported, scripted and traced. A second call does nothing but adopt what has been added.

    A ScriptModule, with all that it holds, and a GraphModule have classes of their own making.
    They are left as they are, and a warning names them.

    Returns:
        ``model``.

    Raises:
        TypeError: the class of a module cannot be derived from, for example because of its
            ``__slots__``. Nothing has been changed.
        RuntimeError: the model or a part of it is compiled already. Nothing has been changed.

    Example:
        >>> import torch
        >>> import modkit
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> weight = model[0].weight
        >>> modkit.adopt(model) is model
        True
        >>> isinstance(model[0], modkit.nn.Linear), model[0].weight is weight
        (True, True)

    Differs from torch: there is nothing like it.
    """
    with _lock:
        swaps, left = _plan(model, "adopt", _modkit_class)
        _carry_out(swaps, "adopt")
    if left:
        warnings.warn(
            f"modkit.adopt has left as they are: {', '.join(left)}.", UserWarning, stacklevel=2
        )
    return model


def release(model: ModuleT) -> ModuleT:
    """Give every module of ``model`` the class back that it had before ``adopt``, in place.

    It can be a part of what was adopted. Layers that were built as modkit's become torch's, too;
    classes that users have derived from modkit's stay.

    Returns:
        ``model``.

    Raises:
        RuntimeError: the model or a part of it is compiled. Nothing has been changed.

    Example:
        >>> model = modkit.adopt(torch.nn.Linear(4, 8))
        >>> type(modkit.release(model)) is torch.nn.Linear
        True

    Differs from torch: there is nothing like it.
    """
    with _lock:
        swaps, _ = _plan(model, "release", _original_class)
        _carry_out(swaps, "release")
    return model
