"""Classes with script methods: an instance is compiled when its constructor has returned."""

from typing import Any, TypeVar, cast

from modkit._types import FunctionT
from modkit.jit._members import BOOKKEEPING, DEFINED, bind
from modkit.jit._notice import give_notice, without_warnings_of_torch
from modkit.jit._upstream import (
    ENABLED,
    MethodStub,
    ScriptMethod,
    TorchScriptMeta,
    create_script_module,
    method_definition,
    methods_to_compile,
    names_of_frame,
    parse_definition,
)
from modkit.jit._wrap import Memo, wrap_children
from modkit.nn.module import ModuleType


InstanceT = TypeVar("InstanceT")


class ScriptMeta(TorchScriptMeta, ModuleType):
    """Collects the script methods of a class as torch's does, and compiles what it has made.

    The instance itself comes to stand for the C++ module; torch keeps a second object behind it,
    through which every access and every call goes.
    """

    def mro(cls) -> list[type]:  # noqa: N805 - a metaclass
        """Keep Python's order: ``Module`` comes before torch's ScriptModule, which it overrides."""
        return type.mro(cls)

    def __call__(cls: type[InstanceT], *args: Any, **kwargs: Any) -> InstanceT:  # noqa: N805 - a metaclass
        module: Any = type.__call__(cls, *args, **kwargs)
        if ENABLED and isinstance(type(module), ScriptMeta) and "_c" not in module.__dict__:
            _compile(module)
        return cast("InstanceT", module)


def _compile(module: Any) -> None:
    defined: dict[str, Any] = module.__dict__.pop(DEFINED, {})

    def stubs_for(part: Any) -> list[Any]:
        if not hasattr(type(part), "_methods"):
            return cast("list[Any]", methods_to_compile(part))
        own = defined if part is module else {}
        return [stub for _, stub in sorted({**type(part)._methods, **own}.items())]

    with without_warnings_of_torch():
        # What one instance defines is no reason for another to have a type in common with it.
        inner = create_script_module(module, stubs_for, share_types=not defined)
    memo = Memo()
    children = wrap_children(base_class(type(module)), inner, module, memo)
    kind = inner._concrete_type
    for name in (*kind.get_attributes(), *(name for name, _ in kind.get_modules())):
        if name not in BOOKKEEPING:
            module.__dict__.pop(name, None)
    bind(module, inner._c, children, kind)
    for name, value in inner.__dict__.items():
        if isinstance(value, ScriptMethod):
            module.__dict__[name] = value


def base_class(cls: Any) -> Any:
    """Return our own class that the users' class is derived from; children are of that one."""
    return next(base for base in cls.__mro__ if base.__dict__.get("_disable_script_meta"))


def script_method(fn: FunctionT) -> FunctionT:
    """Mark a method of a class that is derived from ``ScriptModule`` as one to be compiled.

    Args:
        fn: The method; names that it uses are looked up where the class stands.

    Example:
        >>> import torch
        >>> from modkit import jit
        >>> class Scale(jit.ScriptModule):
        ...     @jit.script_method
        ...     def forward(self, x, factor: int):
        ...         return x * factor
        >>> Scale()(torch.ones(2), 3)
        tensor([3., 3.])

    Same as ``torch.jit.script_method``.
    """
    give_notice()
    if not ENABLED:
        return fn
    # From here it is one frame to the body of the class, and another one to what is around it.
    names = names_of_frame(frames_up=2)
    definition = method_definition(fn, fn.__name__, self_name="ScriptModule")
    return cast("FunctionT", MethodStub(names, definition, fn))


def define_later(module: Any, src: str, names: Any) -> None:
    """Keep a definition until the instance is compiled; it is for this instance alone."""
    definition = parse_definition(src)
    stubs = module.__dict__.setdefault(DEFINED, {})
    stubs[definition.name().name] = MethodStub(names, definition, None)
