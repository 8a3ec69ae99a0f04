"""Operations on modules as objects: cycles, comparison, copies, odd names; compiled code and averages."""

import copy
import dataclasses
import functools
import gc
import io
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
from tests.property.tree_operations import forward_and_backward, refuse_keys_below_none


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
def keep_owner(side: Any, module: Any, wrapped: bool) -> None:
    """Let a module refer to the root, which makes a reference cycle."""
    module.__dict__["owner"] = [side.model] if wrapped else weakref.ref(module)
    if not wrapped:
        del module.__dict__["owner"]


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


@operation(choices.integers(0, 9), choices.sampled_from(["deepcopy", "pickle", "copy", "reduce"]))
def copy_piece(side: Any, module: Any, number: int, route: str) -> Any:
    """Replace a child by a copy."""
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    if not children:
        raise Skipped
    name, child = children[number % len(children)]
    if route == "pickle":
        copied = pickle.loads(pickle.dumps(child, protocol=2 + number % 4))
    elif route == "reduce":
        make, arguments, state, *_ = child.__reduce_ex__(2)
        copied = make(*arguments)
        if hasattr(copied, "__setstate__"):
            copied.__setstate__(state)
    else:
        copied = getattr(copy, route)(child)
    setattr(module, name, copied)
    return list(copied.__dict__)


@operation()
def share_memory(side: Any, module: Any) -> Any:
    """Move all tensors to shared memory."""
    refuse_tied_buffers(side)
    small = sum(tensor.numel() for tensor in module.parameters()) < 50
    if not small:
        raise Skipped
    return module.share_memory() is module, [p.is_shared() for p in module.parameters()]


ODD: Final = choices.sampled_from(
    [
        *("training", "_version", "dump_patches", "call_super_init", "T_destination", "__doc__"),
        *("_compiled_call_impl", "__annotations__", "_forward_module", "a-b", "0x", "None", "self"),
        *("__len__", "_is_full_backward_hook", "qconfig", "_non_persistent", "__name__", "shape"),
        *("_backward_hook", "named_parameter", "__custom__", "_", "__", "zero_grad ", "\n"),
    ]
)


@operation(ODD, choices.sampled_from([None, 3, "text", 1.5, (1, 2), [1], {"a": 1}, True]))
def set_odd_name(side: Any, module: Any, name: str, value: Any) -> None:
    """Set a plain attribute of an unusual name."""
    setattr(module, name, value)


@operation(ODD)
def delete_odd_name(side: Any, module: Any, name: str) -> None:
    """Delete an attribute of an unusual name."""
    delattr(module, name)


@operation(ODD)
def read_odd_name(side: Any, module: Any, name: str) -> Any:
    """Read an attribute of an unusual name."""
    value = getattr(module, name, "missing")
    return type(value).__name__ if callable(value) or name == "__doc__" else value


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


@operation(choices.booleans(), choices.booleans())
def save_file(side: Any, module: Any, weights_only: bool, load: bool) -> Any:
    """Save the tree's state with `torch.save` and load it again."""
    file = io.BytesIO()
    torch.save(side.model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=weights_only)
    if load:
        return list(copy.deepcopy(side.model).load_state_dict(state)[0])
    return list(state), dict(state._metadata)


@operation(choices.sampled_from(["meta", "cpu"]), choices.booleans())
def to_empty(side: Any, module: Any, device: str, recurse: bool) -> Any:
    """Call `to_empty()` on a copy of the tree, without ties, which torch does not keep."""
    refuse_tied_buffers(side)
    if is_tied(side) or is_shared(side):
        raise Skipped
    copied = copy.deepcopy(side.model)
    return copied.to_empty(device=device, recurse=recurse) is copied, observe(copied)


@operation(choices.booleans(), choices.sampled_from(["strict", "tie", "plain"]))
def functional_call(side: Any, module: Any, buffers: bool, how: str) -> Any:
    """Call the root with other values by `functional_call`; its own must be restored."""
    values = {name: p.detach() * 2 for name, p in side.model.named_parameters()}
    if buffers:
        values.update({name: b.detach() for name, b in side.model.named_buffers()})
    x = torch.ones(2, 3)
    found = torch.func.functional_call(
        side.model, values, (x,), strict=how == "strict", tie_weights=how != "tie"
    )
    return found, len(observe(side.model))


RESERVED: Final = choices.sampled_from(
    ["training", "training", "_compiled_call_impl", "call_super_init", "dump_patches", "_version"]
)


@operation(RESERVED, choices.sampled_from(["parameter", "buffer", "module"]), choices.booleans())
def assign_reserved(side: Any, module: Any, name: str, kind: str, register: bool) -> None:
    """Assign or register a member under a name of the module's own state."""
    value: Any = side.impl.nn.Tanh()
    if kind != "module":
        value = torch.ones(1)
    if kind == "parameter":
        value = side.impl.nn.Parameter(value)
    if register:
        getattr(module, "add_module" if kind == "module" else f"register_{kind}")(name, value)
    elif kind == "buffer":
        setattr(module, name, side.impl.nn.Buffer(value))
    else:
        setattr(module, name, value)


USES: Final[dict[str, Callable[[Any], Any]]] = {
    "call": lambda made: made(torch.ones(2, 3)),
    "assign parameter": lambda made: setattr(made, "a", torch.nn.Parameter(torch.ones(1))),
    "assign buffer": lambda made: setattr(made, "a", torch.nn.Buffer(torch.ones(1))),
    "assign tensor": lambda made: setattr(made, "a", torch.ones(1)),
    "assign module": lambda made: setattr(made, "a", torch.nn.Tanh()),
    "assign plain": lambda made: setattr(made, "a", 3),
    "delete": lambda made: delattr(made, "a"),
    "read": lambda made: made.a,
    "dir": dir,
    "repr": repr,
    "register parameter": lambda made: made.register_parameter("a", None),
    "register buffer": lambda made: made.register_buffer("a", None),
    "register module": lambda made: made.add_module("a", None),
    "train": lambda made: made.train(),
    "double": lambda made: made.double(),
    "to": lambda made: made.to("cpu"),
    "apply": lambda made: made.apply(str),
    "state_dict": lambda made: made.state_dict(),
    "load_state_dict": lambda made: made.load_state_dict({}),
    "modules": lambda made: len([*made.modules()]),
    "children": lambda made: [*made.children()],
    "parameters": lambda made: [*made.parameters()],
    "named_modules": lambda made: len([*made.named_modules()]),
    "named_parameters": lambda made: [*made.named_parameters()],
    "named_buffers": lambda made: [*made.named_buffers()],
    "requires_grad_": lambda made: made.requires_grad_(),
    "zero_grad": lambda made: made.zero_grad(),
    "hook": lambda made: made.register_forward_hook(print),
    "backward hook": lambda made: made.register_full_backward_hook(print),
    "copy": lambda made: vars(copy.copy(made)),
    "deepcopy": lambda made: vars(copy.deepcopy(made)),
    "pickle": lambda made: vars(pickle.loads(pickle.dumps(made))),
    "get_submodule": lambda made: made.get_submodule("a"),
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


@operation(choices.integers(0, 9), choices.sampled_from(["__init__", "__setstate__", "update"]))
def again(side: Any, module: Any, number: int, how: str) -> Any:
    """Initialize a module again, or give it its own state again."""
    if how == "__init__":
        other = type(module)
        if other.__name__ not in {"Node", "Counting", "LoraBehind", "PlainBefore"}:
            raise Skipped
        module.__init__()
    elif how == "__setstate__":
        module.__setstate__(dict(module.__dict__))
    else:
        copied = type(module).__new__(type(module))
        copied.__dict__.update(module.__dict__)
        return freeze(sorted(copied.__dict__)), list(copied._parameters)
    return list(module.__dict__)


@operation(choices.sampled_from(["error", "type", "attribute", "key"]), choices.booleans())
def forward_that_fails(side: Any, module: Any, kind: str, late: bool) -> Any:
    """Call the tree with a forward that raises."""
    errors = {"error": ValueError, "type": TypeError, "attribute": AttributeError, "key": KeyError}
    inner = module.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if late:
            inner(*args, **kwargs)
        raise errors[kind]("in forward")

    own = module.__dict__.get("forward")
    module.forward = failing
    try:
        return forward_and_backward(side, torch.float32, {})
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own


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
