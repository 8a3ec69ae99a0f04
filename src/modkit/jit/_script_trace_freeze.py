"""``script``, ``trace``, ``interface`` and ``freeze``: torch's compiler for modkit's modules."""

from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch

from modkit.jit._from_torch import WRAPPERS, make_parameters, wrap_cpp, wrap_torch
from modkit.jit._script_module import ScriptModule
from modkit.jit._upstream import (
    ENABLED,
    class_definition,
    compile_interface,
    create_script_module,
    give_notice,
    methods_to_compile,
    names_of_frame,
    prepare_scriptable,
    qualified_name,
    script_anything,
    trace_anything,
    trace_module_anything,
    without_warnings_of_torch,
)
from modkit.nn.module import Module


ClassT = TypeVar("ClassT", bound=type)


def _traced(run: Callable[..., Any], arguments: dict[str, Any], source: Any) -> Any:
    """Call the function of torch with the same arguments as that of modkit."""
    # Torch's default is its own compilation unit, not None.
    if arguments["_compilation_unit"] is None:
        del arguments["_compilation_unit"]
    with without_warnings_of_torch():
        return _finish(run(**arguments), source)


def _finish(result: Any, source: Any) -> Any:
    """Return modkit's wrapper of a new module; a function or a compiled ``source`` as it is."""
    if type(result) not in WRAPPERS or result is source:
        return result
    module = wrap_torch(result, source if isinstance(source, torch.nn.Module) else None)
    make_parameters(module)
    return module


@overload
def script(
    obj: torch.nn.Module, optimize: None = None, *, example_inputs: Any = None
) -> ScriptModule: ...
@overload
def script(obj: Any, optimize: None = None, *, example_inputs: Any = None) -> Any: ...
def script(
    obj: Any,
    optimize: None = None,
    _frames_up: int = 0,
    _rcb: Callable[[str], Any] | None = None,
    example_inputs: Any = None,
) -> Any:
    """Compile a module, function, class, or object of a class; wrap a list or dict.

    A module becomes a ``ScriptModule`` that shares its parameters. Same as ``torch.jit.script``,
    with modkit's ``ScriptModule``.

    Args:
        obj: The object to compile. A compiled object is returned as it is.
        optimize: No effect.
        _frames_up: Number of frames between this function and the one where names are looked up.
        _rcb: What looks names up, by default in the calling function.
        example_inputs: Arguments of a run that infers missing types; it requires MonkeyType.

    Returns:
        A ``ScriptModule`` for a module, which may mix modules of torch and of modkit. A
        ``ScriptFunction`` for a function, the class itself for a class.

    Raises:
        RuntimeError: If the code uses Python that TorchScript does not support.

    Example:
        >>> import torch
        >>> from modkit import jit
        >>> jit.script(torch.nn.Linear(4, 2))(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    modkit: A module in several places is compiled to one module, and buffers that are not
    persistent stay so.
    """
    give_notice("script")
    if not ENABLED:
        return obj

    plain = isinstance(obj, torch.nn.Module) and not isinstance(obj, torch.jit.ScriptModule)
    with without_warnings_of_torch():
        if plain and not example_inputs and cast("object", optimize) is None:
            obj = prepare_scriptable(obj)
            result = create_script_module(obj, methods_to_compile)
        else:
            result = script_anything(obj, optimize, _frames_up + 1, _rcb, example_inputs)
    return _finish(result, obj)


def trace(
    func: Any,
    example_inputs: Any = None,
    optimize: None = None,
    check_trace: bool = True,
    check_inputs: Any = None,
    check_tolerance: float = 1e-5,
    strict: bool = True,
    _force_outplace: bool = False,
    _module_class: Any = None,
    _compilation_unit: Any = None,
    example_kwarg_inputs: dict[str, Any] | None = None,
    _store_inputs: bool = True,
) -> Any:
    """Run a module or function once and compile the operations that it runs.

    A module becomes a ``ScriptModule``, a function a ``ScriptFunction``. Same as
    ``torch.jit.trace``, with modkit's ``ScriptModule``.

    Args:
        func: The module or function.
        example_inputs: The arguments of the run: a tuple, or one tensor.
        optimize: No effect.
        check_trace: Run the function and the trace on the same inputs, and warn if they differ.
        check_inputs: Further arguments for the check.
        check_tolerance: Largest accepted difference.
        strict: Refuse lists and dicts as results.
        _force_outplace: Record operations in place as others; for torch's own use.
        _module_class: Torch's class of the result; for torch's own use.
        _compilation_unit: Where the code is stored, by default that of the process.
        example_kwarg_inputs: Keyword arguments, in place of ``example_inputs``.
        _store_inputs: Keep the inputs with the trace, which ``load(_restore_shapes=True)`` reads.

    Returns:
        A ``ScriptModule`` for a module, a ``ScriptFunction`` for a function.

    Raises:
        RuntimeError: If an operation cannot be traced.
        torch.jit.TracingCheckError: The check has run another graph, or has failed.

    Example:
        >>> import torch
        >>> from modkit import jit
        >>> jit.trace(torch.nn.Linear(4, 2), torch.ones(1, 4))(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    # Before any other name is bound.
    arguments = dict(locals())

    give_notice("trace")
    if not ENABLED:
        return func
    return _traced(trace_anything, arguments, getattr(func, "__self__", func))


def trace_module(
    mod: torch.nn.Module,
    inputs: dict[str, Any],
    optimize: None = None,
    check_trace: bool = True,
    check_inputs: Any = None,
    check_tolerance: float = 1e-5,
    strict: bool = True,
    _force_outplace: bool = False,
    _module_class: Any = None,
    _compilation_unit: Any = None,
    example_inputs_is_kwarg: bool = False,
    _store_inputs: bool = True,
) -> ScriptModule:
    """Trace several methods of a module, with inputs by the name of the method.

    Same as ``torch.jit.trace_module``.

    Args:
        mod: The module.
        inputs: The arguments of each method, by its name.
        optimize: No effect.
        check_trace: Run the methods and their traces on the same inputs, and warn if they differ.
        check_inputs: Further arguments for the check, in dicts like ``inputs``.
        check_tolerance: Largest accepted difference.
        strict: Refuse lists and dicts as results.
        _force_outplace: Record operations in place as others; for torch's own use.
        _module_class: Torch's class of the result; for torch's own use.
        _compilation_unit: Where the code is stored, by default that of the process.
        example_inputs_is_kwarg: Whether the arguments of each method are a dict of keywords.
        _store_inputs: Keep the inputs with the trace, which ``load(_restore_shapes=True)`` reads.

    Returns:
        A ``ScriptModule`` with the traced methods.

    Raises:
        AttributeError: If ``mod`` is not a module.
        RuntimeError: If an operation cannot be traced.
        torch.jit.TracingCheckError: The check has run another graph, or has failed.
    """
    # Before any other name is bound.
    arguments = dict(locals())

    give_notice("trace_module")
    if not ENABLED:
        return cast("ScriptModule", mod)
    return cast("ScriptModule", _traced(trace_module_anything, arguments, mod))


def interface(obj: ClassT) -> ClassT:
    """Compile a class to an interface: a type for all modules, or classes, with its methods.

    Args:
        obj: A class without bases, or with the one base ``torch.nn.Module`` or
            ``modkit.nn.Module``. Its methods have types and no code.

    Returns:
        The class itself.

    modkit: The base of the class may also be ``modkit.nn.Module``.

    Raises:
        RuntimeError: If ``obj`` is not a class, or has other bases.
    """
    if not isinstance(cast("object", obj), type):
        raise RuntimeError("interface must be applied to a class")  # noqa: TRY004 - torch's type

    bases = obj.__mro__[1:-1]
    of_modules = bases in ((torch.nn.Module,), (Module, torch.nn.Module))
    if bases and not of_modules:
        raise RuntimeError(
            "TorchScript interface does not support inheritance yet. "
            "Please directly inherit from 'object' or 'nn.Module'."
        )

    cast("Any", obj).__torch_script_interface__ = compile_interface(
        qualified_name(obj), class_definition(obj, obj.__name__), names_of_frame(1), of_modules
    )
    return obj


def freeze(
    mod: torch.jit.ScriptModule,
    preserved_attrs: list[str] | None = None,
    optimize_numerics: bool = True,
) -> ScriptModule:
    """Return a copy whose weights, children and attributes are constants of its code.

    Same as ``torch.jit.freeze``, with modkit's ``ScriptModule``.

    Args:
        mod: Module in evaluation mode.
        preserved_attrs: Attributes and methods to keep. ``forward``, and attributes that a method
            writes to, are always kept.
        optimize_numerics: Also fold batch normalizations, which changes the last bits of results.

    Returns:
        A new module; ``mod`` is not changed.

    Raises:
        RuntimeError: If ``mod`` is not a ScriptModule, or is in training mode.

    Example:
        >>> import torch
        >>> from modkit import jit
        >>> frozen = jit.freeze(jit.script(torch.nn.Linear(4, 2).eval()))
        >>> len(list(frozen.parameters())), frozen(torch.ones(3, 4)).shape
        (0, torch.Size([3, 2]))
    """
    with without_warnings_of_torch():
        frozen: Any = torch.jit.freeze(mod, preserved_attrs, optimize_numerics)
    return cast("ScriptModule", wrap_cpp(frozen._c))


def optimize_for_inference(
    mod: torch.jit.ScriptModule, other_methods: list[str] | None = None
) -> ScriptModule:
    """Freeze a module, unless it is frozen, and optimize it for this machine.

    Same as ``torch.jit.optimize_for_inference``.

    Args:
        mod: The module; it is set to evaluation mode.
        other_methods: Methods to keep beside ``forward``.

    Returns:
        A new module, or ``mod`` itself where torch returns that.

    Raises:
        RuntimeError: If ``mod`` is not a ScriptModule.
    """
    with without_warnings_of_torch():
        result: Any = torch.jit.optimize_for_inference(mod, other_methods)
    return cast("ScriptModule", mod if result is mod else wrap_cpp(result._c))
