"""Models and averages that are changed between updates."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.averaging.rules import RULES, training_states


SIZES = {"small": 3, "large": 9}
Change = Callable[[Implementation, Any, Any], None]


def layers(impl: Implementation, count: int) -> torch.nn.Module:
    """Build linear layers of one shape, and a normalization with buffers."""
    torch.manual_seed(count)
    nn = impl.nn
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count - 1)), nn.BatchNorm1d(2))


def linear(impl: Implementation, seed: int = 0, **options: Any) -> torch.nn.Module:
    """Build one more layer, the same each time."""
    torch.manual_seed(seed)
    return impl.nn.Linear(2, 2, **options)


# --- changes of the model and its copy --------------------------------------------------------------


def both(change: Callable[[Implementation, Any], None]) -> Change:
    """Make the same change in the model and in the averaged copy."""

    def change_both(impl: Implementation, model: Any, averaged: Any) -> None:
        change(impl, model)
        change(impl, averaged.module)

    return change_both


def drop_many(net: Any) -> None:
    """Drop every second of the linear layers."""
    for place in reversed(range(0, len(net) - 1, 2)):
        net.pop(place)


def untie(impl: Implementation, net: Any) -> None:
    """Tie two layers, and give one of them a weight of its own again."""
    net[1].weight = net[0].weight
    net[1].weight = torch.nn.Parameter(net[0].weight.detach().clone())


def grow_and_shrink(impl: Implementation, net: Any) -> None:
    """Insert a layer, drop another one, and append a third."""
    net.insert(1, linear(impl, 1))
    net.pop(0)
    net.append(linear(impl, 2))


BOTH: dict[str, Callable[[Implementation, Any], object]] = {
    "nothing": lambda impl, net: None,
    "pop the first": lambda impl, net: net.pop(0),
    "pop the last": lambda impl, net: net.pop(len(net) - 1),
    "drop many": lambda impl, net: drop_many(net),
    "insert": lambda impl, net: net.insert(1, linear(impl)),
    "move": lambda impl, net: net.insert(0, net.pop(1)),
    "rename": lambda impl, net: net.add_module("renamed", net.pop(0)),
    "grow and shrink": grow_and_shrink,
    "replace by a smaller one": lambda impl, net: net.__setitem__(1, linear(impl, bias=False)),
    "replace by one of another size": lambda impl, net: net.__setitem__(1, impl.nn.Linear(2, 3)),
    "wrap a layer": lambda impl, net: net.__setitem__(1, impl.nn.Sequential(net[1])),
    "remove a bias": lambda impl, net: net[1].register_parameter("bias", None),
    "remove a weight": lambda impl, net: net[1].register_parameter("weight", None),
    "add a parameter": lambda impl, net: net[0].register_parameter(
        "more", impl.nn.Parameter(torch.ones(2))
    ),
    "untie": untie,
    "freeze": lambda impl, net: net[0].requires_grad_(False),
    "cast a layer": lambda impl, net: net[1].double(),
    "add a buffer": lambda impl, net: net[0].register_buffer("mean", torch.ones(2)),
    "remove a buffer": lambda impl, net: net[-1].register_buffer("running_mean", None),
    "replace a buffer": lambda impl, net: setattr(net[-1], "running_mean", torch.ones(2)),
}


# --- changes of one of the two ------------------------------------------------------------------------


def load(net: Any, *, assign: bool) -> None:
    """Load a state into the tensors, or in place of the parameters."""
    state = {name: tensor * 2 for name, tensor in net.state_dict().items()}
    net.load_state_dict(state, assign=assign, strict=False)


def set_data(net: Any, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    """Give two weights other memory."""
    net[0].weight.data, net[1].weight.data = change(net[0].weight.data, net[1].weight.data)


def rebind(module: Any, table: str) -> None:
    """Give a module another table, with other tensors under the same names."""
    entries = getattr(module, table).items()
    changed = {name: torch.nn.Parameter(entry.detach() * 3.0) for name, entry in entries}
    setattr(module, table, changed)


def set_state(net: Any) -> None:
    """Give a layer all that another one is, as code that restores pickled objects does."""
    net[0].__setstate__(copy.deepcopy(net[1]).__getstate__())


def set_gradients(net: Any) -> None:
    """Give all parameters gradients."""
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)


ONE: dict[str, Callable[[Any], object]] = {
    "assign": lambda net: load(net, assign=True),
    "load": lambda net: load(net, assign=False),
    "assign data": lambda net: set_data(net, lambda a, b: (a, b * 3)),
    "transpose": lambda net: set_data(net, lambda a, b: (a, b.t())),
    "exchange data": lambda net: set_data(net, lambda a, b: (b, a)),
    "share data": lambda net: set_data(net, lambda a, b: (a, a)),
    "swap tensors": lambda net: torch.utils.swap_tensors(net[0].weight, net[1].weight),
    "replace a parameter": lambda net: setattr(
        net[1], "weight", torch.nn.Parameter(torch.full((2, 2), 3.0))
    ),
    "rebind parameters": lambda net: rebind(net[0], "_parameters"),
    "rebind children": lambda net: setattr(net, "_modules", copy.deepcopy(net._modules)),
    "update the dict": lambda net: vars(net[0]).update(vars(copy.deepcopy(net[1]))),
    "set the state": set_state,
    "set gradients": set_gradients,
    "cast and return": lambda net: net.double().float(),
    "freeze": lambda net: net.requires_grad_(False),
    "eval": lambda net: net.eval(),
    "share_memory": lambda net: net.share_memory(),
    "clone": lambda net: net._apply(lambda tensor: tensor.clone()),
    "write in inference mode": torch.inference_mode()(lambda net: net[0].weight.fill_(2.0)),
}


CHANGES: dict[str, Change] = {
    **{f"both: {name}": both(change) for name, change in BOTH.items()},
    **{
        f"model: {name}": lambda impl, model, averaged, change=change: change(model)
        for name, change in ONE.items()
    },
    **{
        f"copy: {name}": lambda impl, model, averaged, change=change: change(averaged.module)
        for name, change in ONE.items()
    },
}


def run(
    impl: Implementation, size: str, rule: str, use_buffers: bool, change: Change
) -> list[dict[str, torch.Tensor]]:
    """Update, change, update, and make a second change; return the states."""
    model = layers(impl, SIZES[size])
    averaged = impl.AveragedModel(model, **RULES[rule](impl), use_buffers=use_buffers)
    if use_buffers:
        # Torch averages integers too, or fails to.
        for net in model, averaged.module:
            net[-1].num_batches_tracked = None
    states = []
    for step in training_states(model, 5):
        if step in {2, 4}:
            change(impl, model, averaged)
        averaged.update_parameters(model)
        states.append({name: one.clone() for name, one in averaged.state_dict().items()})
    return states


@for_each(
    ("size", "rule", "use_buffers"),
    [("small", "multi_avg_fn ema", True), ("large", "default", False)],
)
@for_each("change", CHANGES)
def test_updates_after_a_change_are_those_of_torch(
    size: str, rule: str, use_buffers: bool, change: str
) -> None:
    """Whatever changes in both models or in one, all later updates give the bits of torch."""
    found = same(lambda impl: run(impl, size, rule, use_buffers, CHANGES[change]))

    assert found[0] == "returned"


def test_the_copy_may_be_replaced_again_and_again(impl: Implementation) -> None:
    """Also if another copy is where one was that is gone."""
    model = linear(impl)
    average = impl.AveragedModel(model)
    for value in map(float, range(30)):
        copied = copy.deepcopy(model)
        del average.module
        average.module = copied
        del copied
        average.n_averaged.zero_()
        torch.nn.init.constant_(model.weight, value)
        average.update_parameters(model)

        assert (average.module.weight == value).all()
