"""A scope in which the members of a model are read as fast as plain attributes.

Torch finds a parameter, a buffer or a child through ``__getattr__``, after the usual lookup has
failed. Inside ``fast_attributes`` the members stand in the instance ``__dict__`` as well, where
the usual lookup finds them. That is sound as long as the two places agree and no tool takes the
copies for plain attributes, so for the length of the block

- the three registries are dicts that refuse to change: every way of registering, deleting or
  replacing a member, those that write to a registry directly included, ends there;
- some names in the ``__dict__`` of each module, which only copying, tracing and compiling look
  up, hold an object that raises as soon as it is used.

No class is changed, neither torch's nor the model's, and reads cost nothing more.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import torch

from modkit._types import ModuleT
from modkit._upstream import dynamo_is_tracing, fx_is_tracing, original_methods


_REFUSED: Final = (
    "inside modkit.fast_attributes a module cannot {act}; leave the fast_attributes block first"
)
_CHANGE: Final = (
    "have its members registered, replaced or deleted, which torch.export.export and "
    "torch.func.functional_call do, too"
)
_COPY: Final = "be copied or pickled"
_SCRIPT: Final = "be scripted or traced by torch.jit"
_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")
_FSDP_FLAG: Final = "_is_fsdp_managed_module"
_ABSENT: Final = object()


def _refuse(act: str) -> NoReturn:
    raise RuntimeError(_REFUSED.format(act=act))


class _Registry(dict[str, Any]):
    """The members of a module, which stay as they are.

    Whoever copies the ``__dict__`` of a module gets a copy of the members along with this object.
    It never becomes writable, so the two cannot come to differ in such a copy either.
    """

    def _refuse_change(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(_CHANGE)

    __delitem__ = __ior__ = clear = pop = popitem = _refuse_change
    setdefault = update = _refuse_change  # pyright: ignore[reportAssignmentType]

    def __setitem__(self, name: str, value: Any) -> None:
        # `self.count += 1` on a buffer changes the tensor, and then assigns it to where it was.
        if self.get(name, _ABSENT) is not value:
            _refuse(_CHANGE)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse(_COPY)


class _Refusal:
    """What a tool finds under a name that it alone looks up; any use of it raises."""

    def __init__(self, act: str) -> None:
        self._act = act

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self._act)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse(_COPY)

    @property
    def _torchscript_modifier(self) -> NoReturn:
        # TorchScript asks every callable attribute of a module whether it is to be exported, when
        # the module is traced just as when it is scripted.
        _refuse(_SCRIPT)


class _FsdpFlag:
    """The answer to whether FSDP manages a module.

    Dynamo asks it of every module that it meets, so a strict export does as well, and that is where
    they are refused. Others, such as transformers, ask in eager code, and are told the truth.
    """

    def __init__(self, value: object) -> None:
        self._value = bool(value)

    def __bool__(self) -> bool:
        if dynamo_is_tracing():
            _refuse("be compiled or exported")
        return self._value


# The name that a tool looks up on the instance, with what the tool is about to do.
_REFUSALS: Final = {
    "__getstate__": _Refusal(_COPY),
    "__prepare_scriptable__": _Refusal(_SCRIPT),
    "_replicate_for_data_parallel": _Refusal("be replicated by DataParallel"),
}


def _named_modules(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # The first thing that fx does is to list the modules. It would not see the reads of members
    # in `forward`, and bake their values into the graph.
    if fx_is_tracing():
        _refuse("be traced by torch.fx")
    return original(*args, **kwargs)


def _load_state_dict(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("assign") or any(args[2:3]):
        _refuse("be loaded with assign=True")
    return original(*args, **kwargs)


def _apply(
    module: torch.nn.Module,
    original: Callable[..., Any],
    fn: Callable[[torch.Tensor], torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let a conversion pass that changes nothing, such as ``to`` the device where it all is.

    Every module checks its own tensors before it converts any. The first one that has something
    to convert raises, and what came before it had nothing, so no model is left half converted.
    """
    with torch.no_grad():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None:
                continue
            grad = tensor.grad if tensor.is_leaf else None
            if fn(tensor) is not tensor or (grad is not None and fn(grad) is not grad):
                _refuse("be converted")
    return original(fn, *args, **kwargs)


@dataclass
class _Scope:
    """What one module had in its ``__dict__`` before the block, and what it has inside."""

    module: torch.nn.Module
    depth: int
    replaced: dict[str, Any]
    placed: dict[str, Any]


# The modules that are inside some block now. The scopes hold them, so no identity is used twice.
_scopes: Final[dict[int, _Scope]] = {}
_lock: Final = threading.Lock()


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _reads_as_torch_does(module: torch.nn.Module) -> bool:
    """Tell whether what is in the registries is what ``module.name`` reads.

    That is not so for ScriptModules, for registries of another kind, which libraries put there to
    fetch tensors on demand, and for classes with attribute access of their own.
    """
    state, cls = module.__dict__, type(module)
    return (
        all(type(state.get(registry)) is dict for registry in _REGISTRIES)
        and cls.__getattribute__ is object.__getattribute__
        and getattr(cls, "__getattr__", None) is original_methods["__getattr__"]
    )


def _modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the modules to mirror; what compiled code runs has no use for it, and is left alone."""
    modules = [m for m in model.modules() if id(m) in _scopes or _reads_as_torch_does(m)]
    compiled = [module for module in model.modules() if _is_compiled(module)]
    spared = {id(part) for module in compiled for part in module.modules()}
    return [module for module in modules if id(module) not in spared]


def _members(module: torch.nn.Module) -> dict[str, Any]:
    """Return the members that an attribute read finds in the registries, and nowhere before.

    Names that are no identifiers, such as those of the children of ``Sequential``, are not read
    as attributes.
    """
    found: dict[str, Any] = {}
    classes = type(module).__mro__
    for registry in _REGISTRIES:
        for name, value in module.__dict__[registry].items():
            if (
                name.isidentifier()
                and name not in found
                and name not in module.__dict__
                and not any(name in cls.__dict__ for cls in classes)
            ):
                found[name] = value
    return found


def _enter(module: torch.nn.Module) -> None:
    scope = _scopes.get(id(module))
    if scope is not None:
        scope.depth += 1
        return
    state = module.__dict__
    placed = {
        **{registry: _Registry(state[registry]) for registry in _REGISTRIES},
        **_REFUSALS,
        _FSDP_FLAG: _FsdpFlag(getattr(module, _FSDP_FLAG, False)),
        "named_modules": partial(_named_modules, module.named_modules),
        "load_state_dict": partial(_load_state_dict, module.load_state_dict),
        "_apply": partial(_apply, module, module._apply),
        **_members(module),
    }
    replaced = {name: state[name] for name in placed if name in state}
    _scopes[id(module)] = _Scope(module, 1, replaced, placed)
    state.update(placed)


def _leave(module: torch.nn.Module) -> None:
    scope = _scopes[id(module)]
    scope.depth -= 1
    if scope.depth:
        return
    state = module.__dict__
    for name, value in scope.placed.items():
        # Something else that has been put there since is none of ours, and stays.
        if state.get(name, _ABSENT) is not value:
            continue
        if name in scope.replaced:
            state[name] = scope.replaced[name]
        else:
            del state[name]
    del _scopes[id(module)]


@contextmanager
def fast_attributes(model: ModuleT) -> Generator[ModuleT, None, None]:
    """Make ``self.weight`` and its like as fast to read as plain attributes, inside the block.

    For eager inference with small networks, where Python takes longer than the arithmetic: a
    policy that is asked for one action at a time, a decoding loop on the CPU. With large tensors,
    and under ``torch.compile``, there is nothing to gain. The model can be of torch or of modkit.

    Inside the block the weights may change in place, as optimizers and ``load_state_dict`` change
    them, but the structure may not: registering, replacing or deleting a member, converting,
    copying, pickling, tracing, compiling and exporting raise. Blocks can be nested and can overlap;
    afterwards every module is as it was before.

    Left alone, and as fast as ever, are ScriptModules, compiled modules with all that is in them,
    and modules whose class has a ``__getattr__`` of its own; likewise a member whose name is also
    an attribute of the class.

    Args:
        model: The module whose members, and those of all modules below it, are to be fast.

    Yields:
        ``model``.

    Raises:
        RuntimeError: inside the block, by whatever cannot be done there.

    Example:
        >>> import torch
        >>> import modkit
        >>> import modkit.nn as nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with torch.inference_mode(), modkit.fast_attributes(net):
        ...     for _ in range(3):
        ...         action = net(torch.ones(4)).argmax()
        >>> action.shape
        torch.Size([])

    Differs from torch: there is nothing like it.
    """
    entered: list[torch.nn.Module] = []
    try:
        with _lock:
            for module in _modules_of(model):
                _enter(module)
                entered.append(module)
        yield model
    finally:
        with _lock:
            for module in entered:
                _leave(module)
