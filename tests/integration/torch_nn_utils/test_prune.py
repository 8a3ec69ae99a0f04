import copy
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation, freeze, seed_everything
from tests.integration.networks import agree, gradients, make_batch, make_net, train


Method = Callable[[Any, torch.nn.Module], torch.nn.Module]

METHODS: Final[dict[str, Method]] = {
    "identity": lambda prune, m: prune.identity(m, "weight"),
    "random_unstructured": lambda prune, m: prune.random_unstructured(m, "weight", amount=0.3),
    "l1_unstructured": lambda prune, m: prune.l1_unstructured(m, "weight", amount=5),
    "random_structured": lambda prune, m: prune.random_structured(m, "weight", amount=2, dim=0),
    "ln_structured": lambda prune, m: prune.ln_structured(m, "weight", amount=2, n=2, dim=1),
    "custom_from_mask": lambda prune, m: prune.custom_from_mask(m, "weight", mask=checkers(m)),
    "by_class": lambda prune, m: prune.RandomUnstructured.apply(m, "weight", amount=3) and m,
    "by_scores": lambda prune, m: prune.l1_unstructured(
        m, "weight", amount=0.5, importance_scores=torch.arange(36.0).view(6, 6)
    ),
}


def checkers(module: torch.nn.Module) -> Tensor:
    """Build a mask that leaves every second entry."""
    return (torch.arange(module.weight.numel()) % 2).view_as(module.weight)


@for_each("method", METHODS)
def test_prune(method: str) -> None:
    """Each method masks the same entries as on torch, in training and in the state dict."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        prune, layer = impl.submodule("nn.utils.prune"), net.blocks[1].linear
        result = METHODS[method](prune, layer)

        assert result is layer
        assert prune.is_pruned(net)

        losses = train(net, batch)
        output = net(batch)
        names = [name for name, _ in net.named_parameters()]
        return [losses, output, gradients(net)], layer.weight, names, dict(net.state_dict())

    _, weight, names, state = agree(scenario)

    original, mask = (state[f"blocks.1.linear.weight_{part}"] for part in ("orig", "mask"))
    assert "blocks.1.linear.weight_orig" in names
    assert torch.equal(weight, original * mask)
    assert bool((mask == 0).any()) is (method != "identity")


@for_each("method", METHODS)
def test_remove(method: str) -> None:
    """Removing makes the pruning permanent and leaves an ordinary layer."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        prune, layer = impl.submodule("nn.utils.prune"), net.blocks[1].linear
        METHODS[method](prune, layer)
        before = net(batch)
        prune.remove(layer, "weight")

        assert not prune.is_pruned(net)
        assert not layer._forward_pre_hooks
        assert isinstance(layer.weight, torch.nn.Parameter)
        assert torch.equal(net(batch), before)

        return before, dict(net.state_dict()), [name for name, _ in net.named_buffers()]

    _, _, buffers = agree(scenario)

    assert buffers == []


def test_pruning_again_makes_a_container(impl: Implementation) -> None:
    """A second method on the same weight joins the first in one container hook."""
    prune = impl.submodule("nn.utils.prune")
    layer = impl.nn.Linear(6, 6)
    prune.l1_unstructured(layer, "weight", amount=6)
    first = layer.weight_mask.clone()
    prune.ln_structured(layer, "weight", amount=2, n=2, dim=0)
    (hook,) = layer._forward_pre_hooks.values()

    assert isinstance(hook, prune.PruningContainer)
    assert len(hook) == 2
    assert (layer.weight_mask <= first).all()
    assert (layer.weight_mask.sum(1) == 0).sum() >= 2


def test_global_pruning() -> None:
    """Pruning several layers together picks the same entries as on torch."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        prune = impl.submodule("nn.utils.prune")
        layers = [(block.linear, "weight") for block in net.blocks]
        layers.append((net.heads["left"], "bias"))
        prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.5)
        return net(batch), dict(net.named_buffers())

    _, masks = agree(scenario)

    assert sum(int((mask == 0).sum()) for mask in masks.values()) == 38


def test_own_method() -> None:
    """A user's pruning method is applied and removed."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        prune = impl.submodule("nn.utils.prune")

        class EveryThird(prune.BasePruningMethod):
            PRUNING_TYPE = "unstructured"

            def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
                mask = default_mask.clone()
                mask.view(-1)[::3] = 0
                return mask

        seed_everything()
        layer = impl.nn.Linear(6, 6)
        EveryThird.apply(layer, "weight")
        pruned = layer(make_batch("free"))
        prune.remove(layer, "weight")
        return pruned, layer.weight

    _, weight = agree(scenario)

    assert not weight.flatten()[::3].any()


@pytest.mark.parametrize(
    ("source", "target"), [(TORCH, MODKIT), (MODKIT, TORCH)], ids=["to_modkit", "to_torch"]
)
def test_checkpoint_crosses(source: Implementation, target: Implementation) -> None:
    """A pruned network's state dict loads strictly into one pruned by the other library."""
    nets = []
    for impl in (source, target):
        nets.append(make_net(impl.nn, "free"))
        impl.submodule("nn.utils.prune").random_unstructured(nets[-1].inner, "weight", amount=0.5)
    nets[1].load_state_dict(nets[0].state_dict())

    assert freeze(nets[1](make_batch("free"))) == freeze(nets[0](make_batch("free")))


def test_pruned_copy_is_independent(impl: Implementation) -> None:
    """A deep copy of a pruned network recomputes its own weight."""
    prune = impl.submodule("nn.utils.prune")
    layer = prune.l1_unstructured(impl.nn.Linear(6, 6), "weight", amount=4)
    layer.weight_orig.requires_grad_(False)
    prune.identity(layer, "bias")
    layer.bias_orig.requires_grad_(False)
    layer(make_batch("free"))
    clone = copy.deepcopy(layer)
    clone.weight_orig.zero_()
    clone.bias_orig.zero_()

    assert torch.equal(clone(make_batch("free")), torch.zeros(4, 6))
    assert layer(make_batch("free")).any()
