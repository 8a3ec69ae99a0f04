import pytest
import torch

from tests.helpers import Implementation
from tests.models import network, scaling, tensors


ACCELERATORS = pytest.mark.parametrize("method", ["cuda", "ipu", "xpu"])


@pytest.fixture
def moved_to(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let the meta device stand for every accelerator; list the devices that were asked for."""
    devices: list[object] = []

    def move(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        devices.append(device)
        return tensor.to("meta")

    for method in ("cuda", "ipu", "xpu"):
        monkeypatch.setattr(torch.Tensor, method, move)
    return devices


@ACCELERATORS
def test_accelerator_gets_all_parameters_and_buffers(
    impl: Implementation, method: str, moved_to: list[object]
) -> None:
    """The method of an accelerator moves every tensor to the current device, returns self."""
    model = network(impl)
    count = len(list(tensors(model)))

    assert getattr(model, method)() is model
    assert {t.device.type for t in tensors(model)} == {"meta"}
    assert moved_to == [None] * count


@ACCELERATORS
@pytest.mark.parametrize("form", ["position", "keyword"])
def test_accelerator_takes_a_device(
    impl: Implementation, method: str, form: str, moved_to: list[object]
) -> None:
    """With a device, the method copies all parameters to that device."""
    model = network(impl)
    if form == "position":
        getattr(model, method)(1)
    else:
        getattr(model, method)(device=1)

    assert set(moved_to) == {1}


@ACCELERATORS
@pytest.mark.usefixtures("moved_to")
def test_accelerator_makes_different_objects(impl: Implementation, method: str) -> None:
    """On a device whose tensors cannot share an object with the CPU's, all tensors are new."""
    model = network(impl)
    before = list(tensors(model))
    getattr(model, method)()

    assert {id(t) for t in tensors(model)}.isdisjoint(id(t) for t in before)
    assert {t.device.type for t in before} == {"cpu"}


@ACCELERATORS
def test_optimizer_should_be_constructed_after_the_move(
    impl: Implementation, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the move makes new parameters, an optimizer from before it misses the module."""
    monkeypatch.setattr(torch.Tensor, method, lambda t, device=None: t.clone())
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    model = scaling(impl, 3.0)
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    getattr(model, method)()
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1)).sum().backward()
    early.step()

    assert model.factor.item() == 3.0

    late.step()

    assert model.factor.item() == 2.0


@pytest.mark.gpu
def test_cuda_moves_everything_in_place(impl: Implementation) -> None:
    """On a real device, torch 2.13 keeps the parameter objects and replaces the buffers.

    The page says that parameters become different objects too.
    """
    model = network(impl)
    parameters = [id(p) for p in model.parameters()]
    buffers = list(model.buffers())

    assert model.cuda(0) is model
    assert {t.device.type for t in tensors(model)} == {"cuda"}
    assert [id(p) for p in model.parameters()] == parameters
    assert {id(b) for b in model.buffers()}.isdisjoint(id(b) for b in buffers)
    assert model.cpu() is model
    assert {t.device.type for t in tensors(model)} == {"cpu"}


@pytest.mark.gpu
def test_moving_a_linear_layer_to_an_accelerator_and_back(impl: Implementation) -> None:
    """The examples of `to` with a device: values go there and come back."""
    linear = impl.nn.Linear(2, 2)
    weight = linear.weight.detach().clone()
    linear.to(torch.device("cuda:0"), dtype=torch.half, non_blocking=True)

    assert (linear.weight.device.type, linear.weight.dtype) == ("cuda", torch.float16)

    linear.to(torch.device("cpu"))

    assert torch.equal(linear.weight, weight.half())
