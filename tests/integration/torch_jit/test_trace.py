import warnings
from typing import Any

import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net
from tests.integration.torchscript import neutral, scripted_tests


pytestmark = scripted_tests


def traced(net: torch.nn.Module, *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """Trace a network with torch's own check of the result; tell what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = torch.jit.trace(net, *args, **options)
    messages = sorted({str(w.message).split(". ")[0] for w in caught})
    return result, [message for message in messages if not message.startswith("`torch.jit")]


@for_each("network", NETWORKS)
def test_trace(network: str) -> None:
    """Each network traces to torch's graph with torch's scopes, and passes the tracer's check."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        program, messages = traced(net, (batch,))
        output = program(batch)
        output.square().sum().backward()
        graphs = neutral(program.graph), neutral(program.inlined_graph)
        return output, gradients(program), dict(program.state_dict()), graphs, messages

    output, grads, _, _, _ = agree(scenario)

    assert output.shape == (4, 3)
    assert all(grad is not None for grad in grads.values())
