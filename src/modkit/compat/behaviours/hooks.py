"""Hooks: around calls, in the backward pass, on registration, for all modules."""

# The networks are known only when a library is chosen, so the lambdas take and return anything.
# pyright: reportUnknownLambdaType=false

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter, ReLU

from modkit.compat.behaviours.cases import Cases, cases_of, hooked, tried
from modkit.compat.outcomes import Library, freeze, leaves


X: Final = torch.arange(6.0).reshape(2, 3)


class Log(list[Any]):
    """Records the calls of its hooks."""

    def hook(self, label: object, result: Any = None) -> Callable[..., Any]:
        """Return a hook that records its arguments, and returns ``result``."""

        def hook(*arguments: Any, **kwargs: Any) -> Any:
            shown = [type(arg) if isinstance(arg, Module) else arg for arg in arguments]
            self.append((label, freeze(shown), freeze(kwargs)))
            return result(*arguments, **kwargs) if callable(result) else result

        return hook


def fails(*arguments: Any, **kwargs: Any) -> Any:
    """Raise, as a hook or as a ``forward``."""
    raise RuntimeError("of the user")


def mark(module: Any, *arguments: Any) -> None:
    """Count the calls on the module."""
    module.marks = getattr(module, "marks", 0) + 1


def scale(lib: Library, forward: Any = None) -> Any:
    """Return a module, with a ``forward`` of its own if one is given."""
    module = lib.nets.Scale()
    if forward is not None:
        module.forward = forward
    return module


def called(
    lib: Library, method: str, result: Any = None, forward: Any = None, **options: Any
) -> Any:
    """Call a module with two hooks, and with one of them."""
    module, log = scale(lib, forward), Log()
    handle = getattr(module, f"register_{method}")(log.hook("first"))
    hooked(module, method, log.hook("second", result), **options)
    with_both = tried(module, X, bias=1.0)
    handle.remove()
    return with_both, tried(module, X), log, len(module._forward_hooks)


PRE, POST = "forward_pre_hook", "forward_hook"
OPTIONS: Final = {PRE: ("prepend", "with_kwargs"), POST: ("prepend", "with_kwargs", "always_call")}
CALLS: Final[Any] = {
    **{
        f"{method}({', '.join(options)})": {"method": method, **options}
        for method, names in OPTIONS.items()
        for options in ({}, *({name: True} for name in names), dict.fromkeys(names, True))
    },
    **{
        f"a {method} {name}": {"method": method, "result": result}
        for method in (PRE, POST)
        for name, result in {
            "returns a tensor": -X,
            "returns a tuple": (-X,),
            "raises": fails,
            "removes all": lambda m, *_: (m._forward_pre_hooks.clear(), m._forward_hooks.clear())[
                0
            ],
            "adds one": lambda m, *_: m.register_forward_hook(mark) and None,
        }.items()
    },
    "kwargs": {"method": PRE, "result": ((-X,), {"bias": 2.0}), "with_kwargs": True},
    "kwargs that are a number": {"method": PRE, "result": 7, "with_kwargs": True},
    "forward raises": {"method": POST, "forward": fails},
    "always_call": {"method": POST, "forward": fails, "always_call": True},
    "an unknown option": {"method": POST, "often": True},
}


def run_backward(
    lib: Library, method: str, result: Any = None, forward: Any = None, **options: Any
) -> Any:
    """Run the backward pass of a small network with hooks on its parts."""
    net, log = lib.nets.Pair(lib.nets.Scale(2.0), scale(lib, forward)), Log()
    # The hooks of one part, and those of all around it, see the same gradients.
    hooked(net.right, method, log.hook("first"), log.hook("second", result), **options)
    hooked(net, method, log.hook("whole"))
    x = X.clone().requires_grad_()
    outputs = leaves(net(x))
    losses = torch.stack([t.square().sum() for t in outputs if isinstance(t, Tensor)])
    return tried(losses.sum().backward), log, x.grad, net, outputs


KINDS: Final = ("full_backward_hook", "full_backward_pre_hook", "backward_hook")
OPTIONS_BACKWARD: Final[Mapping[str, Mapping[str, Any]]] = {
    "two hooks": {},
    "prepend": {"prepend": True},
    "returning a gradient": {"result": lambda m, grads, *_: (grads[0] * 2,)},
    "returning too many": {"result": (X, X)},
    "raising": {"result": fails},
    "a tuple": {"forward": lambda x: (x * 1, x * 2)},
    "a dict": {"forward": lambda x: {"a": x * 2}},
    "a tuple with None": {"forward": lambda x: (x * 1, None)},
    "the input itself": {"forward": lambda x: x},
}
BACKWARD: Final[Any] = {
    f"{method}: {name}": {"method": method, **options}
    for method in KINDS
    for name, options in OPTIONS_BACKWARD.items()
}


def for_all(lib: Library, kinds: str, use: Any, result: Any = None, **options: Any) -> Any:
    """Use a network while hooks for all modules are registered."""
    log = Log()
    with ExitStack() as handles:
        # Torch does not undo this when a handle is removed.
        handles.callback(lib.hooks._global_forward_hooks_with_kwargs.clear)
        handles.callback(setattr, lib.hooks, "_global_is_full_backward_hook", None)
        for kind in kinds.split():
            register = getattr(lib.hooks, f"register_module_{kind}")
            handles.enter_context(register(log.hook(kind, result), **options))
        return tried(use, lib.nets.Pair(lib.nets.Scale(), ReLU())), log


def trained(net: Any) -> Any:
    """Call a network, run its backward pass and return it."""
    net(X.clone().requires_grad_()).sum().backward()
    return net


PARAMETER: Final = "parameter_registration_hook"
GLOBAL: Final[Any] = {
    **{
        f"{kind}_registration_hook: {name}": {"kinds": f"{kind}_registration_hook", "use": use}
        for kind in ("parameter", "buffer", "module")
        for name, use in {
            "assignment": lambda m: setattr(m, "p", Parameter(X)),
            "methods": lambda m: (m.register_buffer("b", X), m.add_module("c", None)),
            "a cast": lambda m: m.double(),
            "assign=True": lambda m: m.load_state_dict(m.state_dict(), assign=True),
        }.items()
    },
    "another parameter": {
        "kinds": PARAMETER,
        "use": lambda m: setattr(m, "p", Parameter(X)),
        "result": lambda m, name, p: Parameter(-p),
    },
    "forward hooks": {"kinds": f"{PRE} {POST}", "use": trained},
    "backward hooks": {"kinds": " ".join(KINDS[:2]), "use": trained},
    "both kinds": {"kinds": " ".join(KINDS), "use": trained},
    "another output": {"kinds": POST, "use": trained, "result": lambda *a: -a[-1]},
    "with_kwargs": {"kinds": POST, "use": trained, "with_kwargs": True},
    "always_call": {"kinds": POST, "use": lambda m: m("x"), "always_call": True},
}
AREAS: Final[dict[str, Cases]] = {
    "forward hooks": cases_of(called, CALLS),
    "backward hooks": cases_of(run_backward, BACKWARD),
    "registration and global hooks": cases_of(for_all, GLOBAL),
}
