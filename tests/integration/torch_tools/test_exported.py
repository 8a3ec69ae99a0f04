"""Programs of torch.export: modules put back into place, packages of AOTInductor."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import export, unflatten
from torch.export._swap import _swap_modules

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.integration.networks import NETWORKS, agree, make_batch, make_net


# Unflattening warns of the specifications of inputs, and exporting of the weights that an LSTM flattens.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
    pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm"),
]


@for_each("name", NETWORKS)
def test_the_module_of_a_program(name: str) -> None:
    """``export(...).module()`` has the names, the code and the outputs of torch, and is exported again."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, name).eval(), make_batch(name)
        program = export(net, (batch,))
        module = program.module()
        again = export(module, (batch,))
        stacks = [str(node.meta.get("nn_module_stack", "")) for node in program.graph.nodes]
        return (
            module.code,
            module(batch),
            [*module.state_dict()],
            [one[0] for one in module.named_modules()],
            str(again.graph),
            stacks,
            str(program.graph_signature),
            str(program.run_decompositions().graph),
        )

    assert same(scenario)[0] == "returned"


def test_called_modules_keep_their_signature() -> None:
    """With ``preserve_module_call_signature``, blocks are modules of the result and can be replaced."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "nested").eval(), make_batch("nested")
        names = ("blocks.0", "blocks.1")
        program = export(net, (batch,), preserve_module_call_signature=names)
        module = unflatten(program)
        before = module(batch)
        module.blocks.set_submodule("0", make_net(impl.nn, "nested").blocks[1])
        swapped = _swap_modules(program, {"blocks.1": net.blocks[0]})
        return before, module(batch), swapped(batch), [one[0] for one in module.named_modules()]

    assert same(scenario)[0] == "returned"


def test_a_network_with_hooks_and_its_own_call() -> None:
    """Hooks, a patched ``forward`` and an override of ``__call__`` are in the program as in torch's."""

    def scenario(impl: Implementation) -> Any:
        class Net(impl.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = impl.nn.Linear(2, 2), impl.nn.Linear(2, 2)

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return super().__call__(x) + 5

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(self.first(x))

        net = Net()
        net.register_forward_hook(lambda module, args, out: out * 2)
        net.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        net.second.forward = lambda x: x - 3
        found = []
        for strict in (False, True):
            program = export(net, (torch.ones(1, 2),), strict=strict)
            found.append((str(program.graph), program.module()(torch.ones(1, 2))))
        return found

    assert same(scenario)[0] == "returned"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # imports of Inductor
def test_a_package_of_aotinductor(tmp_path: Path) -> None:
    """A network compiled to a package, which needs no Python class, returns the bits of torch's."""

    def scenario(impl: Implementation) -> Any:
        net, batch = make_net(impl.nn, "nested").eval(), make_batch("nested")
        program = export(net, (batch,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / f"{impl}.pt2")
        )
        runner = torch._inductor.aoti_load_package(path)
        names = sorted(runner.get_constant_fqns())
        return (
            runner(batch),
            runner(batch[:2]),
            names,
            runner.get_metadata().keys() >= {"AOTI_DEVICE_KEY"},
        )

    found = agree(scenario)

    torch.testing.assert_close(found[0], make_net(torch.nn, "nested").eval()(make_batch("nested")))
