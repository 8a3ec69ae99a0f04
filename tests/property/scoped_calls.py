"""Calls of a tree inside `modkit.fast_inference`: modes, transforms, traces, threads, patches."""

import collections
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.nn.modules.module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.property import choices
from tests.property.classes import GLOBAL_REGISTRARS, LOG, Hook
from tests.property.operations import Kind, Skipped
from tests.property.sides import patched


SCOPED: dict[str, Kind] = {}


def scoped(*arguments: choices.Choice[Any]) -> Callable[..., Any]:
    """Enter the function into the table of this file, with the strategies of its arguments."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        SCOPED[function.__name__] = Kind(function, arguments)
        return function

    return enter


class Noted(torch.Tensor):
    """A tensor whose class records the functions that it is passed to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        LOG.append(("subclass", getattr(func, "__name__", "")))
        return super().__torch_function__(func, types, args, kwargs)


class NotedFunctions(TorchFunctionMode):
    """Records the functions of torch that are called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        LOG.append(("function", getattr(func, "__name__", ""), len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


class NotedOperators(TorchDispatchMode):
    """Records the operators that are dispatched."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        LOG.append(("operator", str(func)))
        return func(*args, **(kwargs or {}))


SHAPES: Final = choices.sampled_from(["own"] * 20 + ["one", "none", "wrong", "scalar", "flat"])
DTYPES: Final = choices.sampled_from(
    [torch.float32] * 16 + [torch.float64, torch.float16, torch.int64, torch.bfloat16]
)
KEYWORDS: Final = choices.sampled_from([{}] * 12 + [{"scale": 2.0}, {"unknown": 1}])
MODES: Final[dict[str, Callable[[], Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "functions": NotedFunctions,
    "operators": NotedOperators,
    "without mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
}
MODE_NAMES: Final = choices.sampled_from(["plain"] * 4 + ["no_grad"] * 2 + sorted(MODES))


def make_input(side: Any, choice: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make the input that the layers take, or another one."""
    shape = {
        "own": side.shape,
        "one": (1, *side.shape[1:]),
        "none": (0, *side.shape[1:]),
        "wrong": (*side.shape[:-1], side.shape[-1] + 1),
        "scalar": (),
        "flat": side.shape[1:],
    }[choice]
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) / 4 - 1).to(dtype).reshape(shape)


def result_of(who: Any, x: Any, kwargs: Any) -> Any:
    """Call a module forward and backward; return everything observable except the log of hooks."""
    if x.is_floating_point() and torch.is_grad_enabled():
        x.requires_grad_()
    # Not the leaf itself, which layers that work in place refuse.
    given = x.clone()
    output = who(given, **kwargs)
    if not isinstance(output, torch.Tensor):
        return output
    if output.requires_grad and output.grad_fn is not None:
        output.sum().backward()
    kind = type(output.grad_fn).__name__
    return output, x.grad, output is given, output.stride(), type(output).__name__, kind, given


@scoped(SHAPES, DTYPES, KEYWORDS, MODE_NAMES, choices.booleans())
def call_in_mode(
    side: Any, module: Any, shape: str, dtype: Any, kwargs: Any, mode: str, inner: bool
) -> Any:
    """Call the root, or a module in the tree, in one of torch's modes."""
    x = make_input(side, shape, dtype)
    with MODES[mode]():
        return result_of(module if inner else side.model, x, kwargs)


@scoped(
    choices.lists(
        choices.sampled_from(sorted(GLOBAL_REGISTRARS)), min_size=1, max_size=2, unique=True
    )
)
def call_with_global_hooks(side: Any, module: Any, kinds: Any) -> Any:
    """Call the root under hooks for all modules."""
    handles = [
        getattr(side.impl, GLOBAL_REGISTRARS[kind])(Hook(-1 - number, kind, "change"))
        for number, kind in enumerate(kinds)
    ]
    try:
        return result_of(side.model, make_input(side, "own"), {})
    finally:
        for handle in handles:
            handle.remove()


@scoped()
def call_with_subclass(side: Any, module: Any) -> Any:
    """Call the root with a tensor of a subclass."""
    with torch.no_grad():
        output = side.model(make_input(side, "own").as_subclass(Noted))
    return type(output).__name__, output.as_subclass(torch.Tensor)


@scoped()
def call_channels_last(side: Any, module: Any) -> Any:
    """Call the root with an input in channels-last format."""
    if len(side.shape) != 4:
        raise Skipped
    x = make_input(side, "own").to(memory_format=torch.channels_last)
    return result_of(side.model, x, {})


@scoped(choices.integers(1, 3))
def call_in_threads(side: Any, module: Any, count: int) -> Any:
    """Call the root in threads, one after the other."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(side.model(make_input(side, "own")))
        except Exception as error:
            found.append((type(error).__name__, str(error)))

    for _ in range(count):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    return found


@scoped(choices.booleans())
def call_functionally(side: Any, module: Any, halved: bool) -> Any:
    """Call the root with other parameters by `functional_call`."""
    values = {name: p.detach() * 0.5 for name, p in side.model.named_parameters()}
    if not halved:
        values = dict(list(values.items())[:1])
    with torch.no_grad():
        return torch.func.functional_call(side.model, values, (make_input(side, "own"),))


@scoped()
def differentiate_functionally(side: Any, module: Any) -> Any:
    """Take gradients and vectorize with `torch.func`."""
    values = {name: p.detach() for name, p in side.model.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(side.model, parameters, (x,)).sum()

    x = make_input(side, "own")
    gradients = torch.func.grad(loss)(values, x)
    each = torch.func.vmap(loss, in_dims=(None, 0), randomness="different")(values, x[:, None])
    return gradients, each


def has_old_backward_hooks(model: Any) -> bool:
    """Return True if a call looks for the first tensor of its output, which does not terminate for a proxy of fx."""
    hooked = [(torch_module._global_backward_hooks, torch_module._global_is_full_backward_hook)]
    hooked += [(one._backward_hooks, one._is_full_backward_hook) for one in model.modules()]
    return any(hooks and full is False for hooks, full in hooked)


def assigns_weights(model: Any) -> bool:
    """Return True if a call of a module assigns to it what a graph may read at another place."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(type(hook).__name__ in {"SpectralNorm", "WeightNorm"} for hook in hooks)


@scoped()
def trace_with_fx(side: Any, module: Any) -> Any:
    """Trace the root symbolically; return the code and its output.

    Inside scopes a graph may read a parameter at another place, as the page of `fast_inference` says.
    """
    if has_old_backward_hooks(side.model) or assigns_weights(side.model):
        raise Skipped
    # Tracers of one process share their count of constants.
    torch.fx.Tracer._qualname_counter.clear()
    in_scope = bool(getattr(side, "scopes", None))
    try:
        with torch.no_grad():
            traced = torch.fx.symbolic_trace(side.model)
            if in_scope:
                LOG.clear()
            return None if in_scope else traced.code, traced(make_input(side, "own"))
    except Exception as error:
        if in_scope:
            LOG.clear()
            raise RuntimeError("cannot be traced, or run") from error
        raise


@scoped()
def trace_with_jit(side: Any, module: Any) -> Any:
    """Trace the root with TorchScript; return the code and its output."""
    x = make_input(side, "own")
    try:
        with torch.no_grad():
            traced = torch.jit.trace(side.model, x, check_trace=False)
            # The number of a class is not part of the code.
            return re.sub(r"___torch_mangle_\d+\.", "", traced.code), traced(x + 1)
    except RuntimeError as error:
        raise RuntimeError(re.sub(r"___torch_mangle_\d+\.", "", str(error))) from None
    finally:
        LOG.clear()  # which attributes the tracer looks up


@scoped(choices.booleans())
def change_during_call(side: Any, module: Any, replace: bool) -> Any:
    """Call the root, and let a hook change the module's members in the middle of the call."""

    def change(*_: Any) -> None:
        LOG.append("change")
        if replace and module._modules:
            name = next(iter(module._modules))
            module._modules[name] = side.impl.nn.Tanh()
        elif module._parameters:
            name = next(iter(module._parameters))
            setattr(module, name, None)
        else:
            module.eval()

    handle = module.register_forward_pre_hook(change)
    try:
        return result_of(side.model, make_input(side, "own"), {})
    finally:
        handle.remove()


@scoped(choices.integers(0, 9))
def hook_during_call(side: Any, module: Any, number: int) -> Any:
    """Call the root, and let a hook register a hook on another module in the middle of the call."""
    handles: list[Any] = []

    def change(*_: Any) -> None:
        hook = Hook(-5, "forward", "change")
        handles.append(side.target(number).register_forward_hook(hook))

    handles.append(module.register_forward_pre_hook(change))
    try:
        return result_of(side.model, make_input(side, "own"), {})
    finally:
        for handle in handles:
            handle.remove()


PATCHED: Final = (
    "F.relu",
    "F.linear",
    "F.batch_norm",
    "F.layer_norm",
    "F.group_norm",
    "F.dropout",
    "F.silu",
    "F.softmax",
    "F.gelu",
    "F.conv2d",
    "F.pad",
    "Linear.forward",
    "Linear.__call__",
    "ReLU.forward",
    "LayerNorm.forward",
    "Conv2d.forward",
    "Conv2d._conv_forward",
    "BatchNorm1d._check_input_dim",
    "BatchNorm2d.forward",
    "GroupNorm._call_impl",
    "Sequential.forward",
    "Sequential.__iter__",
    "Sequential.__call__",
    "Module.__call__",
    "Module._call_impl",
    "Module._wrapped_call_impl",
    "Reader.forward",
    "Node.__call__",
)


@scoped(choices.sampled_from(PATCHED))
def call_patched(side: Any, module: Any, dotted: str) -> Any:
    """Call the root while a function or method is patched."""
    with patched(side, dotted):
        return result_of(side.model, make_input(side, "own"), {})


@scoped(choices.sampled_from(PATCHED))
def patch(side: Any, module: Any, dotted: str) -> list[str]:
    """Patch a function or method for the operations that follow, or take the patch back."""
    patches: list[str] = side.world.patches
    if dotted in patches:
        patches.remove(dotted)
    else:
        patches.append(dotted)
    return patches


@scoped()
def hook_tables(side: Any, module: Any) -> Any:
    """Write into hook tables, or replace them, without `register_forward_hook`."""
    if module._forward_hooks:
        module._forward_hooks = collections.OrderedDict()
    else:
        module._forward_hooks[10**9] = Hook(-7, "forward", "change")
    return len(module._forward_hooks)
