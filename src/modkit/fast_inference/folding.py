"""Folding a BatchNorm into the convolution before it."""

import copy
from collections import Counter
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from modkit.fast_inference.layers import is_container, kind_of
from modkit.fast_inference.members import CALL_SLOT
from modkit.fast_inference.runs import Call, Step, function_of


_FOLDED: Final = {(getattr(nn, f"Conv{n}d"), getattr(nn, f"BatchNorm{n}d")) for n in (1, 2, 3)}
_CONDITION: Final = "not is_grad_enabled() and x.dim() == len(self.kernel_size) + 2"


def folds_of(model: nn.Module, modules: list[nn.Module]) -> dict[int, Call]:
    """Return the functions of all convolutions and BatchNorms to fold, by the identity of the layer."""
    places = [(id(child), (one, name)) for one in modules for name, child in one._modules.items()]
    uses, place = Counter(child for child, _ in places), dict(places)
    folds: dict[int, Call] = {}
    for first, second in _pairs(model, modules):
        if (type(first), type(second)) in _FOLDED and uses[id(first)] == uses[id(second)] == 1:
            folds |= _fold(first, second, *place[id(second)])
    return folds


def _pairs(model: nn.Module, modules: list[nn.Module]) -> list[tuple[Any, Any]]:
    """Return the modules of which the second, and nothing else, takes the result of the first."""
    tracer = torch.fx.Tracer()
    try:  # in a copy, since user code may change its module
        with torch.random.fork_rng(devices=[]):
            graph = tracer.trace(copy.deepcopy(model))
    except Exception:  # noqa: BLE001 - user code may raise anything for proxies
        containers = (one for one in modules if is_container(type(one)))
        return [pair for one in containers for pair in pairwise(one._modules.values())]
    finally:
        vars(tracer).clear()  # A trace is a reference cycle, which would keep the copy.
    calls: dict[Any, Any] = {node: node.target for node in graph.nodes if node.op == "call_module"}
    uses = Counter(calls.values())
    return [
        (model.get_submodule(calls[node.args[0]]), model.get_submodule(target))
        for node, target in calls.items()
        if len(node.args) == 1 and not node.kwargs and node.args[0] in calls
        if len(node.args[0].users) == uses[target] == uses[calls[node.args[0]]] == 1
    ]


def _fold(conv: Any, norm: Any, holder: nn.Module, name: str) -> dict[int, Call]:
    kinds: Any = kind_of(type(conv)), kind_of(type(norm))
    if None in kinds:
        return {}
    cache: list[Any] = []
    exact = function_of([Step(norm, kinds[1])])

    def run(x: Any) -> Any:
        is_there = holder._modules.get(name) is norm and vars(norm).get(CALL_SLOT) is normalize
        weights = _weights(conv, norm, cache) if is_there else None
        if weights is None:
            return kinds[0].forward(conv, x)
        result = dict(kinds[0].methods)["_conv_forward"](conv, x, *weights)
        result.folded_into = norm
        return result

    def normalize(*args: Any, **kwargs: Any) -> Any:
        if not args or getattr(args[0], "folded_into", None) is not norm:
            return exact(*args, **kwargs)
        del args[0].folded_into
        return args[0]

    # The steps only check that nothing but the two computations would run.
    steps = [
        Step(one, kind._replace(layer=kind.layer._replace(expression="x", input_condition=text)))
        for one, kind, text in zip((conv, norm), kinds, (_CONDITION, ""), strict=True)
    ]
    return {id(conv): function_of(steps, run=run), id(norm): normalize}


def _weights(conv: Any, norm: Any, cache: list[Any]) -> Any:
    """Return weight and bias of both in one; None if their changes are not counted (inference mode)."""
    sources = [conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias]
    tensors = [tensor for tensor in sources if tensor is not None]
    try:
        stamp = [norm.eps, *((one._version, one.data_ptr()) for one in tensors)]
    except RuntimeError:
        return None
    if not cache or cache[0] != stamp:
        fuse: Any = fuse_conv_bn_weights
        fused = fuse(*sources[:4], norm.eps, *sources[4:])
        # The aliases keep the memory, so no other tensor can take its address.
        cache[:] = stamp, [one.detach() for one in fused], [one.detach() for one in tensors]
    return cache[1]
