"""Folding a BatchNorm into the convolution before it."""

import copy
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's layers call it so
from torch.nn.utils.fusion import fuse_conv_bn_weights

from modkit.fast_inference.layers import is_container, kind_of
from modkit.fast_inference.runs import Call, Step, function_of


_FOLDABLE: Final[dict[type, tuple[type, Callable[..., torch.Tensor]]]] = {
    getattr(nn, f"Conv{n}d"): (getattr(nn, f"BatchNorm{n}d"), getattr(F, f"conv{n}d"))
    for n in (1, 2, 3)
}
_version: Final = attrgetter("_version")


class Fold:
    """A convolution whose result goes to a BatchNorm alone, and where the BatchNorm has its place."""

    def __init__(self, convolution: Any, norm: Any, place: tuple[nn.Module, str]) -> None:
        self.convolution, self.norm = convolution, norm
        self._place = place
        self._operation = _FOLDABLE[type(convolution)][1]
        self._cache: tuple[Any, list[torch.Tensor], list[torch.Tensor]] | None = None

    def functions(self) -> dict[int, Call]:
        """Return what is called in place of each of the two, by identity."""
        plain: list[Call] = []
        checks: list[Step] = []
        for module in (self.convolution, self.norm):
            kind = kind_of(type(module))
            if kind is None:
                return {}
            plain.append(function_of([Step(module, kind)]))
            layer = kind.layer._replace(expression="x", input_condition="")
            checks.append(Step(module, kind._replace(layer=layer)))

        def convolve(x: Any) -> Any:
            state = self.convolution.__dict__
            holder, name = self._place
            if (
                torch.is_grad_enabled()
                or not isinstance(x, torch.Tensor)
                or x.dim() != 2 + len(state["kernel_size"])
                or holder._modules.get(name) is not self.norm
            ):
                return plain[0](x)
            if (weights := self._weights()) is None:
                return plain[0](x)
            options = (state[name] for name in ("stride", "padding", "dilation", "groups"))
            result: Any = self._operation(x, *weights, *options)
            result.folded_into = self
            return result

        def normalize(*args: Any, **kwargs: Any) -> Any:
            if not args or getattr(args[0], "folded_into", None) is not self:
                return plain[1](*args, **kwargs)
            del args[0].folded_into
            return args[0]

        return {id(self.convolution): function_of(checks, run=convolve), id(self.norm): normalize}

    def _weights(self) -> list[torch.Tensor] | None:
        """Return weight and bias of both in one; None if their changes are not counted (inference mode)."""
        convolution, norm = self.convolution.__dict__, self.norm.__dict__
        sources: list[Any] = [convolution["weight"], convolution["bias"]]
        sources += [norm[name] for name in ("running_mean", "running_var", "weight", "bias")]
        there = [tensor for tensor in sources if tensor is not None]
        try:
            stamp = [*map(_version, there), *map(torch.Tensor.data_ptr, there), norm["eps"]]
        except RuntimeError:
            return None
        if self._cache is None or self._cache[0] != stamp:
            fuse: Any = fuse_conv_bn_weights
            weights = [one.detach() for one in fuse(*sources[:4], norm["eps"], *sources[4:])]
            # The aliases keep the memory, so no other tensor can take its address.
            self._cache = stamp, weights, [tensor.detach() for tensor in there]
        return self._cache[1]


def folds_of(model: nn.Module) -> list[Fold]:
    """Find the pairs: in a graph of the model if it can be traced, or else in containers."""
    pairs: Any = _traced_pairs(model)
    if pairs is None:
        containers = (one for one in model.modules() if is_container(type(one)))
        pairs = [pair for one in containers for pair in pairwise(one._modules.values())]
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    places = {
        id(child): (holder, name)
        for holder in model.modules()
        for name, child in holder._modules.items()
    }
    return [
        Fold(first, second, places[id(second)])
        for first, second in pairs
        if type(first) in _FOLDABLE
        and type(second) is _FOLDABLE[type(first)][0]
        and uses[id(first)] == uses[id(second)] == 1
    ]


def _traced_pairs(model: nn.Module) -> list[tuple[Any, Any]] | None:
    """Return the modules of which the second, and nothing else, takes the result of the first."""
    root: nn.Module | None = None
    try:  # in a copy, since user code may change its module
        with torch.random.fork_rng(devices=[]):
            root = copy.deepcopy(model)
            graph = torch.fx.Tracer().trace(root)
    except Exception:  # noqa: BLE001 - what user code raises for proxies can be anything
        return None
    finally:
        # A trace stays behind as a cycle, which would keep the weights of the copy.
        kept = set(map(id, model.modules()))
        for module in [] if root is None else list(root.modules()):
            if id(module) not in kept:
                module.__dict__.clear()
    calls = {node: node.target for node in graph.nodes if node.op == "call_module"}
    uses = Counter(calls.values())
    return [
        (model.get_submodule(calls[node.args[0]]), model.get_submodule(node.target))
        for node in calls
        if len(node.args) == 1 and not node.kwargs and node.args[0] in calls
        if len(node.args[0].users) == uses[node.target] == uses[calls[node.args[0]]] == 1
    ]
