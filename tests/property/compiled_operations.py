"""Operations that compile or trace modules: `torch.compile` and `torch.fx`."""

import re
from collections.abc import Callable
from typing import Any, Final

import torch

from tests.helpers import freeze
from tests.property import choices
from tests.property.node_tools import LOG, plain_text
from tests.property.observation import distinct_modules
from tests.property.operations import Skipped, operation
from tests.property.scoped_calls import has_old_backward_hooks, make_input, result_of


# Trees of more modules take long to compile.
MOST_MODULES: Final = 6
# Times to call what was compiled: the second call is checked by guards, and may compile again.
TIMES: Final = choices.integers(1, 2)


class Graphs:
    """A backend of `torch.compile` that runs graphs as they are, and keeps their code."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Keep the code of a graph."""
        self.codes.append(graph.code)
        return graph.forward


def plain_error(error: Exception) -> RuntimeError:
    """Return an error without the addresses and the source lines that dynamo quotes."""
    text = plain_text(error).partition("\n\nfrom user code")[0]
    return RuntimeError(f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', '0x', text)}")


def result_or_error(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or the text of its exception."""
    try:
        return freeze(function())
    except Exception as error:
        return str(plain_error(error))


def run_compiled(side: Any, compiled: Callable[..., Any], graphs: Graphs, times: int) -> Any:
    """Call what was compiled; return the results, the errors and the code of all graphs."""
    found = [
        result_or_error(lambda: result_of(compiled, make_input(side, "own"), {}))
        for _ in range(times)
    ]
    # Dynamo gives the graphs that it makes ids, which a patched method logs.
    LOG[:] = [re.sub(r"\b\d{12,}\b", "id", repr(entry)) for entry in LOG]
    return found, graphs.codes


def small(side: Any, module: Any) -> Any:
    """Return the root, or the module if the tree takes long to compile; skip what does, too."""
    for target in (side.model, module):
        if len(distinct_modules(target)) <= MOST_MODULES:
            return target
    raise Skipped


@operation(TIMES, choices.booleans())
def call_compiled(side: Any, module: Any, times: int, full: bool) -> Any:
    """Compile the root or a module with `torch.compile`, and call the result."""
    target = small(side, module)
    torch._dynamo.reset()
    graphs = Graphs()
    return run_compiled(side, torch.compile(target, backend=graphs, fullgraph=full), graphs, times)


@operation(TIMES)
def compile_in_place(side: Any, module: Any, times: int) -> Any:
    """Compile a module with its method `compile()`, and call the root or the module."""
    target = small(side, module)
    torch._dynamo.reset()
    graphs = Graphs()
    before = module.__dict__.get("_compiled_call_impl")
    module.compile(backend=graphs)
    try:
        return run_compiled(side, target, graphs, times)
    finally:
        module._compiled_call_impl = before


@operation()
def trace_module(side: Any, module: Any) -> Any:
    """Trace any module with `torch.fx`; return the graph, the code and the names of submodules."""
    if has_old_backward_hooks(module):
        raise Skipped
    # Tracers of one process share their count of constants.
    torch.fx.Tracer._qualname_counter.clear()
    try:
        traced = torch.fx.symbolic_trace(module)
    except Exception as error:
        raise plain_error(error) from error
    return str(traced.graph), traced.code, [name for name, _ in traced.named_modules()]
