"""The functions that torch calls in place of hooks and ``forward``.

Those of layers and containers are generated, and run layers without calls in between. At each call
they check for hooks, patches and overrides, and take torch's own path if there are any.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from operator import is_
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's layers call it so

from modkit import _upstream
from modkit._fast_inference.layers import CONTAINER, FUNCTIONS, Kind, is_container, kind_of
from modkit._fast_inference.members import CALL_SLOT, Table
from modkit._upstream import jit_trace, module_globals as hooks


Call = Callable[..., Any]
Shape = tuple[tuple[Kind, int], ...]

# Longer runs are split: the time to compile a function grows with its length.
_LONGEST: Final = 24
# Prefixes of attributes that may be tensor subclasses with a ``__torch_function__``.
_TENSORS: Final = frozenset({"weight", "bias", "running"})

_CALL_IMPL: Final = _upstream.original_methods["_call_impl"]

# The globals of the generated source. Modules of torch are looked up at each call, so that a patch
# of one of their functions is called; functions are compared with, or cannot be patched.
_NAMESPACE: Final[dict[str, Any]] = {
    "F": F,
    "torch": torch,
    "is_same": is_,
    "hooks": hooks,
    "jit_trace": jit_trace,
    "modes_are_active": _upstream.modes_are_active,
    "is_grad_enabled": torch.is_grad_enabled,
    "has_torch_function": _upstream.has_torch_function,
    "CALL": _upstream.original_methods["__call__"],
    "CALL_IMPL": _CALL_IMPL,
    "MISSING": object(),
    **{f"{name}_of_torch": function for name, function in FUNCTIONS.items()},
}

# README.md shows what this becomes for ``Sequential(Linear, ReLU)``.
_SOURCE: Final = """
def make({parameters}):
    def call({signature}, /, *args, **kwargs):
        if args or kwargs or {last} is MISSING:
            return {plain}(*[a for a in ({arguments}, *args) if a is not MISSING], **kwargs)
        try:
            {loads}
            differs = (
                {checks}
            )
        except Exception:
            differs = True
        if differs:
            return {plain}({arguments})
        {steps}
    return call
"""


class Step(NamedTuple):
    """A layer of a run, or a container whose layers follow.

    Attributes:
        module: The layer or container.
        kind: Its computation; a container has one that does nothing.
    """

    module: nn.Module
    kind: Kind


@lru_cache(maxsize=1024)
def _maker(shape: Shape, parameters: tuple[str, ...], owned: bool, runs: bool) -> Call:
    """Generate and compile the factory of a run's function.

    A closure in plain Python would loop over the layers and read their attributes by name, which
    takes as long as torch's own calls. The source has a local variable for each attribute and one
    line for each layer. Sequences of the same classes share it: what differs are the arguments of
    the factory.
    """
    arguments = shape[0][0].layer.arguments
    names = [(name, i) for i, (kind, _) in enumerate(shape) for name in kind.layer.names]
    loads = [f"{name}_{i} = d{i}[{name!r}]" for name, i in names]
    steps = "; ".join([*_steps(shape, owned), "return run(x)" if runs else "return x"])

    # Functions are looked up once for each run, so replaced ones are called.
    for name in dict.fromkeys(re.findall(r"\b(?:F|torch)\.\w+", steps)):
        local = name.replace(".", "_")
        loads.append(f"{local} = {name}")
        steps = re.sub(rf"\b{re.escape(name)}\b", local, steps)
    if "cudnn" in steps:
        loads.append("cudnn = torch.backends.cudnn.enabled")

    source = _SOURCE.format(
        plain="m0._call_impl" if owned else "plain",
        signature=", ".join(f"{name}=MISSING" for name in arguments),
        arguments=", ".join(arguments),
        last=arguments[-1],
        parameters=", ".join(parameters),
        loads="; ".join(loads) or "pass",
        checks=f"\n{' ' * 16}or ".join(_checks(shape, parameters, not runs, owned)),
        steps=steps,
    )
    # The source has no text of the user: names of attributes and classes are those of torch's
    # layers.
    namespace = dict(_NAMESPACE)
    exec(source, namespace)  # noqa: S102
    return cast("Call", namespace["make"])


def _steps(shape: Shape, owned: bool) -> Iterator[str]:
    """Yield the operations of a run."""
    for i, (kind, _) in enumerate(shape):
        value = _numbered(kind.layer.expression, i)
        # The condition of the first input is among the checks, if torch's own path is that of one
        # layer. Further inputs are known when the run has begun, so such a layer is called.
        if kind.layer.input_condition and not (owned and i == 0):
            value = f"({value}) if {_numbered(kind.layer.input_condition, i)} else m{i}(x)"
        if value != "x":
            yield f"x = {value}"


def _checks(shape: Shape, parameters: Sequence[str], slots: bool, owned: bool) -> Iterator[str]:
    """Yield the conditions of taking torch's own path, global ones first."""
    first = shape[0][0].layer.input_condition
    # Global hooks and tracing, then patches of each class.
    yield "hooks._global_forward_hooks or hooks._global_forward_pre_hooks"
    yield "jit_trace._trace_module_map is not None"
    for kind, number in dict.fromkeys(shape):
        yield f"k{number}._call_impl is not CALL_IMPL or k{number}.forward is not f{number}"
        yield from (f"k{number}.{name} is not f{number}{name}" for name, _ in kind.methods)
        # A module that is called on its own has been through ``__call__``.
        if len(shape) > 1:
            yield f"k{number}.__call__ is not CALL"

    # Then the state of each module: its hooks, its class, and what is set on it.
    backward = "hooks._global_backward_hooks or hooks._global_backward_pre_hooks"
    for i, (kind, number) in enumerate(shape):
        yield f"d{i}['_forward_hooks'] or d{i}['_forward_pre_hooks']"
        backward += f" or d{i}['_backward_hooks'] or d{i}['_backward_pre_hooks']"
        yield f"type(m{i}) is not k{number} or 'forward' in d{i} or '_call_impl' in d{i}"
        if slots and (i or not owned):
            # Its slot is empty, or has the function that was there when this one was made.
            unchanged = f" and d{i}[{CALL_SLOT!r}] is not c{i}" if f"c{i}" in parameters else ""
            yield f"{CALL_SLOT!r} in d{i}{unchanged}"
        if kind is CONTAINER:
            yield f"d{i}['_modules'] is not t{i} or t{i}.changed"
        if kind.layer.condition:
            yield f"not ({_numbered(kind.layer.condition, i)})"
    functions = dict.fromkeys(name for kind, _ in shape for name in kind.layer.functions)
    checks_tensors = bool(functions) or any(kind.layer.input_condition for kind, _ in shape)
    # Backward hooks have no effect otherwise, but torch warns if the output is not a tensor.
    yield f"is_grad_enabled() and ({backward})" if checks_tensors else f"({backward})"

    # The functions of torch that expressions replace: patches of them, and tensor subclasses.
    yield from (f"F.{name} is not {name}_of_torch" for name in functions)
    if checks_tensors:
        names = [(name, i) for i, (kind, _) in enumerate(shape) for name in kind.layer.names]
        tensors = [f"{name}_{i}" for name, i in names if name.partition("_")[0] in _TENSORS]
        yield f"has_torch_function({', '.join(['x', *tensors])})"
    if owned and first:
        yield f"not ({_numbered(first, 0)})"


def _numbered(source: str, number: int) -> str:
    """Replace each ``self.name`` by the variable of that name and step."""
    return re.sub(r"\bself\.(\w+)", rf"\1_{number}", source)


def function_of(steps: Sequence[Step], plain: Call | None = None, run: Call | None = None) -> Call:
    """Return the function of a run."""
    # Each class gets a number; the checks of a class are made once for all of its layers.
    numbers: dict[type, int] = {}
    values: dict[str, Any] = {"plain": plain, "run": run}
    for i, (module, kind) in enumerate(steps):
        number = numbers.setdefault(type(module), len(numbers))
        state = module.__dict__
        values.update({f"m{i}": module, f"d{i}": state})
        values.update({f"k{number}": type(module), f"f{number}": kind.forward})
        values.update({f"f{number}{name}": method for name, method in kind.methods})
        if kind is CONTAINER:
            values[f"t{i}"] = state["_modules"]
        if CALL_SLOT in state:
            values[f"c{i}"] = state[CALL_SLOT]

    shape = tuple((step.kind, numbers[type(step.module)]) for step in steps)
    function: Any = _maker(shape, tuple(values), plain is None, run is not None)(**values)
    _upstream.skip_code(function.__code__)
    return cast("Call", function)


def user_function(module: nn.Module) -> Call:
    """Return the function of a module that implements ``forward``.

    It reads at each call what ``Module._call_impl`` reads, and leaves the call to that if it finds
    hooks, an override or tracing. Tables are looked up again, because libraries replace as well as
    fill them.
    """
    state = module.__dict__

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            differs = (
                hooks._global_forward_hooks
                or hooks._global_forward_pre_hooks
                or hooks._global_backward_hooks
                or hooks._global_backward_pre_hooks
                or jit_trace._trace_module_map is not None
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or type(module)._call_impl is not _CALL_IMPL
                or "_call_impl" in state
            )
        except KeyError:
            # Torch's own path finds a table in the class, or says which one is missing.
            differs = True

        if differs:
            return module._call_impl(*args, **kwargs)
        return module.forward(*args, **kwargs)

    return call


def container_function(module: nn.Module, covered: set[int]) -> Call | None:
    """Return the function of a container."""
    table = module.__dict__.get("_modules")
    if type(table) is not Table or None in table.values():
        return None
    steps = _flat(module)
    if steps is not None:
        covered.update(id(step.module) for step in steps)
        return function_of(steps)

    calls = list(_calls(list(table.values()), covered))
    size = len(table)

    def run(x: Any) -> Any:
        done = 0
        for call, count in calls:
            x = call(x)
            done += count
            # A child may change the container that is running; torch's loop notices it likewise.
            if table.changed:
                if len(table) != size:
                    raise RuntimeError("dictionary changed size during iteration")
                return _one_by_one(list(table.values())[done:], x)
        return x

    return function_of([Step(module, CONTAINER)], run=run)


def _flat(module: nn.Module, depth: int = 0) -> list[Step] | None:
    """Return the steps of a layer, or of a short container of layers; None for other modules."""
    table = module.__dict__.get("_modules")
    if depth > _LONGEST:
        return None

    kind = kind_of(type(module))
    if kind is not None:
        return [Step(module, kind)] if len(kind.layer.arguments) == 1 else None
    if not is_container(type(module)) or type(table) is not Table:
        return None

    steps = [Step(module, CONTAINER)]
    for child in module._modules.values():
        below = None if child is None else _flat(child, depth + 1)
        if below is None or len(steps) + len(below) > _LONGEST:
            return None
        steps += below
    return steps


def _calls(children: list[nn.Module], covered: set[int]) -> Iterator[tuple[Call, int]]:
    """Yield runs of as many layers as possible, and other modules.

    Each comes with the number of children that it stands for.
    """
    steps: list[Step] = []
    members: list[nn.Module] = []
    # None ends the last run.
    for child in [*children, None]:
        below = None if child is None else _flat(child)

        if members and (below is None or len(steps) + len(below) > _LONGEST):
            if len(members) > 1:
                covered.update(id(step.module) for step in steps)
                yield function_of(steps, partial(_one_by_one, members)), len(members)
            else:
                yield members[0], 1
            steps = []
            members = []

        if child is not None and below is not None:
            steps = steps + below
            members = [*members, child]
        elif child is not None:
            yield child, 1


def _one_by_one(modules: Sequence[nn.Module], x: Any) -> Any:
    """Call one module after the other."""
    for module in modules:
        x = module(x)
    return x


# Compiled code starts a graph at a user's ``forward``, as outside, not at the functions that call
# it.
_upstream.skip_frames(sys.modules[__name__])
