import itertools
import re
import warnings

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import for_each
from tests.helpers import TORCH
from tests.parity.fast_inference.layers import FUNCTIONS, OTHERS, input_for
from tests.parity.fast_inference.nets import batch, net
from tests.parity.fast_inference.twins import (
    bits,
    differing_keys,
    holder_of,
    left_behind,
    outcome,
    same_inside,
)
from tests.parity.module.module_cases import seed


LAYERS = FUNCTIONS | OTHERS


class Functions(TorchFunctionMode):
    """Record the functions of torch that are called, and with what."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__qualname__", str(function))
        values = [value for value in args if not isinstance(value, torch.Generator)]
        self.log.append((name, len(args), bits(values), bits(kwargs or {})))
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Record the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.log.append(str(function))
        return function(*args, **(kwargs or {}))


class Logged(torch.Tensor):
    """A tensor that records the functions that it goes through."""

    log: list[str] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.log.append(getattr(function, "__qualname__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


MODES = {"functions": Functions, "operators": Operators}


def models(name):
    """Build a layer in containers: itself, in a Sequential, and as an attribute."""
    make, _shape = LAYERS[name]
    seed()
    layer = make()
    yield "itself", layer
    yield "Sequential", nn.Sequential(nn.Identity(), layer)
    yield "attribute", holder_of(TORCH, nn.Sequential(layer))


@for_each("name", LAYERS)
def test_mode_sees_the_same_calls(name):
    """A mode of torch sees the same functions, or operators, in the same order inside."""

    def scenario(scope):
        seen = {}
        for training, kind in itertools.product((False, True), MODES):
            for container, model in models(name):
                model.train(training)
                x = input_for(name, LAYERS[name][1])
                mode = MODES[kind]()
                key = training, kind, container
                with torch.no_grad(), scope(model):
                    seed()
                    with mode:
                        seen[key, "result"] = outcome(lambda: model(x))
                    seed()
                    with mode, scope(model):
                        seen[key, "entered in the mode"] = outcome(lambda: model(x))
                seen[key, "log"] = mode.log
        return seen

    assert differing_keys(scenario) == []


@for_each("name", LAYERS)
def test_tensor_subclass(name):
    """A subclass of Tensor, as input or as weight, sees the same functions inside."""

    def scenario(scope):
        seen = {}
        for place, (container, model) in itertools.product(
            ("input", "weight", "both", "bias"), models(name)
        ):
            model.eval()
            Logged.log = []
            x = input_for(name, LAYERS[name][1])
            with torch.no_grad(), scope(model):
                seen[place, container, "before"] = outcome(lambda: model(x))
                if place in {"weight", "both", "bias"}:
                    for module in model.modules():
                        key = "bias" if place == "bias" else "weight"
                        if isinstance(module._parameters.get(key), nn.Parameter):
                            data = module._parameters[key].detach().as_subclass(Logged)
                            module._parameters[key] = nn.Parameter(data)
                if place in {"input", "both"}:
                    x = x.as_subclass(Logged)
                seed()
                seen[place, container, "result"] = outcome(lambda: model(x))
            seen[place, container, "log"] = Logged.log
        return seen

    assert differing_keys(scenario) == []


def operations(graph):
    """Return what a graph does, without the places where it reads parameters."""
    return [(node.op, str(node.target)) for node in graph.nodes if node.op != "get_attr"]


def fx_graph(scope, impl):
    """`torch.fx.symbolic_trace` inside gives the operations that it gives outside.

    Where a parameter is read may differ, since fx patches ``__getattr__`` to see it.
    """
    model = net(impl)
    with scope(model):
        traced = fx.symbolic_trace(model)
        result = traced(batch())
    return operations(traced.graph), result, list(traced.state_dict()), traced(batch())


def unmangled(graph):
    """Return a graph's text without the numbers that tell equal class names apart."""
    return re.sub(r"___torch_mangle_\d+\.", "", str(graph))


def jit_trace(scope, impl):
    """`torch.jit.trace` inside records the same graph."""
    model = net(impl)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with scope(model):
            traced = torch.jit.trace(model, batch())
            part = torch.jit.trace(model.head[1], torch.ones(2, 6))
            inside = traced(batch())
    graphs = [unmangled(traced.graph), unmangled(traced.inlined_graph), part.code]
    return inside, traced(batch(2)), graphs


def make_fx_inside(scope, impl):
    """`make_fx` records the same operators inside."""
    model = net(impl)
    with scope(model), torch.no_grad():
        return [make_fx(part)(x).code for part, x in ((model, batch()), (model.stem, batch()))]


def forward_gradients_and_checkpointing(scope, impl):
    """Forward-mode gradients and activation checkpointing give the same results inside."""
    model = net(impl)
    with scope(model):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(batch(), torch.ones(3, 4))
            tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
        x = batch().requires_grad_()
        output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        output.sum().backward()
        parts = torch.utils.checkpoint.checkpoint_sequential(
            model.stem, 2, batch().requires_grad_(), use_reentrant=False
        )
    return tangent, output, x.grad, [p.grad for p in model.parameters()], parts


def compile_and_export(scope, impl):
    """`torch.compile` and `torch.export` inside, and a compiled model inside, give the same."""
    torch._dynamo.reset()
    model, seen = net(impl).eval(), []
    with torch.no_grad():
        with scope(model):
            seen.append(torch.compile(model, backend="eager", fullgraph=True)(batch()))
        outside = torch.compile(model, backend="eager")
        seen.append(outside(batch()))
        with scope(model):
            seen.append(outside(batch()))
        with scope(outside):
            seen += [outside(batch()), model(batch())]
        with scope(model):
            model.head.compile(backend="eager")
            seen += [model(batch())]
            exported = torch.export.export(net(impl).eval(), (batch(),))
            with scope(exported.module()) as module:
                seen.append(module(batch()))
        seen += [outside(batch()), model(batch())]
    return seen, left_behind(model)


SCENARIOS = (
    fx_graph,
    jit_trace,
    make_fx_inside,
    forward_gradients_and_checkpointing,
    compile_and_export,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_transformation(impl, scenario):
    """Tracing or transforming a network gives the same results inside."""
    result = same_inside(lambda scope: scenario(scope, impl))

    assert result[0] == "returned"
