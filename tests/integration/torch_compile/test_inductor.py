import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.helpers import Implementation
from tests.integration.networks import agree, gradients, make_batch, make_net
from tests.integration.torch_compile.dynamo import compiled_tests


pytestmark = [
    *compiled_tests,
    # Inductor imports torch.utils.mkldnn, which still writes its methods in TorchScript.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is"),
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++", "c++"))),
        reason="inductor generates C++ and finds no compiler",
    ),
]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile in this process, into a cache that no earlier run has filled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        with torch._inductor.config.patch(compile_threads=1):
            yield


@pytest.mark.slow
@pytest.mark.parametrize("network", ["nested", "conv", "transformer"])
def test_training_step(network: str) -> None:
    """Forward and backward are one graph each, with torch's bits and close to eager ones."""

    def scenario(impl: Implementation) -> tuple[Tensor, Any, Any, int]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        counter = CompileCounterWithBackend("inductor")
        output = torch.compile(net, backend=counter, fullgraph=True)(batch)
        output.square().sum().backward()
        return output, gradients(net), dict(net.state_dict()), counter.frame_count

    output, grads, _, frames = agree(scenario)

    eager = make_net(torch.nn, network)
    expected = eager(make_batch(network))
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(grads, gradients(eager))
    assert frames == 1


def test_replaced_parameter_is_not_stale() -> None:
    """The generated code reads the parameter that is there now."""

    def scenario(impl: Implementation) -> list[Tensor]:
        net = impl.nn.Sequential(impl.nn.Linear(6, 3), impl.nn.Dropout(0.5)).eval()
        batch = make_batch("free")
        compiled = torch.compile(net, backend="inductor", fullgraph=True)
        with torch.no_grad():
            outputs = [compiled(batch)]
            net[0].weight = impl.nn.Parameter(torch.zeros(3, 6))
            outputs.append(compiled(batch))
            net[0].bias.fill_(5.0)
            outputs.append(compiled(batch))
        return outputs

    first, second, third = agree(scenario)

    assert not torch.equal(first, second)
    assert torch.equal(third, torch.full((4, 3), 5.0))
