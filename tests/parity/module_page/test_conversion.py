import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, Implementation, same
from tests.parity.module_page.nets import LINEAR, network, scaling, tensors


CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


@for_each("method", CASTS)
def test_cast_changes_all_floating_point_tensors(impl: Implementation, method: str) -> None:
    """A cast converts every floating point parameter and buffer, also non-persistent ones."""
    model = network(impl)
    model.scale.data = model.scale.data.half()
    model.block.norm.running_mean = model.block.norm.running_mean.double()
    getattr(model, method)()

    assert {t.dtype for t in tensors(model)} == {CASTS[method], torch.int64}
    assert model.scratch.dtype == CASTS[method]


@for_each("method", CASTS)
def test_cast_leaves_other_tensors_alone(impl: Implementation, method: str) -> None:
    """A cast changes neither integral, boolean nor complex buffers."""
    model = network(impl)
    model.register_buffer("mask", torch.tensor([True]))
    model.register_buffer("phase", torch.tensor([1j]))
    kept = [model.count, model.mask, model.phase, model.block.norm.num_batches_tracked]
    getattr(model, method)()

    assert [t.dtype for t in kept] == [torch.int64, torch.bool, torch.complex64, torch.int64]
    assert [model.count.dtype, model.mask.dtype, model.phase.dtype] == [t.dtype for t in kept[:3]]
    assert model.block.norm.num_batches_tracked.dtype == torch.int64


CONVERSIONS = {
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "cpu": lambda m: m.cpu(),
    "type": lambda m: m.type(torch.float64),
    "to dtype": lambda m: m.to(torch.float64),
    "to device": lambda m: m.to("cpu"),
    "to tensor": lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
    "to memory format": lambda m: m.to(memory_format=torch.channels_last),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "eval": lambda m: m.eval(),
    "train": lambda m: m.train(),
    "requires_grad_": lambda m: m.requires_grad_(False),
}


@for_each("conversion", CONVERSIONS)
def test_conversion_works_in_place_and_returns_self(impl: Implementation, conversion: str) -> None:
    """A conversion modifies the module, keeps its modules and parameters, and returns it."""
    model = network(impl)
    modules = list(model.modules())
    parameters = [id(p) for p in model.parameters()]

    assert CONVERSIONS[conversion](model) is model
    assert list(model.modules()) == modules
    if conversion != "to_empty":
        assert [id(p) for p in model.parameters()] == parameters


@for_each("conversion", [name for name in CONVERSIONS if name != "to_empty"])
def test_conversion_gives_the_same_state(conversion: str) -> None:
    """Each conversion returns the module with bitwise identical state on both."""

    def scenario(impl: Implementation) -> object:
        model = network(impl)
        converted = CONVERSIONS[conversion](model)
        return converted is model, model, list(tensors(model)), model.block.norm.training

    assert same(scenario)[0] == "returned"


@for_each("method", ["float", "double", "half", "bfloat16", "cpu", "eval", "train"])
def test_conversions_of_containers_return_the_container(method: str) -> None:
    """Each conversion of a container of layers returns it, and converts alike on both."""

    def scenario(impl: Implementation) -> object:
        model = impl.nn.Sequential(impl.nn.Linear(2, 2), impl.nn.BatchNorm1d(2))
        return getattr(model, method)() is model, model, model[1].training

    kind, value = same(scenario)

    assert kind == "returned"
    assert value[1][0] == ("bool", "True")
    assert getattr(MODKIT.nn.Linear(1, 1), method)().training is (method != "eval")


TYPES = pytest.mark.parametrize(
    "dst_type",
    [torch.float64, "torch.DoubleTensor", torch.DoubleTensor],
    ids=["dtype", "string", "class"],
)


@TYPES
def test_type_casts_everything(impl: Implementation, dst_type: object) -> None:
    """`type` casts all parameters and buffers, integral ones too; it returns the module."""
    model = network(impl)

    assert model.type(dst_type) is model
    assert {t.dtype for t in tensors(model)} == {torch.float64}


@TYPES
def test_type_casts_the_buffers_of_a_layer(impl: Implementation, dst_type: object) -> None:
    """`type` on a layer casts its integral buffer too."""
    norm = impl.nn.BatchNorm1d(2)

    assert norm.type(dst_type) is norm
    assert {t.dtype for t in norm.state_dict().values()} == {torch.float64}


@pytest.mark.parametrize("dst_type", ["nonsense", 1, None], ids=repr)
def test_type_must_exist(dst_type: object) -> None:
    """An argument that is not a type has the same outcome on both."""

    def scenario(impl: Implementation) -> object:
        return scaling(impl).type(dst_type) is not None

    assert same(scenario)[0] == "raised"


FORMS = {
    "device": (("cpu",), {}),
    "device object": ((torch.device("cpu"),), {}),
    "device and dtype": (("cpu", torch.float64), {}),
    "device, dtype and non_blocking": (("cpu", torch.float64, True), {}),
    "keyword device": ((), {"device": "meta"}),
    "all keywords": ((), {"device": "cpu", "dtype": torch.float16, "non_blocking": True}),
    "dtype": ((torch.float64,), {}),
    "dtype and non_blocking": ((torch.float64, True), {}),
    "dtype and keyword": ((torch.float64,), {"non_blocking": True}),
    "keyword dtype": ((), {"dtype": torch.bfloat16}),
    "tensor": ((torch.zeros(1, dtype=torch.float16),), {}),
    "tensor and non_blocking": ((torch.zeros(1, dtype=torch.float16), True), {}),
    "keyword tensor": ((), {"tensor": torch.zeros(1, device="meta")}),
    "memory format": ((), {"memory_format": torch.channels_last}),
    "nothing": ((None,), {}),
}


@for_each("form", FORMS)
def test_all_forms_of_to(form: str) -> None:
    """Each documented form gives the same module on both, integer buffers untouched by dtypes."""
    args, kwargs = FORMS[form]

    def scenario(impl: Implementation) -> object:
        model = network(impl)
        model.conv = impl.nn.Sequential(impl.nn.Conv2d(1, 2, 3), impl.nn.BatchNorm2d(2))
        moved = model.to(*args, **kwargs)
        return moved is model, model, list(tensors(model)), [t.stride() for t in tensors(model)]

    kind, value = same(scenario)

    assert kind == "returned"
    assert value[1][0] == ("bool", "True")


def test_to_without_arguments_does_what_torch_does() -> None:
    """All arguments of the first form have defaults; the call without any is the same on both."""
    assert same(lambda impl: scaling(impl).to())[0] == "returned"


REFUSED = {
    "int8": ((torch.int8,), {}),
    "bool": ((), {"dtype": torch.bool}),
    "integral dtype and device": (("cpu", torch.int64), {}),
    "too many": (("cpu", torch.float64, True, True), {}),
    "no device": (("nowhere",), {}),
    "positional memory format": ((torch.channels_last,), {}),
}


@for_each("form", REFUSED)
@for_each("build", [network, lambda impl: impl.nn.Linear(2, 2)], ids=["user", "nn"])
def test_forms_of_to_that_raise(form: str, build) -> None:
    """Only floating point and complex types, and the documented forms, are accepted."""
    args, kwargs = REFUSED[form]

    assert same(lambda impl: build(impl).to(*args, **kwargs))[0] == "raised"


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [(("float64",), {}, "RuntimeError"), ((), {"dtype": "float64"}, "TypeError")],
)
def test_to_takes_no_dtype_by_name(args, kwargs, error: str) -> None:
    """The page allows a str for the dtype; torch 2.13 raises."""
    assert same(lambda impl: scaling(impl).to(*args, **kwargs))[:2] == ("raised", error)


def test_to_refuses_integral_dtypes(impl: Implementation) -> None:
    """An integral dtype is a TypeError, and nothing is converted."""
    model = network(impl)

    with pytest.raises(TypeError, match="only accepts floating point or complex"):
        model.to(torch.int32)
    assert {t.dtype for t in tensors(model)} == {torch.float32, torch.int64}


def test_to_casts_floating_point_tensors_only(impl: Implementation) -> None:
    """A dtype leaves integral parameters and buffers with their dtypes."""
    model = network(impl)
    model.index = impl.nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    model.to(torch.float16)

    assert model.index.dtype == model.count.dtype == torch.int64
    assert {t.dtype for t in tensors(model)} == {torch.float16, torch.int64}


def test_to_casts_complex_tensors(impl: Implementation) -> None:
    """A complex dtype casts floating point and complex tensors, and warns."""
    model = network(impl)
    model.phase = impl.nn.Parameter(torch.tensor([1j]))
    with pytest.warns(UserWarning, match="Complex modules are a new feature"):
        model.to(torch.complex128)

    assert {t.dtype for t in tensors(model)} == {torch.complex128, torch.int64}
    assert torch.equal(model.phase, torch.tensor([1j], dtype=torch.complex128))


def test_to_moves_integral_tensors_with_their_dtype(impl: Implementation) -> None:
    """With device and dtype, integral tensors move to the device and keep their dtype."""
    model = network(impl).to("meta", torch.float64)

    assert {t.device.type for t in tensors(model)} == {"meta"}
    assert {t.dtype for t in tensors(model)} == {torch.float64, torch.int64}
    assert model.count.dtype == torch.int64


def test_to_takes_device_and_dtype_of_a_tensor(impl: Implementation) -> None:
    """A tensor argument gives the device and the dtype of all parameters and buffers."""
    model = network(impl).to(torch.zeros(1, dtype=torch.bfloat16, device="meta"))

    assert {t.device.type for t in tensors(model)} == {"meta"}
    assert {t.dtype for t in tensors(model)} == {torch.bfloat16, torch.int64}


def test_non_blocking_does_not_change_values() -> None:
    """`non_blocking` affects when a copy happens; the state is the same with and without."""

    def scenario(non_blocking: bool):
        return lambda impl: network(impl).to("cpu", torch.float16, non_blocking=non_blocking)

    assert same(scenario(True)) == same(scenario(False))


def test_memory_format_applies_to_tensors_with_four_dimensions(impl: Implementation) -> None:
    """channels_last rearranges 4D parameters and buffers and leaves all others as they are."""
    model = network(impl)
    model.kernel = impl.nn.Parameter(torch.randn(2, 3, 4, 5))
    model.register_buffer("image", torch.randn(1, 2, 3, 4))
    model.conv = impl.nn.Conv2d(3, 4, 3)
    values = {name: t.clone() for name, t in model.state_dict().items()}
    model.to(memory_format=torch.channels_last)
    four = [model.kernel, model.image, model.conv.weight]

    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in four)
    assert all(not t.is_contiguous() for t in four)
    assert all(t.is_contiguous() for t in tensors(model) if t.dim() != 4)
    assert all(torch.equal(t, values[name]) for name, t in model.state_dict().items())


def test_to_converts_gradients(impl: Implementation) -> None:
    """`to` converts the gradients with their parameters, in place."""
    model = scaling(impl)
    model(torch.ones(1)).sum().backward()
    parameter = model.factor
    model.to(torch.float64)

    assert model.factor is parameter
    assert parameter.grad.dtype == torch.float64


def test_example_of_casting_prints_the_types(impl: Implementation) -> None:
    """The example of `to` prints the layer and its weight, with the dtype unless float32.

    The page leaves out `requires_grad=True`, which torch 2.13 prints.
    """
    linear = impl.nn.Linear(2, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.191348, -0.3420], [-0.5113, -0.23246]]))
    rows = "[[ 0.1913, -0.3420],\n        [-0.5113, -0.2325]]"

    assert repr(linear.weight) == f"Parameter containing:\ntensor({rows}, requires_grad=True)"
    assert repr(linear.to(torch.double)) == LINEAR
    assert repr(linear.weight) == (
        f"Parameter containing:\ntensor({rows}, dtype=torch.float64, requires_grad=True)"
    )

    rows = "[[ 0.1914, -0.3420],\n        [-0.5112, -0.2324]]"

    assert repr(linear.to(torch.device("cpu"), dtype=torch.half, non_blocking=True)) == LINEAR
    assert repr(linear.to(torch.device("cpu"))) == LINEAR
    assert repr(linear.weight) == (
        f"Parameter containing:\ntensor({rows}, dtype=torch.float16, requires_grad=True)"
    )


def test_casting_a_linear_layer(impl: Implementation) -> None:
    """The first examples of `to`: float32 to double keeps the values, half rounds them."""
    linear = impl.nn.Linear(2, 2)
    single = linear.weight.detach().clone()

    assert str(linear.to(torch.double)) == LINEAR
    assert linear.weight.dtype == torch.float64
    assert torch.equal(linear.weight, single.double())

    cpu = torch.device("cpu")
    linear.to(cpu, dtype=torch.half, non_blocking=True)

    assert torch.equal(linear.weight, single.half())
    assert str(linear.to(cpu)) == LINEAR
    assert linear.weight.device == cpu


def test_complex_linear_layer(impl: Implementation) -> None:
    """The last example of `to`: a layer without bias, cast to complex, computes in complex."""
    with pytest.warns(UserWarning, match="Complex modules are a new feature"):
        linear = impl.nn.Linear(2, 2, bias=None).to(torch.cdouble)
    output = linear(torch.ones(3, 2, dtype=torch.cdouble))

    assert linear.weight.dtype == torch.complex128
    assert output.shape == (3, 2)
    assert torch.equal(output[0], linear.weight.sum(dim=1))
    assert torch.equal(output.imag, torch.zeros(3, 2, dtype=torch.double))


def test_example_of_complex_prints_the_type(impl: Implementation) -> None:
    """The last example of `to` prints the complex weight and the complex output."""
    linear = impl.nn.Linear(2, 2, bias=None)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.37406, 0.23818], [0.5593, -0.4443]]))
    with pytest.warns(UserWarning, match="Complex modules are a new feature"):
        linear.to(torch.cdouble)
    output = linear(torch.ones(3, 2, dtype=torch.cdouble)).detach()

    weight = """
        Parameter containing:
        tensor([[ 0.3741+0.j,  0.2382+0.j],
                [ 0.5593+0.j, -0.4443+0.j]], dtype=torch.complex128, requires_grad=True)
    """
    values = """
        tensor([[0.6122+0.j, 0.1150+0.j],
                [0.6122+0.j, 0.1150+0.j],
                [0.6122+0.j, 0.1150+0.j]], dtype=torch.complex128)
    """

    assert repr(linear.weight).split() == weight.split()
    assert repr(output).split() == values.split()
