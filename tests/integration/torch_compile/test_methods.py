from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.cases import for_each
from tests.helpers import TORCH, Implementation
from tests.integration.networks import agree
from tests.integration.torch_compile.dynamo import compiled_tests


pytestmark = [
    *compiled_tests,
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook when"),
]

Net = Any
Call = Callable[[ModuleType, Net], Any]


def hook(*args: Any) -> None:
    """Do nothing, as a hook of any kind."""


def swap_parameter(nn: ModuleType, net: Net) -> None:
    """Delete a parameter, and assign another one."""
    del net.inner.w
    net.inner.w = nn.Parameter(torch.zeros(2))


# Calls in compiled code, by the method of modkit's that they are about.
CALLS: Final[dict[str, tuple[Call, ...]]] = {
    "_get_backward_pre_hooks": (lambda nn, net: len(net.inner._get_backward_pre_hooks()),),
    "register_parameter": (
        lambda nn, net: net.register_parameter("p", None),
        lambda nn, net: net.register_parameter("p", nn.Parameter(torch.ones(2))),
        swap_parameter,
    ),
    "add_module": (
        lambda nn, net: net.add_module("m", nn.ReLU()),
        lambda nn, net: net.set_submodule("layer", nn.Linear(2, 2)),
    ),
    "named_modules": (
        lambda nn, net: [name for name, _ in net.named_modules()],
        lambda nn, net: [name for name, _ in net.named_modules(remove_duplicate=False)],
    ),
    "apply": (lambda nn, net: net.apply(hook) is net,),
    "_apply": (
        lambda nn, net: net._apply(lambda tensor: tensor * 1) is net,
        lambda nn, net: net.to_empty(device="cpu") is net,
    ),
    "to": (lambda nn, net: net.to(torch.float64) is net,),
    "load_state_dict": (
        lambda nn, net: str(net.load_state_dict(net.state_dict())),
        lambda nn, net: str(net.load_state_dict({}, strict=False)),
        lambda nn, net: str(net.load_state_dict(net.state_dict(), assign=True)),
    ),
    "_load_from_state_dict": (
        lambda nn, net: net.inner._load_from_state_dict(
            net.inner.state_dict(), "", {}, True, [], [], []
        ),
    ),
}
HOOKS: Final = (
    *("register_forward_hook", "register_full_backward_pre_hook", "register_backward_hook"),
    *("register_state_dict_pre_hook", "register_load_state_dict_post_hook"),
)


def make_network(nn: ModuleType) -> Net:
    """Return a network with a layer, and a module of the user's with a buffer."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("b", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w + self.b

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.layer(x))

    return Net()


def compile_and_describe(
    impl: Implementation, body: Callable[[Net, Tensor], Any]
) -> tuple[Any, ...]:
    """Return the result, the number of graphs and their operations, and the network's members."""
    torch._dynamo.reset()
    net, counter = make_network(impl.nn), CompileCounter()
    result = torch.compile(body, backend=counter)(net, torch.ones(2))
    members = [
        (name, tuple(value.shape), str(value.dtype)) for name, value in net.state_dict().items()
    ]
    hooks = {name: len(table) for name, table in vars(net).items() if "hooks" in name and table}
    return result, counter.frame_count, counter.op_count, members, net.training, hooks


# Torch 2.13 asks Python 3.14 for the type of a union, wherever a function has a closure.
@pytest.mark.filterwarnings("ignore:'_UnionGenericAlias' is deprecated")
@for_each("method", CALLS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_methods_in_compiled_code(method: str, every: bool) -> None:
    """A method in compiled code returns what torch's does, with the graphs of torch's."""
    for call in CALLS[method] if every else CALLS[method][:1]:
        agree_when_compiled(call)


def agree_when_compiled(call: Call) -> None:
    """Compile a call with both implementations, and compare all that can be seen."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        def body(net: Net, x: Tensor) -> Any:
            x = x + 1
            result = call(impl.nn, net)
            return x * 2, result

        return compile_and_describe(impl, body)

    _, graphs, *_ = scenario(TORCH)
    if graphs:
        agree(scenario)
    else:
        # With torch 2.15, dynamo captures none of ``load_state_dict()`` of torch, and some of modkit's.
        agree(lambda impl: [part for i, part in enumerate(scenario(impl)) if i not in {1, 2}])


@for_each("method", HOOKS)
def test_hooks_are_registered_in_compiled_code(method: str) -> None:
    """A hook is registered on a module from outside, and on one that compiled code makes."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        def body(net: Net, x: Tensor) -> Any:
            handles = [getattr(each, method)(lambda *_: None) for each in (net, impl.Module())]
            result = net(x + 1)
            for handle in handles:
                handle.remove()
            getattr(net, method)(lambda *_: None)
            return result * 2

        return compile_and_describe(impl, body)

    *_, hooks = agree(scenario)

    assert sum(hooks.values()) == 1


def test_a_lazy_module_of_the_user_may_be_made_in_compiled_code() -> None:
    """A class with ``LazyModuleMixin`` registers hooks in its constructor."""

    def scenario(impl: Implementation) -> tuple[Tensor, int]:
        counter = CompileCounter()

        class Scale(torch.nn.modules.lazy.LazyModuleMixin, impl.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.UninitializedParameter()

            def initialize_parameters(self, x: Tensor) -> None:
                with torch.no_grad():
                    self.weight.materialize((x.shape[-1],))
                    self.weight.fill_(3)

            def forward(self, x: Tensor) -> Tensor:
                return x * self.weight

        def step(x: Tensor) -> Tensor:
            output: Tensor = Scale()(x)
            return output

        compiled = torch.compile(step, backend=counter)
        return compiled(torch.ones(2)).detach(), counter.frame_count

    output, _ = agree(scenario)

    assert torch.equal(output, torch.full((2,), 3.0))
