"""``script``, ``trace``, ``interface`` and ``freeze``: torch's compiler, with modkit's ScriptModule."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast, overload

import torch

from modkit.jit._attributes import as_script_class
from modkit.jit._from_torch import WRAPPERS, make_parameters, wrap_cpp, wrap_torch
from modkit.jit._script_module import ScriptModule
from modkit.jit._upstream import (
    ENABLED,
    class_definition,
    compile_interface,
    create_script_module,
    freeze_module,
    give_notice,
    methods_to_compile,
    names_of_frame,
    optimize_for_inference as optimize,
    optimize_frozen_graph,
    prepare_scriptable,
    qualified_name,
    script_anything,
    trace_anything,
    trace_module_anything,
    without_warnings_of_torch,
)
from modkit.nn.module import Module


ClassT = TypeVar("ClassT", bound=type)

# The bases that make an interface one of modules.
_TORCH_MODULE: Final[list[type]] = [torch.nn.Module]
_MODKIT_MODULE: Final[list[type]] = [Module, torch.nn.Module]


def _finish(result: Any, source: Any) -> Any:
    """Return modkit's wrapper of a new module, and what the compiler was given as it is."""
    if type(result) not in WRAPPERS or result is source:
        return as_script_class(result)
    module = wrap_torch(result, source if isinstance(source, torch.nn.Module) else None)
    make_parameters(module)
    return module


@overload
def script(
    obj: torch.nn.Module,
    optimize: None = None,
    _frames_up: int = 0,
    _rcb: Callable[[str], Any] | None = None,
    example_inputs: Any = None,
) -> ScriptModule: ...
@overload
def script(
    obj: Any,
    optimize: None = None,
    _frames_up: int = 0,
    _rcb: Callable[[str], Any] | None = None,
    example_inputs: Any = None,
) -> Any: ...
def script(
    obj: Any,
    optimize: None = None,
    _frames_up: int = 0,
    _rcb: Callable[[str], Any] | None = None,
    example_inputs: Any = None,
) -> Any:
    """Compile a module, function, class, or object of a class; wrap a list or dict.

    Args:
        obj: The object to compile. A compiled object is returned as it is.
        optimize: No effect.
        example_inputs: Arguments to run it with first, to infer types that are not annotated.
            Requires the package MonkeyType.

    Returns:
        For a module a ``ScriptModule`` that shares its parameters. Modules of torch and of modkit
        may be mixed in it.

    Raises:
        RuntimeError: The code uses Python that TorchScript does not support.

    Example:
        >>> import torch
        >>> from modkit import jit
        >>> @jit.script
        ... def larger(a, b):
        ...     if a.sum() > b.sum():
        ...         return a
        ...     return b
        >>> larger(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])

    Same as ``torch.jit.script``.
    """
    give_notice()
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

    Args:
        func: The module or function.
        example_inputs: The arguments of the run: a tuple, or one tensor.
        optimize: No effect.
        check_trace: Run the function and the trace on the same inputs, and warn if they differ.
        check_inputs: Further arguments for the check.
        check_tolerance: Largest accepted difference.
        strict: Refuse lists and dicts as results.
        example_kwarg_inputs: Keyword arguments, in place of ``example_inputs``.

    Returns:
        A ``ScriptModule`` for a module, a ``ScriptFunction`` for a function.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> jit.trace(nn.Linear(4, 2), torch.ones(1, 4))(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    Same as ``torch.jit.trace``.
    """
    give_notice()
    if not ENABLED:
        return func
    checks = (optimize, check_trace, check_inputs, check_tolerance, strict)
    options: dict[str, Any] = {"_store_inputs": _store_inputs}
    if _compilation_unit is not None:
        options["_compilation_unit"] = _compilation_unit
    with without_warnings_of_torch():
        result = trace_anything(
            func,
            example_inputs,
            *checks,
            _force_outplace,
            _module_class,
            example_kwarg_inputs=example_kwarg_inputs,
            **options,
        )
    return _finish(result, getattr(func, "__self__", func))


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
    """Trace several methods of a module.

    Args:
        mod: The module.
        inputs: The arguments of each method, by its name.
        optimize: No effect.
        check_trace: Run the methods and their traces on the same inputs, and warn if they differ.
        check_inputs: Further arguments for the check, in dicts like ``inputs``.
        check_tolerance: Largest accepted difference.
        strict: Refuse lists and dicts as results.
        example_inputs_is_kwarg: True if the arguments of each method are a dict of keywords.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> jit.trace_module(nn.Linear(4, 2), {"forward": torch.ones(1, 4)})(torch.ones(4)).shape
        torch.Size([2])

    Same as ``torch.jit.trace_module``.
    """
    give_notice()
    if not ENABLED:
        return cast("ScriptModule", mod)
    checks = (optimize, check_trace, check_inputs, check_tolerance, strict)
    options: dict[str, Any] = {"example_inputs_is_kwarg": example_inputs_is_kwarg}
    if _compilation_unit is not None:
        options["_compilation_unit"] = _compilation_unit
    options["_store_inputs"] = _store_inputs
    with without_warnings_of_torch():
        result = trace_module_anything(
            mod, inputs, *checks, _force_outplace, _module_class, **options
        )
    return cast("ScriptModule", _finish(result, mod))


def interface(obj: ClassT) -> ClassT:
    """Compile a class to an interface: a type for all modules, or classes, with its methods.

    Args:
        obj: A class without bases, or with the one base ``torch.nn.Module`` or
            ``modkit.nn.Module``. Its methods have types and no code.

    Raises:
        RuntimeError: ``obj`` is not a class, or has other bases.

    Example::

        @jit.interface
        class Scores(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                pass

    Same as ``torch.jit.interface``.
    """
    give_notice()
    if not isinstance(cast("object", obj), type):
        raise RuntimeError("interface must be applied to a class")  # noqa: TRY004 - torch's type
    bases = [base for base in obj.__mro__[1:] if base is not object]
    of_modules = bases in (_TORCH_MODULE, _MODKIT_MODULE)
    if bases and not of_modules:
        raise RuntimeError(
            "TorchScript interface does not support inheritance yet. "
            "Please directly inherit from 'object' or 'nn.Module'."
        )
    names = names_of_frame(1)
    definition = class_definition(obj, obj.__name__)
    mangled = compile_interface(qualified_name(obj), definition, names, of_modules)
    cast("Any", obj).__torch_script_interface__ = mangled
    return obj


def _require_script(mod: object, what: str) -> None:
    if not isinstance(mod, torch.jit.ScriptModule):
        raise RuntimeError(  # noqa: TRY004 - torch's type
            f"{what} expects a ScriptModule as input. "
            "Please use torch.jit.script or torch.jit.trace to script your 'nn.Module'."
        )


def _freeze(
    mod: torch.jit.ScriptModule, preserved: Sequence[str], optimize_numerics: bool
) -> ScriptModule:
    cpp = cast("Any", mod)._c
    if mod.training:
        raise RuntimeError(
            "Freezing is currently only implemented for modules in eval mode. "
            "Please call .eval() on your module before freezing."
        )
    frozen: Any = freeze_module(cpp, list(preserved))
    methods = ["forward", *(name for name in preserved if cpp._has_method(name))]
    for name in methods:
        if frozen._has_method(name):
            optimize_frozen_graph(frozen._get_method(name).graph, optimize_numerics)
    module: ScriptModule = wrap_cpp(frozen)
    return module


def freeze(
    mod: torch.jit.ScriptModule,
    preserved_attrs: list[str] | None = None,
    optimize_numerics: bool = True,
) -> ScriptModule:
    """Return a copy whose weights, children and attributes are constants of its code.

    Args:
        mod: The module, in evaluation mode.
        preserved_attrs: Attributes and methods to keep. ``forward``, and attributes that a method
            writes to, are always kept.
        optimize_numerics: Also apply optimizations that change the last bits of results, such as
            folding a batch normalization into the convolution before it.

    Raises:
        RuntimeError: ``mod`` is not a ScriptModule, or is in training mode.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> frozen = jit.freeze(jit.script(nn.Linear(4, 2).eval()))
        >>> len(list(frozen.parameters())), frozen(torch.ones(3, 4)).shape
        (0, torch.Size([3, 2]))

    Same as ``torch.jit.freeze``.
    """
    give_notice()
    _require_script(mod, "Freezing")
    return _freeze(mod, preserved_attrs or [], optimize_numerics)


def optimize_for_inference(
    mod: torch.jit.ScriptModule, other_methods: list[str] | None = None
) -> ScriptModule:
    """Freeze a module, if it is not frozen, and optimize it for this machine.

    Args:
        mod: The module; it is set to evaluation mode.
        other_methods: Methods to keep beside ``forward``.

    Raises:
        RuntimeError: ``mod`` is not a ScriptModule.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> fast = jit.optimize_for_inference(jit.script(nn.Linear(4, 2)))
        >>> fast(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    Same as ``torch.jit.optimize_for_inference``.
    """
    give_notice()
    _require_script(mod, "optimize_for_inference")
    methods = other_methods or []
    module = mod
    if hasattr(mod, "training"):
        module = _freeze(mod.eval(), methods, optimize_numerics=True)
    optimize(module._c, methods)
    return cast("ScriptModule", module)
