"""``torch.jit`` with modkit's ``ScriptModule``.

Every public name of ``torch.jit`` is here. What makes or takes modules is modkit's; what code that
is being compiled may name, such as ``fork`` and ``annotate``, is torch's own object, as the compiler
knows it by that.
"""

# pyright: reportPrivateImportUsage=false

from typing import Final as Final

from torch.jit import (  # type: ignore[attr-defined]
    Attribute as Attribute,
    CompilationUnit as CompilationUnit,
    Error as Error,
    Future as Future,
    ScriptFunction as ScriptFunction,
    TracerWarning as TracerWarning,
    TracingCheckError as TracingCheckError,
    annotate as annotate,
    enable_onednn_fusion as enable_onednn_fusion,
    export as export,
    export_opnames as export_opnames,
    fork as fork,
    fuser as fuser,
    ignore as ignore,
    is_scripting as is_scripting,
    is_tracing as is_tracing,
    isinstance as isinstance,  # noqa: A004 - torch's name
    last_executed_optimized_graph as last_executed_optimized_graph,
    onednn_fusion_enabled as onednn_fusion_enabled,
    optimized_execution as optimized_execution,
    run_frozen_optimizations as run_frozen_optimizations,
    script_if_tracing as script_if_tracing,
    set_fusion_strategy as set_fusion_strategy,
    strict_fusion as strict_fusion,
    unused as unused,
    wait as wait,
)

from modkit.errors import FileError as FileError
from modkit.jit._class_based import script_method as script_method
from modkit.jit.compile import (
    interface as interface,
    script as script,
    trace as trace,
    trace_module as trace_module,
)
from modkit.jit.freezing import freeze as freeze, optimize_for_inference as optimize_for_inference
from modkit.jit.script_module import ScriptModule as ScriptModule
from modkit.jit.serialization import load as load, save as save
