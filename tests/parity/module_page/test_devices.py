import pytest
import torch

from tests.helpers import Implementation, same
from tests.parity.module_page.nets import network, scaling, tensors


def test_cpu_moves_nothing_that_is_there(impl: Implementation) -> None:
    """`cpu` leaves tensors that are on the CPU as the same objects."""
    model = network(impl)
    before = [id(t) for t in tensors(model)]
    storages = [t.data_ptr() for t in tensors(model)]
    model.cpu()

    assert [id(t) for t in tensors(model)] == before
    assert [t.data_ptr() for t in tensors(model)] == storages


def test_cpu_cannot_move_tensors_without_data() -> None:
    """`cpu` on the meta device is torch's error, since there is nothing to copy."""
    kind, error, _ = same(lambda impl: network(impl).to("meta").cpu())

    assert (kind, error) == ("raised", "NotImplementedError")


ACCELERATORS = pytest.mark.parametrize("method", ["cuda", "ipu", "xpu"])


@ACCELERATORS
@pytest.mark.parametrize("device", [(), (0,), ("nowhere",)], ids=["default", "index", "unknown"])
def test_missing_accelerator_raises(method: str, device: tuple[object, ...]) -> None:
    """Without the device, its method raises what torch raises, and leaves the module as it was."""
    if method == "cuda" and torch.cuda.is_available():
        pytest.skip("needs a machine without the device")
    if method == "xpu" and torch.xpu.is_available():
        pytest.skip("needs a machine without the device")

    def error_of(impl: Implementation) -> tuple[object, ...]:
        model = network(impl)
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            getattr(model, method)(*device)
        return type(caught.value).__name__, str(caught.value), model

    assert same(error_of)[0] == "returned"


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


def test_moving_off_the_meta_device(impl: Implementation) -> None:
    """`to_empty` gives a meta module real, uninitialized storage on the device."""
    linear = impl.nn.Linear(2, 3, device="meta")

    assert linear.to_empty(device="cpu") is linear
    assert linear.weight.shape == (3, 2)
    assert linear.weight.device.type == "cpu"
    assert linear(torch.ones(1, 2)).shape == (1, 3)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"], ids=repr)
def test_to_empty_moves_without_copying(impl: Implementation, device: object) -> None:
    """`to_empty` gives all tensors new storage of their shape and dtype, and copies no data."""
    model = network(impl)
    before = [(t.shape, t.dtype) for t in tensors(model)]
    storages = [t.untyped_storage() for t in tensors(model)]
    old = {storage.data_ptr() for storage in storages}
    model.to_empty(device=device)

    assert [(t.shape, t.dtype) for t in tensors(model)] == before
    assert {t.device for t in tensors(model)} == {torch.device(device)}
    assert old.isdisjoint(t.untyped_storage().data_ptr() for t in tensors(model))


def test_to_empty_reaches_submodules_by_default(impl: Implementation) -> None:
    """recurse=False moves the module's own tensors and leaves those of submodules."""
    model = network(impl).to_empty(device="meta", recurse=False)

    assert {t.device.type for t in (model.scale, model.mean, model.count)} == {"meta"}
    assert {t.device.type for t in (*tensors(model.block), *tensors(model.head))} == {"cpu"}

    model.to_empty(device="meta")

    assert {t.device.type for t in tensors(model)} == {"meta"}


def test_to_empty_requires_a_device() -> None:
    """Without a device, `to_empty` is a TypeError."""
    assert same(lambda impl: scaling(impl).to_empty())[:2] == ("raised", "TypeError")


def test_share_memory_shares_all_tensors(impl: Implementation) -> None:
    """`share_memory` moves every parameter and buffer to shared memory and returns the module."""
    model = network(impl)
    values = [t.detach().clone() for t in tensors(model)]

    assert not any(t.is_shared() for t in tensors(model))
    assert model.share_memory() is model
    assert all(t.is_shared() for t in tensors(model))
    assert all(torch.equal(t, old) for t, old in zip(tensors(model), values, strict=True))


def test_shared_memory_stays_shared(impl: Implementation) -> None:
    """A second `share_memory` changes nothing."""
    model = network(impl).share_memory()
    storages = [t.data_ptr() for t in tensors(model)]
    model.share_memory()

    assert all(t.is_shared() for t in tensors(model))
    assert [t.data_ptr() for t in tensors(model)] == storages
