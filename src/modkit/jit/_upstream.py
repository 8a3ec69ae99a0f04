"""The private parts of ``torch.jit`` that ``modkit.jit`` uses, and the notice of its deprecation.

They are named here and not in ``modkit/_upstream.py``, so that nothing but ``modkit.jit`` depends
on them: the public functions of ``torch.jit`` warn, and later releases of torch may refuse.
``modkit/_upstream.py`` has the releases of torch that they were checked against.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch.jit._script import ScriptMeta as _ScriptMeta


_C: Any = torch._C
_jit: Any = torch.jit
_internal: Any = cast("Any", torch)._jit_internal

# False if the environment variable PYTORCH_JIT is 0.
ENABLED: Final = bool(_jit._state._enabled)

# The C++ object behind a method, and the members of a C++ module.
ScriptMethod: Final = _C.ScriptMethod
ParameterDict: Final = _C.ParameterDict
BufferDict: Final = _C.BufferDict
ModuleDict: Final = _C.ModuleDict
CompilationUnit: Final = _C.CompilationUnit
# The description of a C++ module's type for the compiler.
concrete_type_of: Final = _C.ConcreteModuleType.from_jit_type

# Torch's parameters and buffers of a compiled module, and names that its type information lacks.
TorchTensors: Final[Any] = _jit._script.OrderedDictWrapper
TorchRecursiveScriptModule: Final[Any] = _jit._script.RecursiveScriptModule
TorchTracedModule: Final[Any] = _jit._trace.TracedModule
TorchTopLevelTracedModule: Final[Any] = _jit._trace.TopLevelTracedModule
TorchScriptMeta = _ScriptMeta

# None if this release of torch cannot read TorchScript.
import_module: Final[Any] = getattr(_C, "import_ir_module", None)
import_module_from_buffer: Final[Any] = getattr(_C, "import_ir_module_from_buffer", None)
validate_map_location: Final[Any] = _jit._serialization.validate_map_location

# The compiler behind torch.jit.script and torch.jit.trace, and its rule for which methods to
# compile.
create_script_module: Final = _jit._recursive.create_script_module
methods_to_compile: Final = _jit._recursive.infer_methods_to_compile
prepare_scriptable: Final = _jit._script.call_prepare_scriptable_func
script_anything: Final = _jit._script._script_impl
trace_anything: Final = _jit._trace._trace_impl
trace_module_anything: Final = _jit._trace.trace_module

# Names are looked up in the calling frame, so decorators cannot call torch's.
MethodStub: Final[Any] = _jit._recursive.ScriptMethodStub
compile_interface: Final = _C._jit_script_interface_compile
parse_definition: Final = _C._parse_source_def
class_definition: Final = _jit.frontend.get_jit_class_def
method_definition: Final = _jit.frontend.get_jit_def
qualified_name: Final = _internal._qualified_name
names_of_frame: Final = _internal.createResolutionCallbackFromFrame

# The category of this torch's warnings: ``FutureWarning`` since 2.14.
DEPRECATION: Final[type[Warning]] = (
    FutureWarning if "FutureWarning" in torch.jit.load.__code__.co_names else DeprecationWarning
)

MESSAGE: Final = (
    "TorchScript gets no new features and a later release of torch may drop it: for new work see "
    "torch.export and torch.compile. modkit.jit works until then and warns once in a process."
)

# The first Python for which torch says that TorchScript is not supported.
_UNSUPPORTED: Final = (3, 14)
_given: Final[set[str]] = set()


def give_notice(function: str) -> None:
    """Warn once in a process, with the line that called the public function.

    Filters for torch's warning hold, whether they have its text or its module: a program whose
    other warnings are errors has one, and does not know of modkit.
    """
    if _given:
        return
    # Entered first: where the warning is made an error, the next call works.
    _given.add(MESSAGE)
    module = getattr(_jit, function).__module__
    caller = sys._getframe(2)
    place = caller.f_code.co_filename, caller.f_lineno
    warnings.warn_explicit(message(function), DEPRECATION, *place, module)


def message(function: str) -> str:
    """Return the text of the notice: torch's first words, and what holds for modkit."""
    problem = "is deprecated."
    if sys.version_info >= _UNSUPPORTED:
        problem = "is not supported in Python 3.14+ and may break."
    return f"`torch.jit.{function}` {problem} {MESSAGE}"


@contextmanager
def without_warnings_of_torch() -> Generator[None, None, None]:
    """Silence torch's warnings that TorchScript is deprecated, and no others.

    The compiler calls the public functions, once for each function that it compiles.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)")
        yield
