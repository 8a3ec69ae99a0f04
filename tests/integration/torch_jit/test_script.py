from typing import Any

import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net
from tests.integration.torchscript import layout, neutral, scripted_tests


pytestmark = scripted_tests


@for_each("network", NETWORKS)
@for_each("training", [True, False], ids=["train", "eval"])
def test_script(network: str, training: bool) -> None:
    """Each network scripts to torch's code, and computes outputs and gradients from it."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network).train(training), make_batch(network)
        scripted = torch.jit.script(net)
        outputs = [scripted(batch), scripted(batch)]
        outputs[1].square().sum().backward()
        names = [(name, module.original_name) for name, module in scripted.named_modules()]
        return (
            [output.detach() for output in outputs],
            gradients(scripted),
            dict(scripted.state_dict()),
            (scripted.code, neutral(scripted.inlined_graph), layout(scripted), names),
        )

    outputs, grads, state, _ = agree(scenario)

    eager = make_net(torch.nn, network).train(training)
    expected = [eager(make_batch(network)), eager(make_batch(network))]
    expected[1].square().sum().backward()
    torch.testing.assert_close(outputs, [output.detach() for output in expected])
    torch.testing.assert_close(grads, gradients(eager))
    # TorchScript keeps buffers that are not persistent in its state, too.
    members = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    torch.testing.assert_close(state, {name: members[name].detach() for name in state})
    assert state.keys() == members.keys()
