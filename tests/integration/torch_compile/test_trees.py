from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import agree
from tests.integration.torch_compile.dynamo import compiled_tests


pytestmark = [
    *compiled_tests,
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook when"),
]


def user_tree(impl: Implementation, blocks: int = 19) -> torch.nn.Module:
    """Return a tree of a user's modules: a root and ``blocks`` below it, each with two layers."""

    class Block(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = impl.nn.Linear(2, 2), impl.nn.Linear(2, 2)
            self.scale = impl.nn.Parameter(torch.ones(2))
            self.register_buffer("offset", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).relu()) * self.scale + self.offset
            return out

    class Net(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = impl.nn.ModuleList(Block() for _ in range(blocks))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    net: torch.nn.Module = Net()
    return net


def test_a_tree_of_user_modules_is_traced_as_torchs() -> None:
    """Twenty modules of a user: as many frames, operations and guards as with torch's base class."""

    def scenario(impl: Implementation) -> tuple[Tensor, int, int, list[int]]:
        torch._dynamo.reset()
        net, counter = user_tree(impl), CompileCounter()
        guards: list[int] = []
        compiled: Callable[[Tensor], Tensor] = torch._dynamo.optimize(
            counter, guard_export_fn=lambda found: guards.append(len(found))
        )(net)
        output = compiled(torch.ones(1, 2))
        return output.detach(), counter.frame_count, counter.op_count, guards

    _, frames, operations, guards = agree(scenario)

    assert (frames, operations) == (1, 19 * 5)
    assert len(guards) == 1
    assert guards[0] > 0


def double_output(_module: Any, _args: Any, output: Tensor) -> Tensor:
    """Be a forward hook."""
    return output * 2


def double_arguments(_module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
    """Be a forward pre-hook."""
    return (args[0] * 2,)


def keep_gradients(*_args: Any) -> None:
    """Be a backward hook of any kind, or a hook of states."""


# How a hook is registered in compiled code.
REGISTERED: Final[dict[str, Callable[[Any], Any]]] = {
    "forward": lambda m: m.register_forward_hook(double_output),
    "forward first": lambda m: m.register_forward_hook(double_output, prepend=True),
    "always": lambda m: m.register_forward_hook(double_output, always_call=True),
    "pre": lambda m: m.register_forward_pre_hook(double_arguments),
    "backward": lambda m: m.register_full_backward_hook(keep_gradients),
    "backward pre": lambda m: m.register_full_backward_pre_hook(keep_gradients),
    "old backward": lambda m: m.register_backward_hook(keep_gradients),
    "state": lambda m: m.register_state_dict_pre_hook(keep_gradients),
    "load": lambda m: m.register_load_state_dict_pre_hook(keep_gradients),
    "loaded": lambda m: m.register_load_state_dict_post_hook(keep_gradients),
}


@for_each("kind", REGISTERED)
def test_a_hook_may_be_registered_in_compiled_code(kind: str) -> None:
    """The hook runs, can be removed there, and leaves as many graphs as with torch."""

    def scenario(impl: Implementation) -> tuple[list[Tensor], int, list[int]]:
        torch._dynamo.reset()
        net, counter = user_tree(impl, blocks=1), CompileCounter()
        block: Any = net.get_submodule("blocks.0")

        def step(x: Tensor) -> Tensor:
            handle = REGISTERED[kind](block)
            output: Tensor = net(x)
            handle.remove()
            return output

        compiled = torch.compile(step, backend=counter)
        outputs = [compiled(torch.ones(1, 2)).detach() for _ in range(2)]
        outputs.append(net(torch.ones(1, 2)).detach())
        tables = [value for name, value in vars(block).items() if name.endswith("_hooks")]
        return outputs, counter.frame_count, [len(table) for table in tables]

    outputs, _, hooks = agree(scenario)

    assert set(hooks) == {0}
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2]) is (
        "forward" not in kind and kind not in {"pre", "always"}
    )


def test_a_lazy_module_of_the_user_may_be_made_in_compiled_code() -> None:
    """A class with ``LazyModuleMixin`` registers hooks in its constructor."""

    def scenario(impl: Implementation) -> tuple[Tensor, int]:
        torch._dynamo.reset()
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
