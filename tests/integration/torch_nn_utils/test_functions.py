from typing import Any

import torch
from torch import Tensor

from tests.cases import for_each
from tests.helpers import Implementation, freeze, seed_everything
from tests.integration.networks import agree, gradients, make_batch, make_net


def trained(impl: Implementation, network: str) -> torch.nn.Module:
    """Build a network with gradients and with statistics that are not the initial ones."""
    net = make_net(impl.nn, network)
    net(make_batch(network)).square().sum().backward()
    return net


def test_fuse_conv_and_batch_norm() -> None:
    """The fused convolution is of the library's class and computes what the two did."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net = trained(impl, "conv").eval()
        conv, norm = net.features[0], net.features[1]
        fused = impl.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)

        assert type(fused) is impl.nn.Conv2d
        assert fused is not conv
        torch.testing.assert_close(fused(make_batch("conv")), norm(conv(make_batch("conv"))))

        return fused(make_batch("conv")), dict(fused.state_dict())

    agree(scenario)


def test_fuse_linear_and_batch_norm() -> None:
    """The fused linear layer is of the library's class and computes what the two did."""

    def scenario(impl: Implementation) -> Tensor:
        nn, batch = impl.nn, make_batch("free")
        linear, norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        norm(linear(batch))
        fused = nn.utils.fusion.fuse_linear_bn_eval(linear.eval(), norm.eval())

        assert type(fused) is nn.Linear
        torch.testing.assert_close(fused(batch), norm(linear(batch)))

        return fused(batch)

    agree(scenario)


def test_skip_init(impl: Implementation) -> None:
    """``skip_init`` makes a layer of the library's class without drawing random numbers."""
    seed_everything()
    before = torch.get_rng_state()
    layer = impl.nn.utils.skip_init(impl.nn.Linear, 6, 3, dtype=torch.float64)

    assert torch.equal(torch.get_rng_state(), before)
    assert type(layer) is impl.nn.Linear
    assert layer.weight.shape == (3, 6)
    assert layer.weight.dtype == torch.float64
    assert layer.weight.device.type == "cpu"


@for_each("norm_type", [1.0, 2.0, float("inf")])
@for_each("foreach", [True, False, None])
def test_clip_grad_norm(norm_type: float, foreach: bool | None) -> None:
    """Clipping by norm returns the norm and scales the gradients as in torch."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net = trained(impl, "conv")
        utils = impl.nn.utils
        norm = utils.clip_grad_norm_(net.parameters(), 0.1, norm_type, foreach=foreach)
        return norm, gradients(net)

    norm, grads = agree(scenario)

    total = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.values()]), norm_type)
    assert norm > 0.1
    torch.testing.assert_close(total, torch.tensor(0.1), rtol=1e-4, atol=0)


def test_clip_grad_value_and_total_norm() -> None:
    """The other clipping functions work on a network's parameters."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, utils = trained(impl, "nested"), impl.nn.utils
        grads = [p.grad for p in net.parameters()]
        total = utils.get_total_norm(grads)
        utils.clip_grads_with_norm_(net.parameters(), 0.5, total)
        utils.clip_grad_value_(net.parameters(), 0.01)
        return total, gradients(net)

    total, grads = agree(scenario)

    assert total > 0
    assert max(float(grad.abs().max()) for grad in grads.values()) <= 0.01


def test_parameters_as_a_vector() -> None:
    """All parameters go into one vector and back, in torch's order."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, utils = make_net(impl.nn, "free"), impl.nn.utils
        vector = utils.parameters_to_vector(net.parameters()).detach()
        utils.vector_to_parameters(vector * 2, net.parameters())

        assert torch.equal(utils.parameters_to_vector(net.parameters()), vector * 2)

        return vector, dict(net.state_dict())

    vector, _ = agree(scenario)

    assert vector.shape == (6 + 36 + 6 + 18 + 3,)


def test_packed_sequences() -> None:
    """Packed and padded sequences go through recurrent layers as in torch."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        nn, rnn = impl.nn, impl.submodule("nn.utils.rnn")
        lengths = [5, 2, 4]
        sequences = [torch.randn(length, 6) for length in lengths]
        padded = rnn.pad_sequence(sequences, batch_first=True)
        packed = rnn.pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        outputs = []
        for layer in (nn.LSTM(6, 4), nn.GRU(6, 4, bidirectional=True), nn.RNN(6, 4, num_layers=2)):
            output, _ = layer(packed)
            outputs.append(rnn.pad_packed_sequence(output, batch_first=True))
        return outputs, rnn.pack_sequence(sequences, enforce_sorted=False).data

    outputs, _ = agree(scenario)

    assert outputs[0][0].shape == (3, 5, 4)
    assert outputs[0][1].tolist() == [5, 2, 4]


def test_memory_format_of_convolutions() -> None:
    """Weights of convolutions are converted to channels-last in place, others stay."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net = make_net(impl.nn, "conv")
        result = impl.nn.utils.convert_conv2d_weight_memory_format(net, torch.channels_last)
        strides = {name: p.stride() for name, p in net.named_parameters()}
        return result(make_batch("conv")), strides

    _, strides = agree(scenario)

    assert strides["features.4.weight"] == (36, 1, 12, 4)


def test_per_sample_gradients_by_expanded_weights() -> None:
    """Torch's expanded weights give one gradient a sample."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

        nn, batch = impl.nn, make_batch("free")
        net = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
        call_for_per_sample_grads(net, loss_reduction="sum")(batch).sum().backward()
        samples = [p.grad_sample for p in net.parameters()]
        net.zero_grad()
        net(batch).sum().backward()
        for sample, parameter in zip(samples, net.parameters(), strict=True):
            torch.testing.assert_close(sample.sum(0), parameter.grad)
        return samples

    agree(scenario)


def test_initialisers() -> None:
    """``apply`` with the functions of ``nn.init`` draws torch's numbers."""

    def scenario(impl: Implementation) -> dict[str, Tensor]:
        nn = impl.nn

        def initialise(module: torch.nn.Module) -> None:
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

        return dict(make_net(nn, "conv").apply(initialise).state_dict())

    state = agree(scenario)

    assert not state["head.bias"].any()
    assert freeze(state) != freeze(dict(make_net(torch.nn, "conv").state_dict()))
