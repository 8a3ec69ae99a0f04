from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cases import for_each
from tests.helpers import Implementation, freeze
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


def test_meta_forward() -> None:
    """A network on the meta device tells the shapes of its outputs."""

    def scenario(impl: Implementation) -> list[Any]:
        outputs = []
        for network in ("conv", "lstm", "nested"):
            with torch.device("meta"):
                net = make_net(impl.nn, network)
            outputs.append(net(make_batch(network).to("meta")))
        return [(output.shape, output.device.type, output.requires_grad) for output in outputs]

    assert agree(scenario) == [((4, 3), "meta", True)] * 3


def test_moving_off_meta_is_refused() -> None:
    """``to`` refuses a meta network with torch's advice."""

    def scenario(impl: Implementation) -> str:
        with torch.device("meta"):
            net = make_net(impl.nn, "nested")
        with pytest.raises(NotImplementedError) as caught:
            net.to("cpu")

        assert set(devices(net).values()) == {"meta"}

        return str(caught.value)

    assert "to_empty" in agree(scenario)


def test_moving_to_meta() -> None:
    """A network that moves to the meta device keeps shapes, flags and names."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net = make_net(impl.nn, "conv").eval()
        net.head.bias.requires_grad_(False)
        net.to("meta")
        return dict(net.state_dict()), [p.requires_grad for p in net.parameters()], devices(net)

    _, flags, where = agree(scenario)

    assert flags[-1] is False
    assert set(where.values()) == {"meta"}


def test_assigning_a_checkpoint_to_meta() -> None:
    """``load_state_dict(assign=True)`` fills a meta network without allocating twice."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        source = make_net(impl.nn, "conv")
        with torch.device("meta"):
            net = make_net(impl.nn, "conv")
        state = source.state_dict()
        result = net.load_state_dict(state, assign=True)

        assert net.head.weight.data_ptr() == source.head.weight.data_ptr()

        return str(result), devices(net), net(make_batch("conv"))

    text, where, _ = agree(scenario)

    assert text == "<All keys matched successfully>"
    assert set(where.values()) == {"cpu"}


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


def test_patched_registration_of_user_classes(impl: Implementation) -> None:
    """A patch also sees parameters that a user's module assigns, and an override still runs."""
    seen = []

    class Noting(impl.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))

        def register_parameter(self, name: str, param: Any) -> None:
            seen.append(name)
            super().register_parameter(name, param)

    with empty_weights(include_buffers=False):
        net = Noting()

    assert seen == ["w"]
    assert net.w.is_meta
    assert not Noting().w.is_meta


def test_fake_mode() -> None:
    """Networks built and run under a fake tensor mode give shapes, and allocate nothing real."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        with FakeTensorMode() as mode:
            net = make_net(impl.nn, "conv")
            output = net(torch.empty(5, 1, 8, 8))
        kinds = {type(p).__name__ for p in net.parameters()}
        real = make_net(impl.nn, "nested")
        converted = mode.from_tensor(make_batch("nested"))
        with mode, pytest.raises(Exception, match="Please convert all Tensors to FakeTensors"):
            real(converted)
        return output.shape, type(output).__name__, kinds

    shape, kind, kinds = agree(scenario)

    assert shape == (5, 3)
    assert kind == "FakeTensor"
    assert kinds == {"FakeTensor"}


def test_default_device_and_dtype() -> None:
    """Layers follow the ambient default dtype, and ``device`` and ``dtype`` arguments."""

    def scenario(impl: Implementation) -> list[Any]:
        nn = impl.nn
        torch.set_default_dtype(torch.float64)
        try:
            ambient = make_net(nn, "lstm")
        finally:
            torch.set_default_dtype(torch.float32)
        explicit = nn.Conv2d(1, 2, 3, device="meta", dtype=torch.bfloat16)
        return [
            {str(p.dtype) for p in ambient.parameters()},
            freeze(explicit.weight),
            explicit.bias.device.type,
        ]

    dtypes, weight, _ = agree(scenario)

    assert dtypes == {"torch.float64"}
    assert weight.startswith("Parameter torch.bfloat16 meta")


def test_tensor_subclass_parameters() -> None:
    """A parameter whose data is a tensor subclass keeps its type through the network."""

    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net = make_net(impl.nn, "nested")
        net.heads["left"].weight = torch.nn.Parameter(torch.ones(3, 6).as_subclass(Tagged))
        output = net(make_batch("nested"))
        output.sum().backward()

        def plain(x: Tensor) -> Tensor:
            return x.as_subclass(torch.Tensor)

        kinds = type(output).__name__, type(net.double().heads["left"].weight).__name__
        return kinds, plain(output), plain(net.heads["left"].weight.grad)

    kinds, _, _ = agree(scenario)

    assert kinds[0] == "Tagged"
