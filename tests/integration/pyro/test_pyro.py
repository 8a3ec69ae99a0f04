import copy
import io
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze
from tests.integration.networks import agree


pytest.importorskip("pyro", reason="needs pyro-ppl: nox -s ecosystem installs it")

import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_


def joint_class(impl: Implementation) -> type:
    """Return the class of the recipe, which in torch is ``PyroModule`` itself."""
    if impl.name == "torch":
        return PyroModule

    class JointType(type(PyroModule), type(impl.Module)):
        pass

    class Bayesian(PyroModule, impl.Module, metaclass=JointType):
        pass

    return Bayesian


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the classes that pyro has made."""
    monkeypatch.setattr(type(PyroModule), "_pyro_mixin_cache", {})


def define(impl: Implementation) -> tuple[type, type, type]:
    """Follow the recipe; return the joint class, a network and a class derived from it."""
    joint = joint_class(impl)
    type(PyroModule)._pyro_mixin_cache[impl.Module] = joint

    class Net(impl.Module):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.layer = impl.nn.Linear(width, 1)
            self.scale = impl.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale

    class Derived(Net):
        pass

    return joint, Net, Derived


def sampled(module: Any) -> Any:
    """Make a weight random, and return what the module computes and holds."""
    module.scale = PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    torch.manual_seed(3)
    outputs = [module(torch.ones(2, 3)).detach() for _ in range(2)]
    copied = copy.deepcopy(module)
    kinds = [type(each).__name__ for each in module.modules()]
    return outputs, [name for name, _ in copied.named_parameters()], kinds


@for_each("which", ["network", "derived class", "converted instance", "base beside a network"])
def test_networks_become_bayesian(which: str) -> None:
    """The ways to make a network random work with the recipe, and sample what they do in torch."""

    def scenario(impl: Implementation) -> Any:
        torch.manual_seed(0)
        joint, net, derived = define(impl)
        if which == "base beside a network":
            return sampled(type("Both", (net, joint), {})(3))
        if which == "converted instance":
            module = net(3)
            to_pyro_module_(module)
            return sampled(module)
        return sampled(PyroModule[derived if which == "derived class" else net](3))

    agree(scenario)


def test_bayesian_networks_keep_their_state(impl: Implementation) -> None:
    """The state dict of one network loads into another."""
    torch.manual_seed(0)
    _, net, _ = define(impl)
    first, second = PyroModule[net](3), PyroModule[net](3)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer))

    assert isinstance(second, impl.Module)
    assert freeze(dict(second.state_dict())) == freeze(dict(first.state_dict()))


def test_layers_need_no_recipe(impl: Implementation) -> None:
    """``PyroModule[nn.Linear]`` works as it is, as a child of a network too."""
    net = impl.nn.Sequential(PyroModule[impl.nn.Linear](3, 1))
    net[0].weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))

    assert net(torch.ones(2, 3)).shape == (2, 1)


def test_a_conflict_says_what_it_is() -> None:
    """Without the recipe, a network beside ``PyroModule`` is Python's metaclass conflict."""
    _, net, _ = define(Implementation("modkit"))

    with pytest.raises(TypeError, match="metaclass conflict"):
        type("Both", (net, PyroModule), {})
