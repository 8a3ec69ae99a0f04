"""Changes that a user makes to a network of `nets`: statements by name, in groups."""

import contextlib
import copy
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune


def extra(width: int = 6, out: int = 6) -> nn.Linear:
    """Make a layer with weights that tell it from all others."""
    layer = nn.Linear(width, out)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, layer.weight.numel()).view_as(layer.weight))
    return layer


def full(value: float) -> torch.Tensor:
    """Make a tensor of the width of the network."""
    return torch.full((6,), value)


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Double a weight."""
        return 2 * weight


def scale(net: Any) -> None:
    """Change all parameters in place."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)


def load(net: Any, **options: Any) -> None:
    """Load other values."""
    state = {key: value.clone() for key, value in net.state_dict().items()}
    for value in state.values():
        if value.is_floating_point():
            value.mul_(0.5)
    net.load_state_dict(state, **options)


def fill(net: Any) -> None:
    """Give every tensor a value."""
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(1)


def old_weight_norm(layer: nn.Module) -> None:
    """Normalize the weight with a hook."""
    with contextlib.suppress(FutureWarning):
        nn.utils.weight_norm(layer)


_NAMES = {
    "copy": copy,
    "F": F,
    "nn": nn,
    "torch": torch,
    "Parameter": nn.Parameter,
    "OrderedDict": OrderedDict,
    "parametrizations": parametrizations,
    "parametrize": parametrize,
    "prune": prune,
    "Double": Double,
    "extra": extra,
    "full": full,
    "scale": scale,
    "load": load,
    "fill": fill,
    "old_weight_norm": old_weight_norm,
}


def make(net: Any, change: str) -> None:
    """Run the statements of a change."""
    exec(change, {**_NAMES, "net": net})


STRUCTURE = {
    "setattr": "net.blocks[0].fc = extra()",
    "setattr parameter": "net.blocks[0].scale = Parameter(torch.zeros(6))",
    "setattr buffer": "net.blocks[0].shift = torch.ones(6)",
    "delattr": "del net.blocks[0].fc",
    "delattr parameter": "del net.blocks[0].scale",
    "add_module": "net.stem.add_module('last', extra())",
    "register_parameter": "net.blocks[0].register_parameter('scale', None)",
    "register_buffer": "net.blocks[0].register_buffer('shift', torch.ones(6))",
    "set_submodule": "net.set_submodule('blocks.0.fc', extra())",
    "modules of a block": "net.blocks[0]._modules['fc'] = extra()",
    "modules of a Sequential": "net.stem._modules['2'] = nn.Tanh()",
    "Sequential with None": "net.stem._modules['1'] = None",
    "append": "net.stem.append(extra())",
    "insert": "net.stem.insert(1, extra())",
    "setitem": "net.stem[2] = nn.Sigmoid()",
    "delitem": "del net.stem[1]",
    "pop": "net.head[1].pop(0)",
    "list append": "net.blocks.append(extra())",
    "list setitem": "net.blocks[0] = extra()",
    "dict setitem": "net.named['a'] = extra()",
    "dict clear": "net.named.clear()",
    "swapped layers": "net.stem[2], net.head[1][0] = net.head[1][0], net.stem[2]",
    "replaced table": "net.head._modules = OrderedDict(list(net.head._modules.items())[:2])",
    "replaced parameters": "net.blocks[0]._parameters = {'scale': Parameter(full(-1.0))}",
    "replaced parameters of a layer": (
        "weight = Parameter(net.stem[0].weight.detach() * 2)\n"
        "net.stem[0]._parameters = {'weight': weight, 'bias': None}"
    ),
    "cleared": "net.head._modules.clear()",
    "popped": "net.stem._modules.pop('1')",
    "updated": "net.stem._modules.update({'3': extra(), '1': nn.Identity()})",
    "merged": "net.stem._modules |= {'3': extra()}",
    "set default": (
        "net.stem._modules.setdefault('3', extra())\nnet.stem._modules.setdefault('0', extra())"
    ),
    "popped item": "net.head._modules.popitem()",
    "reordered": "net.stem._modules['1'], net.stem._modules['2'] = net.stem[2], net.stem[1]",
    "buffers": (
        "net.blocks[0]._buffers['shift'] = full(2.0)\n"
        "net.stem[1]._buffers['running_mean'] = full(0.5)"
    ),
    "parameters": (
        "net.blocks[0]._parameters['scale'] = Parameter(full(2.0))\n"
        "net.stem[0]._parameters['bias'] = None"
    ),
    "plain attribute over a module": "net.blocks[0].__dict__['fc'] = F.relu",
    "plain attribute over a parameter": (
        "net.blocks[0].__dict__['scale'] = full(5.0)\n"
        "net.stem[0].__dict__['weight'] = torch.full((6, 4), 0.5)"
    ),
    "weight as an attribute": "del net.stem[0].weight\nnet.stem[0].weight = torch.full((6, 4), 0.5)",
    "class": (
        "cls = type(net.blocks[0])\n"
        "net.blocks[0].__class__ = type('Other', (cls,), {'forward': lambda self, x: -x})"
    ),
    "class of a layer": ("net.head[1][0].__class__ = nn.Sigmoid\nnet.stem[2].__class__ = nn.ReLU6"),
    "__dict__": "net.stem[0].__dict__ = dict(extra(4).__dict__)",
    "copies put in": (
        "net.blocks[1] = copy.deepcopy(net.blocks[0])\nnet.stem = copy.deepcopy(net.stem)"
    ),
}

ATTRIBUTES = {
    "train": "net.train()",
    "train of a layer": "net.stem[1].train()",
    "training of a layer": "net.stem[1].training = True",
    "training in __dict__": "net.stem[1].__dict__.update(training=True)",
    "dropout": "net.head[0].p = 0.5\nnet.train()",
    "dropout, bad p": "net.head[0].p = 2.0",
    "eps": "net.blocks[0].norm.eps = 0.1",
    "negative eps": "net.stem[1].eps = -1.0",
    "track_running_stats": "net.stem[1].track_running_stats = False",
    "no statistics": "net.stem[1].running_mean = None",
    "affine": "net.stem[1].affine = False",
    "inplace": "net.stem[2].inplace = True",
    "normalized_shape": "net.blocks[0].norm.normalized_shape = (3, 6)",
    "approximate": "net.head[1][2].approximate = 'tanh'",
    "deleted attribute": "del net.blocks[0].norm.eps",
    "deleted training": "del net.stem[1].training",
    "own attribute": "net.blocks[0].ratio = 2.0",
}

CONVERSION = {
    "double": "net.double()",
    "double and back": "net.double().float()",
    "meta": "net.to('meta')",
    "to_empty": "net.to_empty(device='cpu')\nfill(net)",
    "requires_grad_": "net.requires_grad_(False)",
    "apply": "net.apply(lambda m: nn.init.ones_(m.weight) if type(m) is nn.Linear else None)",
}

WEIGHTS = {
    "in place": "scale(net)",
    "data": (
        "net.stem[0].weight.data = net.stem[0].weight.data * 2\nnet.blocks[0].scale.data = full(3.0)"
    ),
    "swap_tensors": "torch.utils.swap_tensors(net.stem[0].bias, Parameter(full(0.25)))",
    "loaded": "load(net)",
    "loaded, assigned": "load(net, assign=True)",
    "loaded into a layer": (
        "state = {'weight': torch.ones(6, 4), 'bias': torch.zeros(6)}\n"
        "net.stem[0].load_state_dict(state, assign=True)"
    ),
    "parametrized": "parametrize.register_parametrization(net.stem[0], 'weight', Double())",
    "parametrized and back": (
        "parametrize.register_parametrization(net.stem[0], 'weight', Double())\n"
        "parametrize.remove_parametrizations(net.stem[0], 'weight')"
    ),
    "weight_norm": "parametrizations.weight_norm(net.head[2])",
    "hook-based weight_norm": "old_weight_norm(net.stem[0])",
    "pruned": "prune.l1_unstructured(net.stem[0], 'weight', amount=0.5)",
}
