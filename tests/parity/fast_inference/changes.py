"""Changes that a user makes to a network of `nets`, each a function of the network."""

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


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Double a weight."""
        return 2 * weight


def _in_place(net: Any) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)


def _data(net: Any) -> None:
    net.stem[0].weight.data = net.stem[0].weight.data * 2
    net.blocks[0].scale.data = torch.full((6,), 3.0)


def _set_data(net: Any) -> None:
    torch.utils.swap_tensors(net.stem[0].bias, nn.Parameter(torch.full((6,), 0.25)))


def _load(net: Any, **options: Any) -> None:
    state = {key: value.clone() for key, value in net.state_dict().items()}
    for value in state.values():
        if value.is_floating_point():
            value.mul_(0.5)
    net.load_state_dict(state, **options)


def _emptied(net: Any) -> None:
    net.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.fill_(1)


def _swap_layers(net: Any) -> None:
    net.stem[2], net.head[1][0] = net.head[1][0], net.stem[2]


def _modules_of_a_block(net: Any) -> None:
    net.blocks[0]._modules["fc"] = extra()


def _replaced_table(net: Any) -> None:
    net.head._modules = OrderedDict(list(net.head._modules.items())[:2])


def _replaced_parameters(net: Any) -> None:
    net.blocks[0]._parameters = {"scale": nn.Parameter(torch.full((6,), -1.0))}


def _replaced_layer_parameters(net: Any) -> None:
    layer = net.stem[0]
    layer._parameters = {"weight": nn.Parameter(layer.weight.detach() * 2), "bias": None}


def _cleared_modules(net: Any) -> None:
    net.head._modules.clear()


def _popped(net: Any) -> None:
    net.stem._modules.pop("1")


def _updated(net: Any) -> None:
    net.stem._modules.update({"3": extra(), "1": nn.Identity()})


def _merged(net: Any) -> None:
    net.stem._modules |= {"3": extra()}


def _set_default(net: Any) -> None:
    net.stem._modules.setdefault("3", extra())
    net.stem._modules.setdefault("0", extra())


def _popped_item(net: Any) -> None:
    net.head._modules.popitem()


def _reordered(net: Any) -> None:
    net.stem._modules["1"], net.stem._modules["2"] = net.stem[2], net.stem[1]


def _buffers(net: Any) -> None:
    net.blocks[0]._buffers["shift"] = torch.full((6,), 2.0)
    net.stem[1]._buffers["running_mean"] = torch.full((6,), 0.5)


def _parameters(net: Any) -> None:
    net.blocks[0]._parameters["scale"] = nn.Parameter(torch.full((6,), 2.0))
    net.stem[0]._parameters["bias"] = None


def _plain_over_module(net: Any) -> None:
    net.blocks[0].__dict__["fc"] = F.relu


def _plain_over_parameter(net: Any) -> None:
    net.blocks[0].__dict__["scale"] = torch.full((6,), 5.0)
    net.stem[0].__dict__["weight"] = torch.full((6, 4), 0.5)


def _weight_as_attribute(net: Any) -> None:
    del net.stem[0].weight
    net.stem[0].weight = torch.full((6, 4), 0.5)


def _class(net: Any) -> None:
    class Other(type(net.blocks[0])):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    net.blocks[0].__class__ = Other


def _layer_class(net: Any) -> None:
    net.head[1][0].__class__ = nn.Sigmoid
    net.stem[2].__class__ = nn.ReLU6


def _dict(net: Any) -> None:
    other = extra(4)
    net.stem[0].__dict__ = dict(other.__dict__)


def _parametrized_and_back(net: Any) -> None:
    parametrize.register_parametrization(net.stem[0], "weight", Double())
    parametrize.remove_parametrizations(net.stem[0], "weight")


def _old_weight_norm(net: Any) -> None:
    with contextlib.suppress(FutureWarning):
        nn.utils.weight_norm(net.stem[0])


def _copy_put_in(net: Any) -> None:
    net.blocks[1] = copy.deepcopy(net.blocks[0])
    net.stem = copy.deepcopy(net.stem)


STRUCTURE: dict[str, Any] = {
    "setattr": lambda net: setattr(net.blocks[0], "fc", extra()),
    "setattr parameter": lambda net: setattr(net.blocks[0], "scale", nn.Parameter(torch.zeros(6))),
    "setattr buffer": lambda net: setattr(net.blocks[0], "shift", torch.ones(6)),
    "delattr": lambda net: delattr(net.blocks[0], "fc"),
    "delattr parameter": lambda net: delattr(net.blocks[0], "scale"),
    "add_module": lambda net: net.stem.add_module("last", extra()),
    "register_parameter": lambda net: net.blocks[0].register_parameter("scale", None),
    "register_buffer": lambda net: net.blocks[0].register_buffer("shift", torch.ones(6)),
    "set_submodule": lambda net: net.set_submodule("blocks.0.fc", extra()),
    "modules of a block": _modules_of_a_block,
    "modules of a Sequential": lambda net: net.stem._modules.__setitem__("2", nn.Tanh()),
    "Sequential with None": lambda net: net.stem._modules.__setitem__("1", None),
    "append": lambda net: net.stem.append(extra()),
    "insert": lambda net: net.stem.insert(1, extra()),
    "setitem": lambda net: net.stem.__setitem__(2, nn.Sigmoid()),
    "delitem": lambda net: net.stem.__delitem__(1),
    "pop": lambda net: net.head[1].pop(0),
    "list append": lambda net: net.blocks.append(extra()),
    "list setitem": lambda net: net.blocks.__setitem__(0, extra()),
    "dict setitem": lambda net: net.named.__setitem__("a", extra()),
    "dict clear": lambda net: net.named.clear(),
    "swapped layers": _swap_layers,
    "replaced table": _replaced_table,
    "replaced parameters": _replaced_parameters,
    "replaced parameters of a layer": _replaced_layer_parameters,
    "cleared": _cleared_modules,
    "popped": _popped,
    "updated": _updated,
    "merged": _merged,
    "set default": _set_default,
    "popped item": _popped_item,
    "reordered": _reordered,
    "buffers": _buffers,
    "parameters": _parameters,
    "plain attribute over a module": _plain_over_module,
    "plain attribute over a parameter": _plain_over_parameter,
    "weight as an attribute": _weight_as_attribute,
    "class": _class,
    "class of a layer": _layer_class,
    "__dict__": _dict,
    "copies put in": _copy_put_in,
}

ATTRIBUTES: dict[str, Any] = {
    "train": lambda net: net.train(),
    "train of a layer": lambda net: net.stem[1].train(),
    "training of a layer": lambda net: setattr(net.stem[1], "training", True),
    "training in __dict__": lambda net: net.stem[1].__dict__.update(training=True),
    "dropout": lambda net: (setattr(net.head[0], "p", 0.5), net.train())[0],
    "dropout, bad p": lambda net: setattr(net.head[0], "p", 2.0),
    "eps": lambda net: setattr(net.blocks[0].norm, "eps", 0.1),
    "negative eps": lambda net: setattr(net.stem[1], "eps", -1.0),
    "track_running_stats": lambda net: setattr(net.stem[1], "track_running_stats", False),
    "no statistics": lambda net: setattr(net.stem[1], "running_mean", None),
    "affine": lambda net: setattr(net.stem[1], "affine", False),
    "inplace": lambda net: setattr(net.stem[2], "inplace", True),
    "normalized_shape": lambda net: setattr(net.blocks[0].norm, "normalized_shape", (3, 6)),
    "approximate": lambda net: setattr(net.head[1][2], "approximate", "tanh"),
    "deleted attribute": lambda net: delattr(net.blocks[0].norm, "eps"),
    "deleted training": lambda net: delattr(net.stem[1], "training"),
    "own attribute": lambda net: setattr(net.blocks[0], "ratio", 2.0),
}

CONVERSION: dict[str, Any] = {
    "double": lambda net: net.double(),
    "double and back": lambda net: net.double().float(),
    "meta": lambda net: net.to("meta"),
    "to_empty": _emptied,
    "requires_grad_": lambda net: net.requires_grad_(False),
    "apply": lambda net: net.apply(
        lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None
    ),
}

WEIGHTS: dict[str, Any] = {
    "in place": _in_place,
    "data": _data,
    "swap_tensors": _set_data,
    "loaded": _load,
    "loaded, assigned": lambda net: _load(net, assign=True),
    "loaded into a layer": lambda net: net.stem[0].load_state_dict(
        {"weight": torch.ones(6, 4), "bias": torch.zeros(6)}, assign=True
    ),
    "parametrized": lambda net: parametrize.register_parametrization(
        net.stem[0], "weight", Double()
    ),
    "parametrized and back": _parametrized_and_back,
    "weight_norm": lambda net: parametrizations.weight_norm(net.head[2]),
    "hook-based weight_norm": _old_weight_norm,
    "pruned": lambda net: prune.l1_unstructured(net.stem[0], "weight", amount=0.5),
}
