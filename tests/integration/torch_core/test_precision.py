from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import Implementation, freeze
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net, train


def in_double(impl: Implementation, network: str) -> tuple[torch.nn.Module, Tensor]:
    """Build a network and its batch in double precision, in evaluation mode."""
    net, batch = make_net(impl.nn, network).double().eval(), make_batch(network)
    return net, batch.double() if batch.is_floating_point() else batch


@for_each("dtype", [torch.bfloat16, torch.float16])
# Whether an LSTM runs in these types on a CPU depends on the processor.
@for_each("network", sorted(NETWORKS.keys() - {"lstm"}))
def test_autocast(network: str, dtype: torch.dtype) -> None:
    """Under autocast each network uses the lower precision where torch does."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        dtypes: list[Any] = []
        for name, module in net.named_modules():
            module.register_forward_hook(
                lambda _m, _args, output, name=name: dtypes.append(
                    (name, torch.utils._pytree.tree_map_only(Tensor, lambda t: t.dtype, output))
                )
            )
        with torch.autocast("cpu", dtype=dtype):
            output = net(batch)
        output.float().square().sum().backward()
        return output, gradients(net), dtypes

    _, grads, dtypes = agree(scenario)

    assert dtype in {output for _, output in dtypes}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}


@for_each("network", NETWORKS)
def test_whole_network_in_bfloat16(network: str) -> None:
    """A network that was converted trains in bfloat16 as torch's."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network).bfloat16(), make_batch(network)
        if batch.is_floating_point():
            batch = batch.bfloat16()
        losses = train(net, batch, torch.optim.AdamW(net.parameters(), lr=0.01))
        return losses, dict(net.state_dict())

    losses, state = agree(scenario)

    assert losses[0].dtype == torch.bfloat16
    assert {t.dtype for t in state.values()} <= {torch.bfloat16, torch.int64}


def test_gradient_scaler() -> None:
    """A loss scaler on the CPU scales, unscales, and skips a step that overflows."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, "nested"), make_batch("nested")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(batch).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, dict(net.state_dict())

    scales, _ = agree(scenario)

    assert scales == [1024.0, 512.0, 512.0]


@for_each("network", ["conv", "lstm", "nested", "transformer"])
def test_gradcheck(impl: Implementation, network: str) -> None:
    """Analytic gradients with respect to all parameters match finite differences."""
    net, batch = in_double(impl, network)
    names = [name for name, _ in net.named_parameters()]

    def function(*values: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(zip(names, values, strict=True)), (batch,))

    values = tuple(p.detach().requires_grad_() for p in net.parameters())

    assert torch.autograd.gradcheck(function, values, fast_mode=True)


def test_gradgradcheck(impl: Implementation) -> None:
    """Second derivatives with respect to the input match finite differences."""
    net, batch = in_double(impl, "nested")

    assert torch.autograd.gradgradcheck(net, (batch.requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    """Without gradients the outputs are the same, and carry no graph."""

    def scenario(impl: Implementation) -> list[Any]:
        outputs = []
        for network in NETWORKS:
            net = make_net(impl.nn, network).eval()
            with mode():
                outputs.append(net(make_batch(network)))
        return [[o.requires_grad, o.is_inference(), o.clone()] for o in outputs]

    results = agree(scenario)

    for network, (requires_grad, inference, output) in zip(NETWORKS, results, strict=True):
        expected = make_net(torch.nn, network).eval()(make_batch(network))
        torch.testing.assert_close(output, expected.detach())
        assert not requires_grad
        assert inference is (mode is torch.inference_mode)


def test_deterministic_algorithms() -> None:
    """Networks run where only deterministic algorithms are allowed, and repeat their bits."""

    def scenario(impl: Implementation) -> list[Tensor]:
        torch.use_deterministic_algorithms(True)
        try:
            return [make_net(impl.nn, network)(make_batch(network)) for network in NETWORKS]
        finally:
            torch.use_deterministic_algorithms(False)

    first = agree(scenario)

    assert freeze(first) == freeze(
        [make_net(torch.nn, network)(make_batch(network)) for network in NETWORKS]
    )
