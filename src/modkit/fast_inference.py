"""Eager inference with less Python around each operation: ``fast_inference``.

Inside the block, three things change in the ``__dict__`` of the modules, and nothing else:

- Parameters, buffers and child modules also stand in ``__dict__``, so that ``self.weight`` is a plain
  attribute. Torch finds members in ``Module.__getattr__``, which takes 0.6 µs each time. The tables of
  members are replaced by ``_Table``, which writes every change through.
- Torch's layers get a ``_compiled_call_impl``, the function that torch calls in place of the hooks and
  ``forward``. It first checks that no hook, patch or override is to be heard; otherwise it calls
  ``_call_impl``, which is what torch does without it.
- Containers like ``Sequential`` get one function for their run of layers.

These functions are generated: each check and each operation of a run of layers is one line, with no call
in between. What a layer computes is taken from the source of its own ``forward``, or from ``_LAYERS``, and
every attribute is read at each call. Copies and pickles that are made inside have none of this.
"""

import ast
import inspect
import re
import textwrap
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's layers call it so

from modkit._upstream import (
    cudnn_is_enabled,
    has_torch_function,
    jit_trace,
    module_globals,
    original_methods,
)


ModuleT = TypeVar("ModuleT", bound=nn.Module)
State = dict[str, Any]

_CALL: Final = original_methods["__call__"]
_CALL_IMPL: Final = original_methods["_call_impl"]
_GETATTR: Final = original_methods["__getattr__"]
_CALL_SLOT: Final = "_compiled_call_impl"
# As in ``Module.__getattr__``: a parameter hides a buffer of its name, and that a module.
_TABLES: Final = ("_modules", "_buffers", "_parameters")
# A chain of more layers than this is cut in two: the time to compile its function grows.
_LONGEST_RUN: Final = 24


# --- what a layer computes ----------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """The computation of a class of layers, as source in which ``self.name`` is an attribute.

    Args:
        expression: The result for the arguments.
        condition: What must hold of the attributes, or torch's own path is taken.
        input_condition: What must hold of the input ``x``, or torch's own path is taken.
        functions: The names in ``torch.nn.functional`` that the expression does without.
        methods: The names of methods that it does without.
    """

    expression: str
    condition: str = ""
    input_condition: str = ""
    functions: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of the attributes."""
        texts = (self.condition, self.expression, self.input_condition)
        return list(dict.fromkeys(re.findall(r"\bself\.(\w+)", " ".join(texts))))


def _convolution(dimensions: int) -> _Layer:
    return _Layer(
        f"F.conv{dimensions}d(x, self.weight, self.bias, self.stride, self.padding, self.dilation,"
        " self.groups)",
        condition="self.padding_mode == 'zeros'",
        methods=("_conv_forward",),
    )


def _transposed_convolution(dimensions: int) -> _Layer:
    return _Layer(
        f"F.conv_transpose{dimensions}d(x, self.weight, self.bias, self.stride, self.padding,"
        " self.output_padding, self.groups, self.dilation)",
        condition="output_size is None and self.padding_mode == 'zeros' and type(self.padding) is tuple"
        " and type(self.output_padding) is tuple",
        methods=("_output_padding",),
    )


def _batch_norm(input_condition: str) -> _Layer:
    return _Layer(
        "torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, False,"
        " 0.0 if self.momentum is None else self.momentum, self.eps, cudnn)",
        condition="not self.training and self.running_mean is not None"
        " and self.running_var is not None and self.eps >= 0.0",
        input_condition=input_condition,
        functions=("batch_norm",),
        methods=("_check_input_dim",),
    )


def _instance_norm(dimensions: int) -> _Layer:
    return _Layer(
        "F.instance_norm(x, self.running_mean, self.running_var, self.weight, self.bias,"
        " self.training or not self.track_running_stats,"
        " 0.0 if self.momentum is None else self.momentum, self.eps)",
        input_condition=f"x.dim() == {dimensions + 2} and x.size(1) == self.num_features",
        methods=("_check_input_dim", "_get_no_batch_dim", "_apply_instance_norm"),
    )


# Layers whose ``forward`` is more than one expression, or calls a function in Python that can be skipped.
_LAYERS: Final[dict[type[nn.Module], _Layer]] = {
    nn.Conv1d: _convolution(1),
    nn.Conv2d: _convolution(2),
    nn.Conv3d: _convolution(3),
    nn.ConvTranspose1d: _transposed_convolution(1),
    nn.ConvTranspose2d: _transposed_convolution(2),
    nn.ConvTranspose3d: _transposed_convolution(3),
    nn.BatchNorm1d: _batch_norm("2 <= x.dim() <= 3"),
    nn.BatchNorm2d: _batch_norm("x.dim() == 4"),
    nn.BatchNorm3d: _batch_norm("x.dim() == 5"),
    nn.InstanceNorm1d: _instance_norm(1),
    nn.InstanceNorm2d: _instance_norm(2),
    nn.InstanceNorm3d: _instance_norm(3),
    nn.LayerNorm: _Layer(
        "torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, cudnn)",
        functions=("layer_norm",),
    ),
    nn.GroupNorm: _Layer(
        "torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, cudnn)",
        # The function refuses a single value per channel, which more values than these exclude.
        input_condition="x.dim() >= 2 and x.numel() > 2 * self.num_groups",
        functions=("group_norm",),
    ),
    nn.Embedding: _Layer(
        "torch.embedding(self.weight, x, -1, self.scale_grad_by_freq, self.sparse)",
        condition="self.padding_idx is None and self.max_norm is None",
        functions=("embedding",),
    ),
    nn.ReLU: _Layer("torch.relu_(x) if self.inplace else torch.relu(x)", functions=("relu",)),
    nn.SiLU: _Layer(
        "torch._C._nn.silu_(x) if self.inplace else torch._C._nn.silu(x)", functions=("silu",)
    ),
    nn.Softmax: _Layer(
        "x.softmax(self.dim)", condition="self.dim is not None", functions=("softmax",)
    ),
    nn.Dropout: _Layer(
        "x",
        condition="not self.training and 0.0 <= self.p <= 1.0",
        functions=("dropout",),
    ),
}


def _is_of_torch(function: object) -> bool:
    """Return True if a function is written in ``torch.nn``, and not a wrapper that someone put there."""
    code = getattr(function, "__code__", None)
    own = nn.__path__[0]
    return (
        code is not None
        and code.co_filename.startswith(own)
        and not hasattr(function, "__wrapped__")
    )


_FUNCTIONS: Final = {
    name: getattr(F, name) for layer in _LAYERS.values() for name in layer.functions
}


class _Kind(NamedTuple):
    """What modules of a class compute, and the functions that this was read from.

    Args:
        layer: The computation.
        signature: The arguments of ``forward`` with their defaults, as source.
        forward: The function ``forward``.
        methods: The other functions of the class that it does without.
    """

    layer: _Layer
    signature: str
    forward: FunctionType
    methods: tuple[tuple[str, FunctionType], ...]

    @property
    def arguments(self) -> str:
        """The names of the arguments, as source."""
        return re.sub(r"=[^,]*", "", self.signature)


@lru_cache(maxsize=None)
def _derived(forward: FunctionType) -> _Layer | None:
    """Read what a layer computes from the source of its ``forward``, where that is one expression."""
    try:
        definition: Any = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, SyntaxError):
        return None
    *before, last = definition.body
    strings = all(
        isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in before
    )
    if not strings or not isinstance(last, ast.Return) or last.value is None:
        return None
    itself, first, *others = (argument.arg for argument in definition.args.args)
    known = {
        itself: "self",
        first: "x",
        **{name: name for name in (*others, "F", "torch", "float")},
    }
    for node in ast.walk(last.value):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(f"{itself}."):
            return None
        if isinstance(node, ast.Name):
            if node.id not in known:
                return None
            node.id = known[node.id]
    return _Layer(ast.unparse(last.value))


@lru_cache(maxsize=1024)
def _kind(kind: type[nn.Module]) -> _Kind | None:
    """Return what modules of a class compute, or None to take torch's own path."""
    forward: Any = kind.forward
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    if owner is nn.Module or not _is_of_torch(forward) or not _is_standard(kind):
        return None
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if not parameters or any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in parameters):
        return None
    # BatchNorm2d inherits ``forward``, so the class of the table need not be its owner.
    known: Any = next((base for base in kind.__mro__ if base in _LAYERS), None)
    layer = _LAYERS[known] if known is not None and known.forward is forward else _derived(forward)
    if layer is None or any(hasattr(kind, name) for name in layer.names):
        return None
    methods = tuple((name, getattr(kind, name)) for name in layer.methods)
    if not all(_is_of_torch(value) and value is getattr(known, name) for name, value in methods):
        return None
    if not all(_is_of_torch(_FUNCTIONS[name]) for name in layer.functions):
        return None
    signature = ", ".join(
        one.name if one.default is one.empty else f"{one.name}={one.default!r}"
        for one in parameters
    )
    return _Kind(layer, signature, forward, methods)


def _is_standard(kind: type[nn.Module]) -> bool:
    """Return True if modules of a class are called, and their members found, as torch does it."""
    return (
        kind.__call__ is _CALL
        and kind._call_impl is _CALL_IMPL
        and kind.__getattr__ is _GETATTR
        and kind.__getattribute__ is object.__getattribute__
    )


def _is_container(kind: type[nn.Module]) -> bool:
    """Return True if modules of a class pass their input through their children, one after the other."""
    return (
        kind.forward is nn.Sequential.forward
        and kind.__iter__ is nn.Sequential.__iter__  # type: ignore[attr-defined]
        and _is_of_torch(kind.forward)
        and _is_standard(kind)
    )


# --- the functions that are called in place of hooks and forward --------------------------------------------

_NAMESPACE: Final[dict[str, Any]] = {
    "F": F,
    "torch": torch,
    "hooks": module_globals,
    "jit_trace": jit_trace,
    "cudnn_is_enabled": cudnn_is_enabled,
    "is_grad_enabled": torch.is_grad_enabled,
    "has_torch_function": has_torch_function,
    "CALL": _CALL,
    "CALL_IMPL": _CALL_IMPL,
    **{f"{name}_of_torch": function for name, function in _FUNCTIONS.items()},
}

# Attributes that may be of a subclass of Tensor, whose ``__torch_function__`` sees what layers call.
_TENSORS: Final = frozenset({"weight", "bias", "running_mean", "running_var"})

_SOURCE: Final = """
def make(plain, run, {parameters}):
    def forward(self, {signature}):
        try:
            {loads}
            if (
                {checks}
            ):
                return plain({arguments})
        except KeyError:
            return plain({arguments})
        {steps}
    return forward
"""


class _Step(NamedTuple):
    """A layer of a run, or a container whose layers follow: then ``kind`` is None."""

    module: nn.Module
    kind: _Kind | None


@lru_cache(maxsize=1024)
def _maker(shape: tuple[tuple[_Kind | None, int], ...], runs: bool) -> Callable[..., Any]:
    """Write and compile what makes the function of a run of layers.

    Args:
        shape: What each step computes, None for a container, and the number of its class.
        runs: Whether ``run`` computes the result, as in containers of modules that are no layers.
    """
    alone = len(shape) == 1
    first = shape[0][0]
    signature, arguments = (first.signature, first.arguments) if first else ("input", "input")
    loads = [] if arguments.startswith("x") else [f"x = {arguments.partition(',')[0]}"]
    checks = [
        "hooks._global_forward_hooks or hooks._global_forward_pre_hooks",
        "jit_trace._trace_module_map is not None",
    ]
    # Without gradients these have no effect, so a long run need not look at each.
    backward = ["hooks._global_backward_hooks or hooks._global_backward_pre_hooks"]
    steps: list[str] = []
    tensors = ["x"]
    parameters: list[str] = []
    for number in dict.fromkeys(number for _, number in shape):
        parameters += [f"k{number}", f"f{number}"]
        checks.append(
            f"k{number}._call_impl is not CALL_IMPL or k{number}.forward is not f{number}"
        )
        if not alone:  # what is called on its own has been called by it
            checks.append(f"k{number}.__call__ is not CALL")
    for i, (kind, number) in enumerate(shape):
        parameters += [f"m{i}", f"d{i}"]
        checks.append(f"d{i}['_forward_hooks'] or d{i}['_forward_pre_hooks']")
        backward.append(f"d{i}['_backward_hooks'] or d{i}['_backward_pre_hooks']")
        checks.append(f"type(m{i}) is not k{number} or 'forward' in d{i} or '_call_impl' in d{i}")
        if kind is None:
            parameters.append(f"t{i}")
            checks.append(f"d{i}['_modules'] is not t{i} or t{i}.changed")
            continue
        layer = kind.layer
        loads += [f"{name}_{i} = d{i}[{name!r}]" for name in layer.names]
        tensors += [f"{name}_{i}" for name in layer.names if name in _TENSORS]
        for name in layer.methods:
            parameters.append(f"{name}_{number}")
            checks.append(f"k{number}.{name} is not {name}_{number}")
        if layer.condition:
            checks.append(f"not ({_numbered(layer.condition, i)})")
        value = _numbered(layer.expression, i)
        if layer.input_condition:
            otherwise = "plain" if alone else f"m{i}"
            value = f"({value}) if {_numbered(layer.input_condition, i)} else {otherwise}(x)"
        if value != "x":
            steps.append(f"x = {value}")
    grouped = " or ".join(backward)
    checks.append(grouped if alone else f"is_grad_enabled() and ({grouped})")
    functions = dict.fromkeys(name for kind, _ in shape if kind for name in kind.layer.functions)
    checks += [f"F.{name} is not {name}_of_torch" for name in functions]
    if functions:
        checks.append(f"has_torch_function({', '.join(tensors)})")
    # The functions are looked up once for each run, so replaced ones are called.
    for name in dict.fromkeys(re.findall(r"\b(?:F|torch(?:\._C\._nn)?)\.\w+", " ".join(steps))):
        local = name.replace(".", "_")
        loads.append(f"{local} = {name}")
        steps = [re.sub(rf"\b{re.escape(name)}\b", local, step) for step in steps]
    if any("cudnn" in step for step in steps):
        loads.append("cudnn = cudnn_is_enabled()")
    source = _SOURCE.format(
        parameters=", ".join(dict.fromkeys(parameters)),
        signature=signature,
        arguments=arguments,
        loads=f"\n{' ' * 12}".join(loads or ["pass"]),
        checks=f"\n{' ' * 16}or ".join(checks),
        steps=f"\n{' ' * 8}".join([*steps, "return run(x)" if runs else "return x"]),
    )
    namespace = dict(_NAMESPACE)
    exec(compile(source, "<modkit.fast_inference>", "exec"), namespace)  # noqa: S102 - our own source
    made: Callable[..., Any] = namespace["make"]
    return made


def _numbered(text: str, number: int) -> str:
    """Replace each ``self.name`` by the variable of that name and step."""
    return re.sub(r"\bself\.(\w+)", rf"\1_{number}", text)


def _function(
    steps: list[_Step], plain: Callable[..., Any], run: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """Return the function of a run of layers; ``plain`` computes the same by calls of modules."""
    numbers: dict[type[nn.Module], int] = {}
    values: dict[str, Any] = {}
    shape: list[tuple[_Kind | None, int]] = []
    for i, (module, kind) in enumerate(steps):
        number = numbers.setdefault(type(module), len(numbers))
        state = values[f"d{i}"] = module.__dict__
        values[f"m{i}"], values[f"k{number}"] = module, type(module)
        if kind is None:
            values[f"f{number}"], values[f"t{i}"] = nn.Sequential.forward, state["_modules"]
        else:
            values[f"f{number}"] = kind.forward
            values.update({f"{name}_{number}": function for name, function in kind.methods})
        shape.append((kind, number))
    function = _maker(tuple(shape), run is not None)(plain, run, **values)
    # Wrong arguments are refused in the words of torch's function.
    function.__qualname__ = values["f0"].__qualname__
    return MethodType(function, steps[0].module)


def _flat(module: nn.Module) -> list[_Step] | None:
    """Return the steps of a layer, or of a container of nothing else; None for other modules."""
    kind = _kind(type(module))
    if kind is not None:
        return [_Step(module, kind)] if "," not in kind.signature else None
    if not _is_container(type(module)) or type(module.__dict__.get("_modules")) is not _Table:
        return None
    steps = [_Step(module, None)]
    for child in module._modules.values():
        below = None if child is None else _flat(child)
        if below is None:
            return None
        steps += below
    return steps


def _container_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function of a container: one run of layers, or runs and modules that are none."""
    table = module.__dict__.get("_modules")
    if type(table) is not _Table or None in table.values():
        return None
    children = [(child, _flat(child)) for child in table.values()]
    if all(below is not None for _, below in children):
        steps = [_Step(module, None), *(step for _, below in children for step in below or ())]
        if len(steps) <= _LONGEST_RUN:
            return _function(steps, module._call_impl)
    parts = list(_parts(children))

    def run(x: Any) -> Any:
        done = 0
        for part, count in parts:
            x = part(x)
            done += count
            if table.changed:
                return _one_by_one(list(table.values())[done:])(x)
        return x

    return _function([_Step(module, None)], module._call_impl, run)


def _parts(
    children: Sequence[tuple[nn.Module, list[_Step] | None]],
) -> Iterator[tuple[Callable[..., Any], int]]:
    """Yield functions of as many layers as possible, and other modules, with the number of children each."""
    steps: list[_Step] = []
    members: list[nn.Module] = []
    for child, below in [*children, (None, None)]:
        if members and (below is None or len(steps) + len(below) > _LONGEST_RUN):
            one = len(members) == 1
            yield members[0] if one else _function(steps, _one_by_one(members)), len(members)
            steps, members = [], []
        if below is not None and len(below) <= _LONGEST_RUN:
            steps, members = steps + below, [*members, child]
        elif child is not None:
            yield child, 1


def _one_by_one(modules: Sequence[nn.Module]) -> Callable[[Any], Any]:
    """Return the function that calls one module after the other."""

    def call(x: Any) -> Any:
        for module in modules:
            x = module(x)
        return x

    return call


# --- what stands in a module's ``__dict__`` inside the block ------------------------------------------------


class _Table(dict[str, Any]):
    """Stands in for a table of members, and hands every change on to it and to ``__dict__``."""

    __slots__ = ("binding", "changed", "original")

    def __init__(self, binding: "_Binding", original: dict[str, Any]) -> None:
        super().__init__(original)
        self.binding = binding
        self.original = original
        self.changed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.original,)


def _followed(method: Callable[..., Any]) -> Callable[..., Any]:
    def change(self: _Table, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            self.changed = True
            self.original.clear()
            self.original.update(self)
            self.binding.mirror()

    return change


for _name in (
    "__setitem__",
    "__delitem__",
    "__ior__",
    "clear",
    "pop",
    "popitem",
    "setdefault",
    "update",
):
    setattr(_Table, _name, _followed(getattr(dict, _name)))


class _Binding:
    """What ``fast_inference`` has put into one module, and how many blocks use it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.state: State = module.__dict__
        self.users = 0
        self.mirrored: dict[str, Any] = {}
        self.call: Callable[..., Any] | None = None

    def open(self) -> None:
        """Put the members into ``__dict__``."""
        if not _is_standard_attributes(type(self.module)):
            return
        for key in _TABLES:
            table = self.state.get(key)
            if type(table) is dict and table:
                self.state[key] = _Table(self, table)
        self.mirror()
        self.state["__getstate__"] = self.plain_state

    def mirror(self) -> None:
        """Bring the members in ``__dict__`` up to date with the tables."""
        state, kind, mirrored = self.state, type(self.module), self.mirrored
        members: dict[str, Any] = {}
        for key in _TABLES:
            table = state.get(key)
            if type(table) is _Table:
                members.update(table)
        for name in [name for name in mirrored if name not in members]:
            if state.get(name) is mirrored.pop(name):
                state.pop(name, None)
        for name, value in members.items():
            if name in mirrored or not (name in state or hasattr(kind, name)):
                state[name] = mirrored[name] = value

    def bind(self) -> None:
        """Put in what is called in place of the hooks and ``forward``."""
        kind = type(self.module)
        known = _kind(kind)
        if known is not None:
            self.call = _function([_Step(self.module, known)], self.module._call_impl)
        elif _is_container(kind):
            self.call = _container_function(self.module)
        if self.call is not None:
            self.state[_CALL_SLOT] = self.call

    def close(self) -> None:
        """Take everything out again; what the user has changed in the meantime stays."""
        state = self.state
        if self.call is not None and state.get(_CALL_SLOT) is self.call:
            del state[_CALL_SLOT]
        for name, value in self.mirrored.items():
            if state.get(name) is value:
                del state[name]
        for key in _TABLES:
            table = state.get(key)
            if type(table) is _Table:
                state[key] = table.original
        if getattr(state.get("__getstate__"), "__self__", None) is self:
            del state["__getstate__"]

    def plain_state(self) -> Any:
        """Return what copies and pickles of the module hold, without anything of this."""
        state: Any = type(self.module).__getstate__(self.module)
        if not isinstance(state, dict):
            return state
        plain = {
            key: value.original if type(value) is _Table else value
            for key, value in state.items()
            if key not in self.mirrored or value is not self.mirrored[key]
        }
        plain.pop(_CALL_SLOT, None)
        plain.pop("__getstate__", None)
        return plain


def _is_standard_attributes(kind: type[nn.Module]) -> bool:
    return kind.__getattr__ is _GETATTR and kind.__getattribute__ is object.__getattribute__


_bindings: Final[dict[int, _Binding]] = {}
_lock: Final = threading.RLock()


def _tree(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules below it, without those that are compiled or scripted."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        state = module.__dict__
        table = state.get("_modules")
        ours = id(module) in _bindings
        if (
            id(module) in found
            or not isinstance(table, dict)
            or (state.get(_CALL_SLOT) and not ours)
        ):
            continue
        found[id(module)] = module
        waiting += [child for child in table.values() if child is not None]
    return list(found.values())


def _enter(model: nn.Module) -> list[_Binding]:
    with _lock:
        used: list[_Binding] = []
        fresh: list[_Binding] = []
        try:
            for module in _tree(model):
                binding = _bindings.get(id(module))
                if binding is None:
                    binding = _bindings[id(module)] = _Binding(module)
                    fresh.append(binding)
                binding.users += 1
                used.append(binding)
            for binding in fresh:
                binding.open()
            for binding in fresh:
                binding.bind()
        except BaseException:
            _leave(used)
            raise
        return used


def _leave(used: list[_Binding]) -> None:
    with _lock:
        for binding in used:
            binding.users -= 1
            if not binding.users:
                del _bindings[id(binding.module)]
                binding.close()


@contextmanager
def fast_inference(
    model: ModuleT, *, fold_batch_norm: bool = False
) -> Generator[ModuleT, None, None]:
    """Run a model in eager mode with less time spent in Python."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"fast_inference(): model must be a torch.nn.Module, got {type(model).__name__}"
        )
    used = _enter(model)
    try:
        yield model
    finally:
        _leave(used)
