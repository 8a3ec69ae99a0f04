"""``script`` and ``trace``: torch's compiler, giving modkit's class back."""

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast, overload

import torch

from modkit.jit._notice import give_notice, without_warnings_of_torch
from modkit.jit._script_class import as_script_class
from modkit.jit._upstream import (
    ENABLED,
    class_definition,
    compile_interface,
    create_script_module,
    methods_to_compile,
    names_of_frame,
    prepare_scriptable,
    qualified_name,
    script_anything,
    trace_anything,
    trace_module_anything,
)
from modkit.jit._wrap import is_bare, make_parameters, wrap_torch
from modkit.jit.script_module import ScriptModule
from modkit.nn.module import Module


ClassT = TypeVar("ClassT", bound=type)

# The bases that make an interface one of modules.
_TORCH_MODULE: Final[list[type]] = [torch.nn.Module]
_MODKIT_MODULE: Final[list[type]] = [Module, torch.nn.Module]


def _finish(result: Any, source: Any) -> Any:
    """Return modkit's class for what the compiler gives, all that is no module unchanged."""
    if not is_bare(result):
        return as_script_class(result)
    origin = source if isinstance(source, torch.nn.Module) and source is not result else None
    module = wrap_torch(ScriptModule, result, origin)
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
        obj: What to compile. What is compiled already is returned as it is; a ScriptModule that
            torch has made becomes modkit's, around the same C++ module.
        optimize: Has no effect any more.
        example_inputs: Arguments to run it with first, to find types that are not annotated; this
            takes the package MonkeyType.

    Returns:
        For a module a ``ScriptModule``, whose parameters are those of the module. Networks of torch
        and of modkit may be mixed in it.

    Raises:
        RuntimeError: TorchScript has no such thing as something in the code.

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
        optimize: Has no effect any more.
        check_trace: Run both on the same inputs, and warn where they differ.
        check_inputs: Further arguments for that.
        check_tolerance: The largest difference that is none.
        strict: Refuse lists and dicts as results, which may change later.
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
        optimize: Has no effect any more.
        check_trace: As in ``trace``, and so are the next three.
        check_inputs: Further arguments, in dicts like ``inputs``.
        check_tolerance: The largest difference that is none.
        strict: Refuse lists and dicts as results.
        example_inputs_is_kwarg: The arguments of each method are a dict of keywords.

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
    """Make of a class an interface: a type for all modules, or classes, that have its methods.

    Args:
        obj: A class that is derived from nothing, or from ``torch.nn.Module`` or
            ``modkit.nn.Module`` alone. Its methods have types and no code.

    Raises:
        RuntimeError: it is no class, or derived from something else.

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
