"""Operations on modules as objects: cycles, comparison, uses before `__init__`; compiled code, averages."""

import copy
import dataclasses
import functools
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from tests.helpers import freeze
from tests.property import choices, scoped_operations
from tests.property.classes import LOG, plain_text
from tests.property.observation import distinct_modules, observe, positions
from tests.property.operations import Skipped, is_shared, is_tied, operation, refuse_tied_buffers
from tests.property.scoped_calls import has_old_backward_hooks, make_input, result_of
from tests.property.tree_operations import refuse_keys_below_none


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


WALKS: Final = (
    *("modules", "children", "named_modules", "parameters", "named_parameters", "buffers"),
    *("named_buffers", "state_dict", "train", "apply", "double", "zero_grad", "requires_grad_"),
    *("repr", "deepcopy", "pickle", "_apply", "get_submodule", "eval"),
)


def do(module: Any, method: str) -> Any:
    """Use the whole tree below the module; return comparable data."""
    if method == "repr":
        return repr(module)
    if method == "deepcopy":
        return type(copy.deepcopy(module)).__name__
    if method == "pickle":
        return type(pickle.loads(pickle.dumps(module))).__name__
    if method == "get_submodule":
        return type(module.get_submodule("around")).__name__
    arguments = {
        "apply": (lambda visit: LOG.append(type(visit).__name__),),
        "_apply": (torch.Tensor.contiguous,),
        "get_submodule": ("around",),
        "train": (False,),
    }.get(method, ())
    found = getattr(module, method)(*arguments)
    if found is module:
        return True
    if found is None or isinstance(found, dict):
        return found and list(found)
    items = [item[0] if isinstance(item, tuple) else item for item in found]
    return [type(item).__name__ if isinstance(item, torch.nn.Module) else item for item in items]


@operation(choices.sampled_from(WALKS), choices.integers(0, 9))
def in_cycle(side: Any, module: Any, method: str, number: int) -> Any:
    """Make the module its own descendant temporarily, and use it."""
    inner = positions(module)
    parent = inner[number % len(inner)][1]
    if hasattr(parent, "around"):
        raise Skipped
    refuse_tied_buffers(side)
    if method == "state_dict" and any(place._state_dict_hooks for _, place in inner):
        raise Skipped  # in torch they would log the whole state at each level: gigabytes
    parent._modules["around"] = module
    try:
        return do(module, method)
    except RecursionError as error:
        # Where Python notices, and how often an override was called until then, is chance.
        LOG.clear()
        text = re.sub("(exceeded) (while|in) .*", r"\1", str(error))
        raise RecursionError(text) from None
    finally:
        parent._modules.pop("around", None)


@operation(choices.booleans())
def is_freed(side: Any, module: Any, called: bool) -> Any:
    """Return True if a copy of the tree is freed without the cyclic collector."""
    copied = copy.deepcopy(side.model)
    if called:
        with torch.no_grad():
            copied(torch.ones(2, 3))
    LOG.clear()
    last = weakref.ref(copied)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        del copied
        return last() is None
    finally:
        if was_enabled:
            gc.enable()


@operation(
    choices.sampled_from(["eq", "hash", "frozen", "plain"]),
    choices.integers(1, 2),
    choices.sampled_from(WALKS),
    choices.just(False),
)
def among_data_classes(
    side: Any, module: Any, kind: str, width: int, method: str, by_identity: bool
) -> Any:
    """Put two dataclasses, which may compare equal, below a module, and use it."""
    options: dict[str, Any] = {
        "eq": {},
        "hash": {"unsafe_hash": True},
        "frozen": {"frozen": True},
        "plain": {"eq": False},
    }[kind]

    @dataclasses.dataclass(**options)
    class Data(side.impl.Module):
        width: int = 1

        def __post_init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(self.width))

        def forward(self, x: Any) -> Any:
            return x

    refuse_tied_buffers(side)
    if by_identity:
        Data.__eq__, Data.__hash__ = object.__eq__, object.__hash__
    if hasattr(module, "first") or hasattr(module, "second"):
        raise Skipped
    try:
        module._modules["first"] = Data(1)
        module._modules["second"] = Data(width)
        return do(module, method)
    finally:
        module._modules.pop("first", None)
        module._modules.pop("second", None)


@operation(choices.integers(0, 9), choices.booleans(), choices.booleans())
def tie_buffer(side: Any, module: Any, number: int, persistent: bool, everywhere: bool) -> Any:
    """Register a parameter's values, or a new tensor, as a buffer."""
    parameters = [p for p in module._parameters.values() if p is not None]
    if not parameters:
        raise Skipped
    source = parameters[number % len(parameters)].detach()
    module.register_buffer("view", source if everywhere else source.clone(), persistent=persistent)
    return list(module._buffers)


@operation(choices.integers(0, 9), choices.sampled_from(["a", "view", "mean"]))
def share_buffer(side: Any, module: Any, number: int, name: str) -> Any:
    """Register a buffer of the tree in a second place."""
    buffers = [b for _, place in positions(side.model) for b in place._buffers.values()]
    if not buffers:
        raise Skipped
    module.register_buffer(name, buffers[number % len(buffers)])
    return list(module._buffers)


@operation(choices.sampled_from(["meta", "cpu"]), choices.booleans())
def to_empty(side: Any, module: Any, device: str, recurse: bool) -> Any:
    """Call `to_empty()` on a copy of the tree, without ties, which torch does not keep."""
    refuse_tied_buffers(side)
    if is_tied(side) or is_shared(side):
        raise Skipped
    copied = copy.deepcopy(side.model)
    return copied.to_empty(device=device, recurse=recurse) is copied, observe(copied)


# Operations that modkit's own methods take part in; the others are torch's.
USES: Final[dict[str, Callable[[Any], Any]]] = {
    "assign parameter": lambda made: setattr(made, "a", torch.nn.Parameter(torch.ones(1))),
    "register parameter": lambda made: made.register_parameter("a", None),
    "register module": lambda made: made.add_module("a", None),
    "double": lambda made: made.double(),
    "to": lambda made: made.to("cpu"),
    "apply": lambda made: made.apply(str),
    "load_state_dict": lambda made: made.load_state_dict({}),
    "modules": lambda made: len([*made.modules()]),
    "parameters": lambda made: [*made.parameters()],
    "named_modules": lambda made: len([*made.named_modules()]),
    "requires_grad_": lambda made: made.requires_grad_(),
    "set_submodule": lambda made: made.set_submodule("a", torch.nn.Tanh()),
}


@operation(choices.lists(choices.sampled_from(sorted(USES)), min_size=1, max_size=3))
def use_without_init(side: Any, module: Any, uses: list[str]) -> Any:
    """Use a module of the same class whose `__init__` has not run."""
    made = type(module).__new__(type(module))
    found = [result_or_error(lambda use=use: USES[use](made)) for use in uses]
    # Which methods are called before the first error is not compared.
    LOG.clear()
    return found, sorted(made.__dict__)


@operation(*scoped_operations.LOADING)
def load_in_place(side: Any, module: Any, *arguments: Any) -> Any:
    """Load a state that fits into the tree itself; a failing load leaves torch's tree partly loaded."""
    refuse_keys_below_none(side)
    copied = copy.deepcopy(module)
    try:
        scoped_operations.load_in_place(side, copied, *arguments)
    except Exception:
        raise Skipped from None
    finally:
        LOG.clear()
    return scoped_operations.load_in_place(side, module, *arguments)


FUNCTIONS: Final = ("default", "ema", "swa", "multi ema", "multi swa")


def silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the calls of the average, since torch's walks the tree differently."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        try:
            return function(*args)
        finally:
            LOG.clear()

    return wrapper


def members(model: Any) -> list[Any]:
    """List names, shapes, dtypes and ties of the parameters and buffers."""
    seen: dict[int, int] = {}
    named = [*model.named_parameters(remove_duplicate=False)]
    named += model.named_buffers(remove_duplicate=False)
    return [
        (name, None if is_lazy(t) else t.shape, t.dtype, seen.setdefault(id(t), len(seen)))
        for name, t in named
    ]


@operation(choices.sampled_from(FUNCTIONS), choices.booleans())
@silent
def make_averaged_model(side: Any, module: Any, function: str, use_buffers: bool) -> list[Any]:
    """Average the tree with one of the library's functions."""
    utils = side.impl.swa_utils
    attributes = (v for module in distinct_modules(side.model) for v in module.__dict__.values())
    tensors = [*side.model.parameters(), *side.model.buffers()]
    tensors += [value for value in attributes if isinstance(value, torch.Tensor)]
    if any(is_lazy(tensor) or not tensor.is_leaf for tensor in tensors):
        raise Skipped
    options: dict[str, Any] = {
        "default": {},
        "ema": {"avg_fn": utils.get_ema_avg_fn(0.5)},
        "swa": {"avg_fn": utils.get_swa_avg_fn()},
        "multi ema": {"multi_avg_fn": utils.get_ema_multi_avg_fn(0.5)},
        "multi swa": {"multi_avg_fn": utils.get_swa_multi_avg_fn()},
    }[function]
    floating = all(b.is_floating_point() for b in side.model.buffers())
    averaged = utils.AveragedModel(side.model, use_buffers=use_buffers and floating, **options)
    side.averages[:] = [averaged]
    return observe(averaged.module)


@operation(
    choices.sampled_from(["update", "update", "update", "call", "state", "load", "copy", "pickle"])
)
@silent
def use_averaged_model(side: Any, module: Any, method: str) -> Any:
    if not side.averages:
        raise Skipped
    averaged = side.averages[0]
    if method == "update":
        # Torch's average cannot be updated twice without parameters, a listed difference.
        if not [*side.model.parameters()] or members(side.model) != members(averaged.module):
            raise Skipped
        averaged.update_parameters(side.model)
    elif method == "call":
        with torch.no_grad():
            return averaged(torch.ones(2, 3))
    elif method == "state":
        return averaged.state_dict()
    elif method == "load":
        return repr(averaged.load_state_dict(averaged.state_dict()))
    elif method == "copy":
        side.averages[0] = averaged = copy.deepcopy(averaged)
    elif averaged.avg_fn is not None or averaged.multi_avg_fn is not None:
        raise Skipped
    else:
        side.averages[0] = averaged = pickle.loads(pickle.dumps(averaged))
    return averaged.n_averaged, observe(averaged.module)


@operation(choices.booleans())
def state_of_average(side: Any, module: Any, load: bool) -> Any:
    """Save the state of an EMA, perhaps to load it again."""
    if side.ema is None:
        raise Skipped
    state = side.ema.state_dict()
    if load:
        side.ema.load_state_dict(copy.deepcopy(state))
    return sorted(state)
