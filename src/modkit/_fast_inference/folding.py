"""Folding a BatchNorm into the convolution before it.

In evaluation mode a BatchNorm is an affine function for each channel, so one convolution with other
weights computes both. The convolution's function computes the result with these weights and marks
it, and the BatchNorm's function returns a marked tensor as it is. Neither module is changed, and
each still works where it is called without the other.
"""

import copy
from collections import Counter
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from modkit._fast_inference.layers import is_container, kind_of
from modkit._fast_inference.members import CALL_SLOT
from modkit._fast_inference.runs import Call, Step, function_of


# The classes whose pairs can be folded.
_FOLDED: Final = {(getattr(nn, f"Conv{n}d"), getattr(nn, f"BatchNorm{n}d")) for n in (1, 2, 3)}
# The fused weights have no graph to the original ones, so gradients are left to torch's own path,
# and so is an input without a batch dimension, which a BatchNorm refuses.
_CONDITION: Final = "not is_grad_enabled() and x.dim() == len(self.kernel_size) + 2"


def folds_of(model: nn.Module, modules: list[nn.Module]) -> dict[int, Call]:
    """Return the functions of all convolutions and BatchNorms to fold."""
    holders = {id(child): (m, name) for m in modules for name, child in m._modules.items()}
    uses = Counter(id(child) for m in modules for child in m._modules.values())

    folds: dict[int, Call] = {}
    for conv, norm in _pairs(model, modules):
        # A layer in two places has another layer behind it, or before it, in each.
        once = uses[id(conv)] == 1 and uses[id(norm)] == 1
        if once and (type(conv), type(norm)) in _FOLDED:
            holder, name = holders[id(norm)]
            folds |= _fold(conv, norm, holder, name)
    return folds


def _pairs(model: nn.Module, modules: list[nn.Module]) -> list[tuple[Any, Any]]:
    """Return the modules of which the second, and nothing else, takes the result of the first."""
    tracer = torch.fx.Tracer()
    # In a copy, since user code may change its module.
    try:
        with torch.random.fork_rng(devices=[]):
            graph = tracer.trace(copy.deepcopy(model))
    except Exception:  # noqa: BLE001 - user code may raise anything for proxies
        containers = (module for module in modules if is_container(type(module)))
        return [pair for container in containers for pair in pairwise(container._modules.values())]
    finally:
        # A trace is a reference cycle, which would keep the copy and its weights.
        vars(tracer).clear()

    calls: dict[Any, Any] = {node: node.target for node in graph.nodes if node.op == "call_module"}
    uses = Counter(calls.values())
    pairs: list[tuple[Any, Any]] = []
    for node, target in calls.items():
        if len(node.args) != 1 or node.kwargs or node.args[0] not in calls:
            continue
        before = node.args[0]
        # Both are called once, and nothing else sees the result between them.
        if len(before.users) == 1 and uses[target] == 1 and uses[calls[before]] == 1:
            pairs.append((model.get_submodule(calls[before]), model.get_submodule(target)))
    return pairs


def _fold(conv: Any, norm: Any, holder: nn.Module, name: str) -> dict[int, Call]:
    """Return the functions of a convolution and of the BatchNorm ``name`` of ``holder``."""
    conv_kind = kind_of(type(conv))
    norm_kind = kind_of(type(norm))
    if conv_kind is None or norm_kind is None:
        # A patched class, for instance, keeps torch's own path.
        return {}

    cache: list[Any] = []
    convolve = dict(conv_kind.methods)["_conv_forward"]
    exact = function_of([Step(norm, norm_kind)])

    def run(x: Any) -> Any:
        # Another BatchNorm in its place, or one that the block has left, would not look at the
        # mark.
        is_there = holder._modules.get(name) is norm and vars(norm).get(CALL_SLOT) is normalize
        weights = _weights(conv, norm, cache) if is_there else None
        if weights is None:
            return conv_kind.forward(conv, x)

        result = convolve(conv, x, *weights)
        # The mark is on the tensor, not kept beside the layers: another thread may call them at the
        # same time, and user code may pass the BatchNorm another tensor. ``normalize`` removes it,
        # so it stays on a tensor only where the convolution is called without the BatchNorm.
        result.folded_into = norm
        return result

    def normalize(*args: Any, **kwargs: Any) -> Any:
        if not args or getattr(args[0], "folded_into", None) is not norm:
            return exact(*args, **kwargs)
        del args[0].folded_into
        return args[0]

    # The steps only check that nothing but the two computations would run: ``run`` computes both.
    conv_check = conv_kind.layer._replace(expression="x", input_condition=_CONDITION)
    norm_check = norm_kind.layer._replace(expression="x", input_condition="")
    steps = [
        Step(conv, conv_kind._replace(layer=conv_check)),
        Step(norm, norm_kind._replace(layer=norm_check)),
    ]
    return {id(conv): function_of(steps, run=run), id(norm): normalize}


def _weights(conv: Any, norm: Any, cache: list[Any]) -> Any:
    """Return weight and bias of both in one, from the cache if nothing has changed.

    None if changes of the tensors are not counted, as for those that inference mode has made.
    """
    sources = [conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias]
    tensors = [tensor for tensor in sources if tensor is not None]
    try:
        stamp = [norm.eps, *((tensor._version, tensor.data_ptr()) for tensor in tensors)]
    except RuntimeError:
        return None

    if not cache or cache[0] != stamp:
        fuse: Any = fuse_conv_bn_weights
        fused = fuse(
            conv.weight,
            conv.bias,
            norm.running_mean,
            norm.running_var,
            norm.eps,
            norm.weight,
            norm.bias,
        )
        # The aliases keep the memory, so no other tensor can take its address.
        aliases = [tensor.detach() for tensor in tensors]
        cache[:] = stamp, [tensor.detach() for tensor in fused], aliases
    return cache[1]
