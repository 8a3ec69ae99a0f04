import copy
import pickle

import pytest
import torch
from torch import nn

import modkit.nn
from tests.helpers import freeze, seed_everything


def _net(outer, inner, innermost):
    """Build one network whose levels come from the given libraries."""

    class Block(outer.Module):
        def __init__(self):
            super().__init__()
            self.first = inner.Sequential(
                innermost.Conv2d(1, 2, 3), inner.BatchNorm2d(2), innermost.ReLU()
            )
            self.second = inner.ModuleDict({"head": innermost.Linear(18, 3)})
            self.scale = outer.Parameter(torch.ones(3))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return self.second["head"](self.first(x).flatten(1)) * self.scale

    seed_everything()
    return Block()


PLAIN = (nn, nn, nn)
MIXED = {
    "torch in modkit": (modkit.nn, nn, nn),
    "modkit in torch": (nn, modkit.nn, modkit.nn),
    "torch in modkit in torch": (nn, modkit.nn, nn),
    "modkit in torch in modkit": (modkit.nn, nn, modkit.nn),
    "modkit only": (modkit.nn, modkit.nn, modkit.nn),
}


def _train(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    seed_everything(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 1, 5, 5)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _hook_calls(net):
    seen = []
    for name, module in net.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(("pre", name)))
        module.register_forward_hook(lambda *_, name=name: seen.append(("post", name)))
        module.register_full_backward_hook(lambda *_, name=name: seen.append(("back", name)))
    net(torch.ones(2, 1, 5, 5, requires_grad=True)).sum().backward()
    return seen


def _load_into_fresh(net):
    fresh = copy.deepcopy(net)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    keys = fresh.load_state_dict(net.state_dict())
    return str(keys), dict(fresh.state_dict())


def _pre_hooks_of_state(net):
    seen = []
    for name, module in net.named_modules():
        module.register_state_dict_pre_hook(
            lambda m, prefix, _, name=name: seen.append((name, prefix))
        )
        module.register_load_state_dict_post_hook(lambda m, keys, name=name: seen.append(name))
    net.load_state_dict(net.state_dict())
    return seen


ACTIONS = {
    "train": _train,
    "hooks": _hook_calls,
    "state": lambda net: (dict(net.state_dict()), list(net.state_dict()._metadata.items())),
    "load": _load_into_fresh,
    "load_bad": lambda net: net.load_state_dict({"first.0.weight": torch.ones(1), "x": 1}),
    "state_hooks": _pre_hooks_of_state,
    "names": lambda net: [
        [name for name, _ in walk()]
        for walk in (net.named_modules, net.named_parameters, net.named_buffers, net.named_children)
    ],
    "eval": lambda net: [m.training for m in net.eval().modules()],
    "double": lambda net: [t.dtype for t in net.double().state_dict().values()],
    "meta": lambda net: [t.device.type for t in net.to("meta").parameters()],
    "to_empty": lambda net: [t.shape for t in net.to_empty(device="cpu").parameters()],
    "freeze": lambda net: [p.requires_grad for p in net.requires_grad_(False).parameters()],
    "apply": lambda net: [net.apply(lambda m: setattr(m, "mark", 1)).first[0].mark],
    "repr": repr,
    "submodule": lambda net: (net.get_submodule("first.0"), net.get_parameter("second.head.bias")),
    "missing": lambda net: net.get_submodule("first.9"),
    "functional_call": lambda net: torch.func.functional_call(
        net, {n: p * 2 for n, p in net.named_parameters()}, torch.ones(2, 1, 5, 5)
    ),
    "trace": lambda net: torch.jit.trace(net.eval(), torch.ones(2, 1, 5, 5), check_trace=False)(
        torch.ones(3, 1, 5, 5)
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("libraries", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("action", ACTIONS)
def test_mixed_network_behaves_as_a_plain_one(libraries, action):
    """A network with layers of both libraries does what the same network of torch does."""

    def outcome(net):
        try:
            return freeze(ACTIONS[action](net))
        except Exception as error:
            return type(error).__name__, str(error)

    assert outcome(_net(*libraries)) == outcome(_net(*PLAIN))


@pytest.mark.parametrize("parent", ["Sequential", "ModuleList"])
def test_copies_of_mixed_containers_keep_their_classes(parent):
    """Pickle and deepcopy keep the class of every module of a mixed container."""
    children = [nn.Linear(2, 2), modkit.nn.Linear(2, 2), modkit.nn.LSTM(2, 2), nn.GRU(2, 2)]
    for library in (nn, modkit.nn):
        made = getattr(library, parent)
        mixed = made(*children) if parent == "Sequential" else made(children)
        wanted = [type(module) for module in mixed.modules()]

        assert [type(module) for module in copy.deepcopy(mixed).modules()] == wanted
        assert [type(m) for m in pickle.loads(pickle.dumps(mixed)).modules()] == wanted


def test_class_can_be_swapped_both_ways():
    """An instance may change from torch's layer class to modkit's and back, keeping its state."""
    layer = nn.Linear(2, 3)
    x, weight = torch.ones(1, 2), layer.weight
    expected = freeze(layer(x))
    seen = []
    for cls in (modkit.nn.Linear, nn.Linear, modkit.nn.Linear):
        layer.__class__ = cls
        seen.append((type(layer), layer.weight is weight, freeze(layer(x)) == expected))

    assert seen == [(c, True, True) for c in (modkit.nn.Linear, nn.Linear, modkit.nn.Linear)]


def test_layer_initialized_by_torch_is_complete():
    """Libraries that call torch's initializer themselves get a working modkit layer."""

    class Own(modkit.nn.Linear):
        def __init__(self):
            nn.Module.__init__(self)
            self.in_features, self.out_features = 2, 2
            self.weight = nn.Parameter(torch.eye(2))
            self.register_parameter("bias", None)

    assert Own()(torch.tensor([[1.0, 2.0]])).tolist() == [[1.0, 2.0]]
    assert repr(Own()) == "Own(in_features=2, out_features=2, bias=False)"


def test_own_mixin_cooperates(impl):
    """A mixin in front of a layer class takes part in construction and in forward."""

    class Scaled:
        def __init__(self, *args, factor, **kwargs):
            super().__init__(*args, **kwargs)
            self.factor = factor

        def forward(self, x):
            return super().forward(x) * self.factor

    class ScaledConv(Scaled, impl.nn.Conv1d):
        pass

    layer, x = ScaledConv(1, 1, 1, factor=3), torch.ones(1, 1, 2)
    plain = torch.nn.functional.conv1d(x, layer.weight, layer.bias)

    assert freeze(layer(x)) == freeze(plain * 3)
