import inspect

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.module_page.nets import (
    MODULES,
    PARAMETERS,
    applying,
    network,
    scaling,
    tensors,
)


REQUIRED = inspect.Parameter.empty

# The documented parameters of each method, with their defaults.
DOCUMENTED = {
    "add_module": {"name": REQUIRED, "module": REQUIRED},
    "apply": {"fn": REQUIRED},
    "bfloat16": {},
    "buffers": {"recurse": True},
    "children": {},
    "compile": {},
    "cpu": {},
    "cuda": {"device": None},
    "double": {},
    "eval": {},
    "extra_repr": {},
    "float": {},
    "forward": {},
    "get_buffer": {"target": REQUIRED},
    "get_extra_state": {},
    "get_parameter": {"target": REQUIRED},
    "get_submodule": {"target": REQUIRED},
    "half": {},
    "ipu": {"device": None},
    "load_state_dict": {"state_dict": REQUIRED, "strict": True, "assign": False},
    "modules": {},
    "named_buffers": {"prefix": "", "recurse": True, "remove_duplicate": True},
    "named_children": {},
    "named_modules": {"memo": None, "prefix": "", "remove_duplicate": True},
    "named_parameters": {"prefix": "", "recurse": True, "remove_duplicate": True},
    "parameters": {"recurse": True},
    "register_backward_hook": {"hook": REQUIRED},
    "register_buffer": {"name": REQUIRED, "tensor": REQUIRED, "persistent": True},
    "register_forward_hook": {
        "hook": REQUIRED,
        "prepend": False,
        "with_kwargs": False,
        "always_call": False,
    },
    "register_forward_pre_hook": {"hook": REQUIRED, "prepend": False, "with_kwargs": False},
    "register_full_backward_hook": {"hook": REQUIRED, "prepend": False},
    "register_full_backward_pre_hook": {"hook": REQUIRED, "prepend": False},
    "register_load_state_dict_post_hook": {"hook": REQUIRED},
    "register_module": {"name": REQUIRED, "module": REQUIRED},
    "register_parameter": {"name": REQUIRED, "param": REQUIRED},
    "register_state_dict_pre_hook": {"hook": REQUIRED},
    "requires_grad_": {"requires_grad": True},
    "set_extra_state": {"state": REQUIRED},
    "share_memory": {},
    "state_dict": {"destination": None, "prefix": "", "keep_vars": False},
    "to": {},
    "to_empty": {"device": REQUIRED, "recurse": True},
    "train": {"mode": True},
    "type": {"dst_type": REQUIRED},
    "xpu": {"device": None},
    "zero_grad": {"set_to_none": True},
}


@for_each("method", DOCUMENTED)
def test_method_has_the_documented_parameters(impl: Implementation, method: str) -> None:
    """Each method takes the documented parameters, in order, with the documented defaults."""
    parameters = inspect.signature(getattr(impl.nn.Module, method)).parameters.values()
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    named = {p.name: p.default for p in parameters if p.kind not in variadic and p.name != "self"}
    # Later versions have appended parameters; they must be optional.
    documented = DOCUMENTED[method]
    appended = list(named)[len(documented) :]

    assert list(named.items())[: len(documented)] == list(documented.items())
    assert REQUIRED not in [named[name] for name in appended]


KEYWORD_ONLY = {
    "register_forward_hook": (print, True),
    "register_forward_pre_hook": (print, True),
    "to_empty": ("cpu",),
}


@pytest.mark.parametrize("method", KEYWORD_ONLY)
def test_keyword_only_parameters_reject_positions(method: str) -> None:
    """The parameters behind the documented star can only be passed by name."""
    kind, error, text = same(
        lambda impl: getattr(scaling(impl), method)(*KEYWORD_ONLY[method]),
    )

    assert (kind, error) == ("raised", "TypeError")
    assert "positional argument" in text


def test_every_network_class_derives_from_module(impl: Implementation) -> None:
    """Module is the base class of all modules of the namespace."""
    classes = [
        value
        for name, value in vars(torch.nn).items()
        if isinstance(value, type) and issubclass(value, torch.nn.Module)
    ]

    assert len(classes) > 100
    assert all(issubclass(getattr(impl.nn, c.__name__), impl.nn.Module) for c in classes)
    assert isinstance(impl.nn.Linear(1, 1), impl.nn.Module)


def test_user_models_are_modules(impl: Implementation) -> None:
    """A model that subclasses Module is a module of both libraries' base class."""
    model = network(impl)

    assert isinstance(model, impl.nn.Module)
    assert isinstance(model, torch.nn.Module)


@pytest.mark.parametrize(("args", "kwargs"), [((1,), {}), ((), {"a": 1})])
def test_class_signature_is_generic_but_takes_no_arguments(args, kwargs) -> None:
    """The class has the signature (*args, **kwargs), yet any argument is a TypeError."""
    assert same(lambda impl: str(inspect.signature(impl.nn.Module)))[0] == "returned"
    assert same(lambda impl: impl.nn.Module(*args, **kwargs))[:2] == ("raised", "TypeError")


def test_modules_nest_in_a_tree(impl: Implementation) -> None:
    """Modules contain modules, which contain modules again."""
    model = network(impl)

    assert [name for name, _ in model.named_modules()] == MODULES
    assert model.head[0].linear is model.get_submodule("head.0.linear")


def test_model_of_the_class_description(impl: Implementation) -> None:
    """Submodules assigned as attributes are registered, called and converted with the model."""
    nn = impl.nn
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


def test_model_of_the_class_description_is_bitwise_identical() -> None:
    """Seeded alike, the model's output and gradients are equal on both."""

    def scenario(impl: Implementation) -> object:
        nn = impl.nn
        model = nn.Sequential(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.Conv2d(20, 20, 5), nn.ReLU())
        output = model(torch.randn(2, 1, 12, 12))
        output.sum().backward()
        return model, output, [p.grad for p in model.parameters()]

    assert same(scenario)[0] == "returned"


def test_user_network_is_bitwise_identical() -> None:
    """A tree of user classes and layers computes the same outputs and gradients on both."""

    def scenario(impl: Implementation) -> object:
        model = network(impl)
        output = model(torch.randn(4, 3))
        output.square().sum().backward()
        return model, output, [p.grad for p in model.parameters()]

    assert same(scenario)[0] == "returned"


def test_assigned_submodule_is_registered(impl: Implementation) -> None:
    """Assigning a module to an attribute registers it and its parameters with the parent."""
    model = network(impl)
    model.tail = scaling(impl)

    assert list(model.children())[-1] is model.tail
    assert [name for name, _ in model.named_parameters()] == [*PARAMETERS, "tail.factor"]


def test_assigned_submodule_is_converted_with_its_parent(impl: Implementation) -> None:
    """`to` on the parent converts the parameters of all assigned submodules."""
    model = network(impl).to(torch.float64)

    assert {t.dtype for t in tensors(model) if t.is_floating_point()} == {torch.float64}


MEMBERS = {
    "module": lambda impl: impl.nn.Conv2d(1, 1, 1),
    "user module": scaling,
    "parameter": lambda impl: impl.nn.Parameter(torch.ones(1)),
}


@pytest.mark.parametrize("member", MEMBERS)
def test_assignment_before_init_raises(member: str) -> None:
    """Members cannot be assigned before the parent's __init__ ran: torch's error."""

    def scenario(impl: Implementation) -> object:
        class Forgot(impl.nn.Module):
            def __init__(self):
                self.conv1 = MEMBERS[member](impl)

        return Forgot()

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "AttributeError")
    assert "before Module.__init__() call" in text


def test_training_tells_the_mode(impl: Implementation) -> None:
    """`training` is a bool: True after construction, False in evaluation mode."""
    model = network(impl)

    assert model.training is True
    assert model.eval().training is False
    assert model.train().training is True


def test_forward_defines_every_call(impl: Implementation) -> None:
    """A call runs forward with the call's arguments and returns its value."""
    module = applying(impl, lambda *args, **kwargs: (args, kwargs))

    assert module(1, 2, key=3) == ((1, 2), {"key": 3})
    assert module() == ((), {})


def test_forward_should_be_overridden() -> None:
    """Without an override, a call raises NotImplementedError and names the class."""

    def scenario(impl: Implementation) -> object:
        class Unfinished(impl.nn.Module):
            pass

        return Unfinished()(1)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "NotImplementedError")
    assert "Unfinished" in text


def test_forward_itself_ignores_hooks(impl: Implementation) -> None:
    """Calling the instance runs its hooks; calling `forward` directly skips them silently."""
    log: list[str] = []
    module = scaling(impl)
    module.register_forward_pre_hook(lambda *_: log.append("before"))
    module.register_forward_hook(lambda *_: log.append("after"))
    direct = module.forward(torch.ones(1))

    assert log == []
    assert torch.equal(module(torch.ones(1)), direct)
    assert log == ["before", "after"]


def test_extra_repr_is_an_empty_string_by_default(impl: Implementation) -> None:
    """`extra_repr` returns a str, empty unless overridden."""
    assert impl.nn.Module().extra_repr() == ""
    assert repr(impl.nn.Module()) == "Module()"
    assert impl.nn.Linear(2, 2).extra_repr() == "in_features=2, out_features=2, bias=True"


def test_extra_repr_is_printed(impl: Implementation) -> None:
    """Single-line and multi-line extra_repr appear in the module's text."""

    class Described(impl.nn.Module):
        text = "a=1"

        def extra_repr(self):
            return self.text

    one, two = Described(), Described()
    two.text = "a=1\nb=2"
    two.child = Described()

    assert repr(one) == "Described(a=1)"
    assert repr(two) == "Described(\n  a=1\n  b=2\n  (child): Described(a=1)\n)"


def test_compile_compiles_forward_on_call(impl: Implementation) -> None:
    """After `compile`, calls run the compiled forward and give the same values."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = network(impl).eval()
    x = torch.randn(4, 3)
    expected = model(x)

    assert graphs == []

    model.compile(backend=backend)

    assert torch.equal(model(x), expected)
    assert len(graphs) == 1
    assert torch.equal(model(x), expected)
    assert len(graphs) == 1


def test_compile_passes_arguments_to_torch_compile(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compile` hands the module's call and all arguments as they are to torch.compile."""
    received: list[tuple[object, ...]] = []

    def compiler(function, *args, **kwargs):
        received.append((function.__self__, args, kwargs))
        return lambda *values: ("compiled", values)

    monkeypatch.setattr(torch, "compile", compiler)
    module = scaling(impl)

    assert module.compile("positional", mode="default", dynamic=True) is None
    assert received == [(module, ("positional",), {"mode": "default", "dynamic": True})]
    assert module(1, 2) == ("compiled", (1, 2))


@pytest.mark.parametrize("kind", ["Linear", "Sequential", "BatchNorm1d"])
def test_compile_on_a_layer_does_what_torch_does(kind: str) -> None:
    """Layers accept `compile`; torch 2.13 runs them without a graph of their own."""
    build = {
        "Linear": lambda nn: nn.Linear(3, 3),
        "Sequential": lambda nn: nn.Sequential(nn.Linear(3, 3)),
        "BatchNorm1d": lambda nn: nn.BatchNorm1d(3),
    }[kind]

    def scenario(impl: Implementation) -> object:
        torch._dynamo.reset()
        graphs: list[object] = []
        layer = build(impl.nn)
        layer.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
        return layer(torch.randn(4, 3)), len(graphs)

    assert same(scenario)[0] == "returned"
