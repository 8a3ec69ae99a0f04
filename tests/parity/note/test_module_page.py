import pytest
import torch

from tests.helpers import MODKIT, Implementation, same


LINEAR = "Linear(in_features=2, out_features=2, bias=True)"
SEQUENTIAL = f"Sequential(\n  (0): {LINEAR}\n  (1): {LINEAR}\n)"


def test_model_of_the_class_description(impl: Implementation) -> None:
    """Submodules assigned as attributes are registered, called and converted with the model."""
    nn = impl.own
    F = impl.submodule("nn.functional")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 20, 5)
            self.conv2 = nn.Conv2d(20, 20, 5)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            return F.relu(self.conv2(x))

    model = Model()
    output = model(torch.randn(2, 1, 12, 12))

    assert output.shape == (2, 20, 4, 4)
    assert output.min() >= 0.0
    assert [name for name, _ in model.named_children()] == ["conv1", "conv2"]

    model.to(torch.float64)

    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model(torch.randn(2, 1, 12, 12, dtype=torch.float64)).dtype == torch.float64


def test_model_of_the_class_description_gives_the_same_bits() -> None:
    """Seeded alike, the model's output and gradients are equal on both."""

    def scenario(impl: Implementation) -> object:
        nn = impl.own
        model = nn.Sequential(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.Conv2d(20, 20, 5), nn.ReLU())
        output = model(torch.randn(2, 1, 12, 12))
        output.sum().backward()
        return model, output, [p.grad for p in model.parameters()]

    assert same(scenario)[0] == "returned"


def test_assignment_before_init_is_refused() -> None:
    """Children cannot be assigned before the parent's __init__ ran: torch's error."""

    def scenario(impl: Implementation) -> object:
        class Forgot(impl.own.Module):
            def __init__(self):
                self.conv1 = impl.own.Conv2d(1, 1, 1)

        return Forgot()

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "AttributeError")
    assert "before Module.__init__() call" in text


def test_apply_prints_modules_and_weights(
    impl: Implementation, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of `apply` prints exactly what the page shows."""
    nn = impl.own

    @torch.no_grad()
    def init_weights(m) -> None:
        print(m)  # noqa: T201 - the example prints
        if type(m) == nn.Linear:  # noqa: E721 - the example compares types
            m.weight.fill_(1.0)
            print(m.weight)  # noqa: T201 - the example prints

    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.apply(init_weights)
    weight = "Parameter containing:\ntensor([[1., 1.],\n        [1., 1.]], requires_grad=True)"

    assert capsys.readouterr().out == f"{LINEAR}\n{weight}\n{LINEAR}\n{weight}\n{SEQUENTIAL}\n"


def test_iterating_over_buffers_and_parameters(impl: Implementation) -> None:
    """`buffers()` and `parameters()` give tensors with their types and sizes."""
    model = impl.own.Sequential(impl.own.Conv2d(1, 20, 5), impl.own.BatchNorm2d(20))

    assert [(type(buf), tuple(buf.size())) for buf in model.buffers()] == [
        (torch.Tensor, (20,)),
        (torch.Tensor, (20,)),
        (torch.Tensor, ()),
    ]
    assert [(type(param), tuple(param.size())) for param in model.parameters()] == [
        (torch.nn.Parameter, (20, 1, 5, 5)),
        (torch.nn.Parameter, (20,)),
        (torch.nn.Parameter, (20,)),
        (torch.nn.Parameter, (20,)),
    ]


def test_picking_members_by_name(impl: Implementation) -> None:
    """The loops over named_buffers, named_parameters and named_children find by name."""
    norm = impl.own.BatchNorm1d(3)
    model = impl.own.Module()
    for number in range(1, 6):
        model.add_module(f"conv{number}", impl.own.Conv2d(1, number, 1))

    assert [b.size() for n, b in norm.named_buffers() if n == "running_var"] == [(3,)]
    assert [p.size() for n, p in norm.named_parameters() if n == "bias"] == [(3,)]
    assert [str(m) for n, m in model.named_children() if n in {"conv4", "conv5"}] == [
        "Conv2d(1, 4, kernel_size=(1, 1), stride=(1, 1))",
        "Conv2d(1, 5, kernel_size=(1, 1), stride=(1, 1))",
    ]


def test_modules_lists_a_duplicate_once(impl: Implementation) -> None:
    """The example of `modules` enumerates the network and the shared layer."""
    l = impl.own.Linear(2, 2)  # noqa: E741 - the example's name
    net = impl.own.Sequential(l, l)

    assert [f"{idx} -> {m}" for idx, m in enumerate(net.modules())] == [
        f"0 -> {SEQUENTIAL}",
        f"1 -> {LINEAR}",
    ]


def test_named_modules_lists_a_duplicate_once(impl: Implementation) -> None:
    """The example of `named_modules` names the shared layer by its first place."""
    l = impl.own.Linear(2, 2)  # noqa: E741 - the example's name
    net = impl.own.Sequential(l, l)

    assert [f"{idx} -> {m}" for idx, m in enumerate(net.named_modules())] == [
        f"0 -> ('', {SEQUENTIAL})",
        f"1 -> ('0', {LINEAR})",
    ]
    assert [name for name, _ in net.named_modules(remove_duplicate=False)] == ["", "0", "1"]


def nested(impl: Implementation) -> torch.nn.Module:
    """Build the network of the page's diagram for `get_submodule`."""
    nn = impl.own

    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.net_b = nn.Module()
            self.net_b.net_c = nn.Module()
            self.net_b.net_c.conv = nn.Conv2d(16, 33, kernel_size=3, stride=2)
            self.net_b.linear = nn.Linear(100, 200)

    return A()


def test_diagram_of_get_submodule(impl: Implementation) -> None:
    """The network prints as the page draws it, up to torch's own two-space indentation."""
    diagram = """
    A(
        (net_b): Module(
            (net_c): Module(
                (conv): Conv2d(16, 33, kernel_size=(3, 3), stride=(2, 2))
            )
            (linear): Linear(in_features=100, out_features=200, bias=True)
        )
    )
    """

    assert repr(nested(impl)).split() == diagram.split()


def test_get_submodule_follows_the_path(impl: Implementation) -> None:
    """Dotted names lead to nested modules, parameters and buffers; the empty name to itself."""
    a = nested(impl)

    assert a.get_submodule("net_b.linear") is a.net_b.linear
    assert a.get_submodule("net_b.net_c.conv") is a.net_b.net_c.conv
    assert a.get_submodule("") is a
    assert a.get_parameter("net_b.linear.weight") is a.net_b.linear.weight

    a.net_b.register_buffer("b", torch.ones(1))

    assert a.get_buffer("net_b.b") is a.net_b.b


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("get_submodule", "net_b.missing"),
        ("get_submodule", "net_b.linear.weight"),
        ("get_submodule", "missing.linear"),
        ("get_parameter", "net_b.linear.missing"),
        ("get_parameter", "net_b.linear"),
        ("get_parameter", "net_b.missing.weight"),
        ("get_buffer", "net_b.linear.weight"),
        ("get_buffer", "net_b.missing"),
    ],
)
def test_wrong_paths_raise(method: str, target: str) -> None:
    """A path that does not exist, or ends in another kind of member, is torch's AttributeError."""
    assert same(lambda impl: getattr(nested(impl), method)(target))[:2] == (
        "raised",
        "AttributeError",
    )


def test_registering_a_buffer(impl: Implementation) -> None:
    """The example of `register_buffer` makes the tensor an attribute and part of the state."""

    class Norm(impl.own.Module):
        def __init__(self, num_features):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(num_features))

    norm = Norm(3)

    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert list(norm.state_dict()) == ["running_mean"]


def test_keys_of_a_state_dict(impl: Implementation) -> None:
    """The example of `state_dict` lists a layer's two parameters."""
    assert sorted(impl.own.Linear(2, 2).state_dict().keys()) == ["bias", "weight"]


def test_none_parameter_with_a_key_cannot_be_loaded() -> None:
    """A key for a parameter that is registered as None is an error, as the page notes."""

    def scenario(impl: Implementation) -> object:
        return impl.own.Linear(2, 2, bias=False).load_state_dict(impl.own.Linear(2, 2).state_dict())

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert 'Unexpected key(s) in state_dict: "bias"' in text


def test_casting_a_linear_layer(impl: Implementation) -> None:
    """The first examples of `to`: float32 to double keeps the values, half rounds them."""
    linear = impl.own.Linear(2, 2)
    single = linear.weight.detach().clone()

    assert str(linear.to(torch.double)) == LINEAR
    assert linear.weight.dtype == torch.float64
    assert torch.equal(linear.weight, single.double())

    cpu = torch.device("cpu")
    linear.to(cpu, dtype=torch.half, non_blocking=True)

    assert torch.equal(linear.weight, single.half())
    assert str(linear.to(cpu)) == LINEAR
    assert linear.weight.device == cpu


@pytest.mark.gpu
def test_moving_a_linear_layer_to_an_accelerator_and_back(impl: Implementation) -> None:
    """The examples of `to` with a device: values go there and come back."""
    linear = impl.own.Linear(2, 2)
    weight = linear.weight.detach().clone()
    linear.to(torch.device("cuda:0"), dtype=torch.half, non_blocking=True)

    assert (linear.weight.device.type, linear.weight.dtype) == ("cuda", torch.float16)

    linear.to(torch.device("cpu"))

    assert torch.equal(linear.weight, weight.half())


def test_complex_linear_layer(impl: Implementation) -> None:
    """The last example of `to`: a layer without bias, cast to complex, computes in complex."""
    with pytest.warns(UserWarning, match="Complex modules are a new feature"):
        linear = impl.own.Linear(2, 2, bias=None).to(torch.cdouble)
    output = linear(torch.ones(3, 2, dtype=torch.cdouble))

    assert linear.weight.dtype == torch.complex128
    assert output.shape == (3, 2)
    assert torch.equal(output[0], linear.weight.sum(dim=1))
    assert torch.equal(output.imag, torch.zeros(3, 2, dtype=torch.double))


@pytest.mark.parametrize(
    "arguments",
    [
        ((torch.int8,), {}),
        ((), {"dtype": torch.bool}),
        (("cpu", torch.float64, True, True), {}),
        (("nowhere",), {}),
    ],
    ids=["int8", "bool", "too many", "no device"],
)
def test_forms_of_to_that_are_refused(arguments) -> None:
    """Only floating point and complex types, and the documented forms, are accepted."""
    args, kwargs = arguments

    assert same(lambda impl: impl.own.Linear(2, 2).to(*args, **kwargs))[0] == "raised"


@pytest.mark.parametrize(
    "arguments",
    [
        (("cpu",), {}),
        (("cpu", torch.float64), {}),
        ((torch.float64,), {"non_blocking": True}),
        ((torch.zeros(1, dtype=torch.float16),), {}),
        ((), {"device": "meta"}),
        ((), {"memory_format": torch.channels_last}),
    ],
    ids=["device", "device and dtype", "dtype", "tensor", "keyword device", "memory format"],
)
def test_all_forms_of_to(arguments) -> None:
    """Each documented form gives the same module on both, integer buffers untouched by dtypes."""
    args, kwargs = arguments

    def scenario(impl: Implementation) -> object:
        model = impl.own.Sequential(impl.own.Conv2d(1, 2, 3), impl.own.BatchNorm2d(2))
        moved = model.to(*args, **kwargs)
        return moved is model, model, [t.stride() for t in model.state_dict().values()]

    assert same(scenario)[0] == "returned"


def test_extra_state_goes_through_the_state_dict(impl: Implementation) -> None:
    """get_extra_state and set_extra_state carry a picklable object with the state."""

    class Counter(impl.own.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    counter = Counter()
    counter.count = 5
    restored = Counter()
    result = restored.load_state_dict(counter.state_dict())

    assert repr(result) == "<All keys matched successfully>"
    assert restored.count == 5


def test_extra_repr_is_shown(impl: Implementation) -> None:
    """Single-line and multi-line extra_repr appear in the module's text."""

    class Described(impl.own.Module):
        text = "a=1"

        def extra_repr(self):
            return self.text

    one, two = Described(), Described()
    two.text = "a=1\nb=2"
    two.child = Described()

    assert repr(one) == "Described(a=1)"
    assert repr(two) == "Described(\n  a=1\n  b=2\n  (child): Described(a=1)\n)"


def test_type_casts_everything(impl: Implementation) -> None:
    """`type` casts all parameters and buffers, integer ones too."""
    norm = impl.own.BatchNorm1d(2)

    assert norm.type(torch.float64) is norm
    assert {t.dtype for t in norm.state_dict().values()} == {torch.float64}


def test_zero_grad_both_ways(impl: Implementation) -> None:
    """`zero_grad` sets gradients to None by default, to zeros on request."""
    linear = impl.own.Linear(2, 1)
    linear(torch.ones(1, 2)).sum().backward()
    linear.zero_grad(set_to_none=False)

    assert torch.equal(linear.weight.grad, torch.zeros(1, 2))

    linear.zero_grad()

    assert linear.weight.grad is None


def test_moving_off_the_meta_device(impl: Implementation) -> None:
    """`to_empty` gives a meta module real, uninitialized storage on the device."""
    linear = impl.own.Linear(2, 3, device="meta")

    assert linear.to_empty(device="cpu") is linear
    assert linear.weight.shape == (3, 2)
    assert linear.weight.device.type == "cpu"
    assert linear(torch.ones(1, 2)).shape == (1, 3)


@pytest.mark.parametrize("method", ["float", "double", "half", "bfloat16", "cpu", "eval", "train"])
def test_conversions_work_in_place_and_return_the_module(method: str) -> None:
    """Each conversion returns the module itself, and converts alike on both."""

    def scenario(impl: Implementation) -> object:
        model = impl.own.Sequential(impl.own.Linear(2, 2), impl.own.BatchNorm1d(2))
        return getattr(model, method)() is model, model, model[1].training

    kind, value = same(scenario)

    assert kind == "returned"
    assert value[1][0] == ("bool", "True")
    assert getattr(MODKIT.nn.Linear(1, 1), method)().training is (method != "eval")
