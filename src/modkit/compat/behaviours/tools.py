"""Other parts of torch applied to modules: nn.utils, func, graphs, averages, torch's own layers."""

# The networks are known only when a library is chosen, so the lambdas take and return anything.
# pyright: reportUnknownLambdaType=false

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import func, fx, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

from modkit.compat.behaviours.cases import Cases, Uses, cases_of, hooked, on_net
from modkit.compat.behaviours.hooks import mark
from modkit.compat.behaviours.module import reloaded
from modkit.compat.outcomes import Library


X: Final = torch.arange(12.0).reshape(4, 3) / 7
ZERO: Final = {"offset": torch.zeros(3)}


def tensors(net: Any) -> dict[str, Any]:
    """Return parameters by name."""
    return dict(net.named_parameters())


def trained(net: Any) -> Any:
    """Return the output of a network after a step."""
    net(X).square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.01).step()
    return net(X)


def tanh(module: Any, name: str = "weight") -> Any:
    """Parametrize a tensor."""
    return parametrize.register_parametrization(module, name, nn.Tanh())


NN_UTILS: Final[Uses] = {
    "weight_norm": lambda n: (parametrizations.weight_norm(n.again.linear), trained(n)),
    "l1_unstructured": lambda n: (prune.l1_unstructured(n.last, "weight", 0.5), trained(n)),
    "a parametrization of a user's class": lambda n: trained(tanh(n, "offset")),
    "deepcopy of a parametrization": lambda n: copy.deepcopy(tanh(n, "offset"))(X),
    "parameters_to_vector": lambda n: utils.parameters_to_vector(n.parameters()),
    "clip_grad_norm_": lambda n: (trained(n), utils.clip_grad_norm_(n.parameters(), 1.0)),
    "fuse_linear_bn_eval": lambda n: utils.fuse_linear_bn_eval(n.first.eval(), n.norm.eval()),
}
FUNCTIONAL: Final[Uses] = {
    "functional_call": lambda n: func.functional_call(n, ZERO, X),
    "strict": lambda n: func.functional_call(n, ZERO, X, strict=True),
    "grad": lambda n: func.grad(lambda p: func.functional_call(n, p, X).sum())(tensors(n.eval())),
    "vmap": lambda n: func.vmap(n.eval())(X[None]),
    "jacrev": lambda n: func.jacrev(n.eval())(X[:1]),
    "stack_module_state": lambda n: func.stack_module_state([n, copy.deepcopy(n)]),
}


def compiled(net: Any, use: Callable[[Any], Any] = lambda run: run(X)) -> Any:
    """Use the network compiled without code generation."""
    # Without what an earlier case has compiled.
    torch.compiler.reset()
    return use(torch.compile(net, backend="eager"))


def exported(net: Any) -> Any:
    """Return the exported program of a network, and its output."""
    program = torch.export.export(net.eval(), (X,))
    return str(program.graph), list(program.state_dict), program.module()(X)


def traced(net: Any) -> Any:
    """Return the traced code of a network, and its output."""
    graph = fx.symbolic_trace(net)
    return graph.code, list(graph.state_dict()), reloaded(graph)(X)


GRAPHS: Final[Uses] = {
    "compile": compiled,
    "compile, fullgraph": lambda n: torch.compile(n, backend="eager", fullgraph=True)(X),
    "compile, gradients": partial(compiled, use=trained),
    "compile, hooks": lambda n: compiled(hooked(n, "forward_hook", lambda m, a, out: out * 2)),
    "module.compile()": lambda n: (n.compile(backend="eager"), n(X)),
    "export": exported,
    "fx": traced,
    "fx, Interpreter": lambda n: fx.Interpreter(fx.symbolic_trace(n)).run(X),
}


def scripted(lib: Library, make: Callable[[Any, Any], Any]) -> Any:
    """Return the code of a compiled network, and its output."""
    script = make(lib.jit, lib.net().eval())
    return script.code, script(X), [name for name, _ in script.named_parameters()]


JIT: Final[Uses] = {
    "jit.script": partial(scripted, make=lambda jit, n: jit.script(n)),
    "jit.trace": partial(scripted, make=lambda jit, n: jit.trace(n, X)),
    "jit.freeze": lambda lib: lib.jit.freeze(lib.jit.script(lib.net().eval()))(X),
}


def averaged(
    lib: Library, updates: int = 3, use: Any = lambda average: average, **options: Any
) -> Any:
    """Use the average of a network that takes steps."""
    net = lib.net()
    average = lib.swa.AveragedModel(net, **options)
    for _ in range(updates):
        trained(net)
        average.update_parameters(net)
    return use(average)


def updated(lib: Library, batches: Any) -> Any:
    """Return a network after ``update_bn``."""
    net = lib.net()
    lib.swa.update_bn(batches, net)
    return net


FUNCTIONS: Final[Mapping[str, tuple[Any, ...]]] = {
    "get_ema_avg_fn": ("avg_fn", 0.9),
    "get_ema_multi_avg_fn": ("multi_avg_fn", 0.9),
    "get_swa_avg_fn": ("avg_fn",),
    "get_swa_multi_avg_fn": ("multi_avg_fn",),
}


def made(lib: Library, name: str) -> Any:
    """Average by a function of the library."""
    key, *arguments = FUNCTIONS[name]
    options = {key: getattr(lib.swa, name)(*arguments)}
    return averaged(lib, **options)


AVERAGED: Final[Any] = {
    "AveragedModel": {},
    "before an update": {"updates": 0},
    "avg_fn": {"avg_fn": lambda average, value, n: (average + value) / 2},
    "two functions": {"avg_fn": max, "multi_avg_fn": max},
    "output": {"use": lambda average: average.eval()(X)},
    "state dict": {"use": lambda average: average.state_dict()},
    "deepcopy": {"use": copy.deepcopy},
}
UPDATED: Final[Any] = {
    "update_bn": {"batches": [X, X + 1]},
    "update_bn: tuples": {"batches": [(X, 1), [X * 2, 2]]},
}


def mixed(lib: Library, name: str, arguments: Any, shapes: Any) -> Any:
    """Train a layer of torch below a user's module, which is below a container of torch."""
    pair = lib.nets.Pair(getattr(lib.nn, name)(*arguments), lib.nets.Scale())
    net = nn.Sequential(lib.nets.Scale(), pair)
    hooked(pair.left, "full_backward_hook", mark)

    output = pair.left(*(net[0](torch.randn(shape)) for shape in shapes))
    tensor = output[0] if isinstance(output, tuple) else output
    tensor.square().sum().backward()

    reloaded(net).load_state_dict(net.state_dict())
    return output, copy.deepcopy(net.double())


LAYERS: Final[tuple[tuple[Any, ...], ...]] = (
    ("Linear", [4, 2], (2, 4)),
    ("Conv2d", [4, 2, 3], (2, 4, 8, 8)),
    ("BatchNorm2d", [4], (2, 4, 8, 8)),
    ("LayerNorm", [4], (2, 4)),
    ("LSTM", [4, 3], (5, 2, 4)),
    ("MultiheadAttention", [4, 2], (5, 2, 4), (5, 2, 4), (5, 2, 4)),
)
AREAS: Final[dict[str, Cases]] = {
    "nn.utils": on_net(NN_UTILS),
    "functional_call and func": on_net(FUNCTIONAL),
    "compile, export, fx, jit": {**on_net(GRAPHS), **JIT},
    "averages": {
        **cases_of(averaged, AVERAGED),
        **cases_of(made, {name: {"name": name} for name in FUNCTIONS}),
        **cases_of(updated, UPDATED),
    },
    "mixed trees": {
        name: partial(mixed, name=name, arguments=arguments, shapes=shapes)
        for name, arguments, *shapes in LAYERS
    },
}
