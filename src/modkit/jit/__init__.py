"""Drop-in for ``torch.jit``, with modkit's ``ScriptModule``.

Functions that make, write or read modules are modkit's. Every other name is torch's own object: the
compiler knows names such as ``fork`` by identity. Assigning to one assigns that of ``torch.jit``.
"""

# pyright: reportPrivateImportUsage=false

from typing import TYPE_CHECKING

from modkit.jit._save_and_load import load as load, save as save
from modkit.jit._script_module import ScriptModule as ScriptModule, script_method as script_method
from modkit.jit._script_trace_freeze import (
    freeze as freeze,
    interface as interface,
    optimize_for_inference as optimize_for_inference,
    script as script,
    trace as trace,
    trace_module as trace_module,
)


if TYPE_CHECKING:
    from typing import Final as Final

    from torch.jit import (  # type: ignore[attr-defined]
        Attribute as Attribute,
        CompilationUnit as CompilationUnit,
        Error as Error,
        Future as Future,
        ONNXTracedModule as ONNXTracedModule,
        RecursiveScriptClass as RecursiveScriptClass,
        RecursiveScriptModule as RecursiveScriptModule,
        ScriptFunction as ScriptFunction,
        ScriptWarning as ScriptWarning,
        TopLevelTracedModule as TopLevelTracedModule,
        TracedModule as TracedModule,
        TracerWarning as TracerWarning,
        TracingCheckError as TracingCheckError,
        annotate as annotate,
        annotations as annotations,
        enable_onednn_fusion as enable_onednn_fusion,
        export as export,
        export_opnames as export_opnames,
        fork as fork,
        frontend as frontend,
        fuser as fuser,
        ignore as ignore,
        is_scripting as is_scripting,
        is_tracing as is_tracing,
        isinstance as isinstance,  # noqa: A004 - torch's name
        jit_module_from_flatbuffer as jit_module_from_flatbuffer,
        last_executed_optimized_graph as last_executed_optimized_graph,
        mobile as mobile,
        onednn_fusion_enabled as onednn_fusion_enabled,
        optimized_execution as optimized_execution,
        quantized as quantized,
        run_frozen_optimizations as run_frozen_optimizations,
        save_jit_module_to_flatbuffer as save_jit_module_to_flatbuffer,
        script_if_tracing as script_if_tracing,
        set_fusion_strategy as set_fusion_strategy,
        strict_fusion as strict_fusion,
        supported_ops as supported_ops,
        unused as unused,
        wait as wait,
    )
else:
    from modkit._namespace import mirror, publish

    # The names that the imports above have brought in.
    own = {
        name: value
        for name, value in globals().items()
        if getattr(value, "__module__", "").startswith("modkit.jit.")
    }
    publish(__name__, *own.values())
    mirror("modkit.jit", {"modkit.jit": own})
    del mirror, own, publish, TYPE_CHECKING
