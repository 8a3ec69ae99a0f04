from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.integration.networks import NETWORKS, agree, make_batch, make_net


@contextmanager
def empty_weights(include_buffers: bool) -> Iterator[None]:
    """Build modules on the meta device, the way loaders of large checkpoints do it.

    They replace the registering functions on ``torch.nn.Module`` itself for the length of a block.
    """
    register_parameter = torch.nn.Module.register_parameter
    register_buffer = torch.nn.Module.register_buffer

    def parameter_on_meta(module: torch.nn.Module, name: str, param: Any) -> None:
        register_parameter(module, name, param)
        if param is not None:
            cls = type(module._parameters[name])
            kwargs = {**module._parameters[name].__dict__, "requires_grad": param.requires_grad}
            module._parameters[name] = cls(module._parameters[name].to("meta"), **kwargs)

    def buffer_on_meta(
        module: torch.nn.Module, name: str, tensor: Any, persistent: bool = True
    ) -> None:
        register_buffer(module, name, tensor, persistent=persistent)
        if tensor is not None:
            module._buffers[name] = module._buffers[name].to("meta")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "register_parameter", parameter_on_meta)
        if include_buffers:
            patch.setattr(torch.nn.Module, "register_buffer", buffer_on_meta)
        yield


def devices(net: torch.nn.Module) -> dict[str, str]:
    """Tell for every tensor of a network where it is."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: tensor.device.type for name, tensor in tensors.items()}


@for_each("network", NETWORKS)
def test_meta_to_empty_and_load(network: str) -> None:
    """A network built without memory gets memory, then its checkpoint, and works."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        source, batch = make_net(impl.nn, network).eval(), make_batch(network)
        with torch.device("meta"):
            net = make_net(impl.nn, network).eval()
        built = devices(net)
        result = net.to_empty(device="cpu")

        assert result is net

        net.load_state_dict(source.state_dict())
        for name, buffer in net.named_buffers():
            buffer.copy_(source.get_buffer(name))
        return built, devices(net), net(batch)

    built, emptied, output = agree(scenario)

    assert set(built.values()) == {"meta"}
    assert set(emptied.values()) == {"cpu"}
    assert torch.equal(output, make_net(torch.nn, network).eval()(make_batch(network)))


@for_each("include_buffers", [False, True])
@for_each("network", NETWORKS)
def test_patched_registration(network: str, include_buffers: bool) -> None:
    """Functions put in place of torch's registering ones are called for networks of either library."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        with empty_weights(include_buffers):
            net = make_net(impl.nn, network)
        after = impl.nn.Linear(2, 2)
        source = make_net(impl.nn, network)
        net.load_state_dict(source.state_dict(), assign=True)
        return devices(net), devices(after), [type(p).__name__ for p in net.parameters()]

    def built(impl: Implementation) -> dict[str, str]:
        with empty_weights(include_buffers):
            return devices(make_net(impl.nn, network))

    where = agree(built)
    _, after, _ = agree(scenario)

    names = {name for name, _ in make_net(torch.nn, network).named_parameters()}
    assert {where[name] for name in names} == {"meta"}
    assert {where[name] for name in where.keys() - names} <= {"meta" if include_buffers else "cpu"}
    assert set(after.values()) == {"cpu"}
