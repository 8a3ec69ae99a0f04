import weakref

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, leaf, tree
from tests.parity.module.contents import run


@pytest.fixture
def swap():
    """Make conversions and loads swap tensors, until the test ends."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def with_grads(impl: Implementation) -> torch.nn.Module:
    """Build a leaf whose weight has a gradient."""
    module = leaf(impl)
    module.weight.grad = torch.full((2, 3), 4.0)
    module.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    return module


def outcome_of(call):
    """Return a scenario that tells values and identities around a conversion."""

    def scenario(impl):
        module = with_grads(impl)
        weight, grad, frozen = module.weight, module.weight.grad, module.frozen
        result = run(call, module)
        same_objects = (module.weight is weight, module.weight.grad is grad, grad is weight.grad)
        values = (module.weight, module.weight.grad, module.mean, module.steps, module.frozen)
        return result is module, same_objects, module.frozen is frozen, values, weight

    return scenario


CALLS = (
    "m.double()",
    "m.float()",
    "m.half()",
    "m.to(torch.float64)",
    "m.to('meta')",
    "m.to_empty(device='meta')",
    "m.type(torch.float64)",
    "m.cpu()",
    "m._apply(lambda t: t.clone())",
    "m._apply(lambda t: t)",
)


@for_each("flag", ["overwrite", "swap"])
@for_each("call", CALLS)
def test_conversions_that_overwrite_or_swap(call, flag, monkeypatch):
    """With a flag, parameters become new objects, or their contents are exchanged, as in torch."""
    monkeypatch.setattr(torch.__future__, f"_{flag}_module_params_on_conversion", True)

    assert same(outcome_of(call))[0] == "returned"


@pytest.mark.usefixtures("swap")
@for_each(
    ("call", "watch"),
    [
        ("m.double()", lambda module: module.weight),
        ("m.load_state_dict(m.state_dict())", lambda module: module.weight),
        ("m.double()", lambda module: module.weight.grad),
    ],
)
def test_a_swap_that_is_not_possible(call, watch):
    """A weak reference to a parameter or gradient forbids swapping; the error names which one."""

    def scenario(impl):
        module = with_grads(impl)
        watched = weakref.ref(watch(module))
        try:
            run(call, module)
        except RuntimeError as error:
            cause = error.__cause__
            kept = (watched() is watch(module), module.weight.grad)
            return str(error), type(cause).__name__, str(cause), kept
        return "no error"

    assert same(scenario)[0] == "returned"


@pytest.mark.usefixtures("swap")
@pytest.mark.parametrize("assign", [True, False])
def test_loading_with_the_swap_flag(assign):
    """A load under the swap flag keeps the parameter objects and gives torch's contents."""

    def scenario(impl):
        module, other = tree(impl), tree(impl)
        for parameter in other.parameters():
            parameter.data.fill_(9)
        other.right.mean.fill_(8)
        parameters = list(module.parameters())
        result = module.load_state_dict(other.double().state_dict(), assign=assign)
        kept = [a is b for a, b in zip(parameters, module.parameters(), strict=True)]
        return result, kept, dict(module.state_dict(keep_vars=True))

    assert same(scenario)[0] == "returned"


@pytest.mark.usefixtures("swap")
@for_each("returned", ["self", "other", "fresh", "parameter", "error"])
def test_module_load_of_a_tensor_subclass(returned):
    """``module_load`` of the parameter decides what is swapped in; an alias is refused."""

    class Special(torch.Tensor):
        def module_load(self, other, assign=False):
            if returned == "error":
                raise ValueError("no load")
            fresh = other.detach().clone().as_subclass(Special)
            choice = {"self": self, "other": other, "fresh": fresh}
            return choice.get(returned, torch.nn.Parameter(fresh))

    def scenario(impl):
        module = child_leaf(impl)
        module.weight = torch.nn.Parameter(torch.ones(1).as_subclass(Special), requires_grad=False)
        weight = module.weight
        module.load_state_dict({"weight": torch.full((1,), 5.0)})
        kind = type(module.weight).__name__
        return kind, module.weight is weight, float(weight), weight.requires_grad

    assert same(scenario)


class Logged(torch.Tensor):
    """A tensor that notes by which functions it is treated."""

    log: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if not name.startswith("__get"):
            cls.log.append(name)
        return super().__torch_function__(func, types, args, kwargs or {})


@for_each(
    "call",
    [
        "m.float()",
        "m.double()",
        "m.half()",
        "m.bfloat16()",
        "m.cpu()",
        "m.type(torch.float64)",
        "m.to(torch.float64)",
        "m.to('cpu')",
        "m.to_empty(device='cpu')",
        "m.share_memory()",
        "m.requires_grad_(False)",
        "m.zero_grad()",
        "m.state_dict()",
        "m.state_dict(keep_vars=True)",
        "m.load_state_dict({'weight': ones(1), 'b': ones(1)})",
    ],
)
def test_tensor_subclasses_are_treated_by_the_same_functions(call):
    """A tensor subclass sees the tensor methods that torch calls, so its overrides apply."""

    def scenario(impl):
        module = child_leaf(impl)
        module.weight = torch.nn.Parameter(torch.ones(1).as_subclass(Logged))
        module.register_buffer("b", torch.ones(1).as_subclass(Logged))
        Logged.log.clear()
        run(call, module)
        members = (type(module.weight).__name__, type(module.b).__name__, module.weight.dtype)
        return list(Logged.log), members

    assert same(scenario)[0] == "returned"


def test_lazy_parameters_are_converted(impl: Implementation) -> None:
    """Uninitialized parameters and buffers take part in conversions."""
    module = leaf(impl)
    module.lazy = torch.nn.UninitializedParameter()
    module.register_buffer("lazy_buffer", torch.nn.UninitializedBuffer())
    module.double()

    assert module.lazy.dtype is torch.float64
    assert module.lazy_buffer.dtype is torch.float64
    assert isinstance(module.lazy, torch.nn.UninitializedParameter)
