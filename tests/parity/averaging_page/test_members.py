import inspect

import pytest
import torch

from tests.capabilities import MODULES_CAN_REPEAT
from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation, freeze, same
from tests.models import tensors
from tests.parity.averaging.rules import training_states
from tests.parity.averaging_page.nets import averaged_of, build, every_subject, inputs


REQUIRED = inspect.Parameter.empty

# The methods whose documented parameters the page of Module has not, or has otherwise.
DOCUMENTED = {
    "forward": {},
    "mtia": {"device": None},
    "register_load_state_dict_pre_hook": {"hook": REQUIRED},
    "register_state_dict_post_hook": {"hook": REQUIRED},
    "register_state_dict_pre_hook": {"hook": REQUIRED},
    "set_submodule": {"target": REQUIRED, "module": REQUIRED, "strict": False},
    "to_empty": {"device": REQUIRED, "recurse": True},
    "update_parameters": {"model": REQUIRED},
    "zero_grad": {"set_to_none": True},
}
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@for_each("method", DOCUMENTED)
def test_methods_have_the_documented_parameters(impl: Implementation, method: str) -> None:
    """Names and defaults are those of the page."""
    parameters = list(inspect.signature(getattr(impl.AveragedModel, method)).parameters.values())
    named = {p.name: p.default for p in parameters[1:] if p.kind not in VARIABLE}

    assert named == DOCUMENTED[method]


PUBLIC = [
    name
    for name, member in inspect.getmembers(torch.optim.swa_utils.AveragedModel, callable)
    if not name.startswith("_")
]


@for_each("method", PUBLIC)
def test_methods_have_the_signatures_of_torch(method: str) -> None:
    """Each public method takes the parameters of torch's, in their order and with their defaults."""

    def parameters(impl: Implementation) -> list[tuple[str, object, object]]:
        signature = inspect.signature(getattr(impl.AveragedModel, method))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    if method == "modules" and not MODULES_CAN_REPEAT:
        pytest.skip("test_traversal.py::test_modules shows the difference")

    assert parameters(MODKIT) == parameters(TORCH)


@every_subject
@pytest.mark.parametrize("method", ["add_module", "register_module"])
def test_add_module_adds_a_child(impl: Implementation, subject: str, method: str) -> None:
    """The child can be accessed by its name, and averaging goes on."""
    model, averaged = averaged_of(impl, subject)
    child = impl.nn.ReLU()
    getattr(averaged, method)("activation", child)
    averaged.update_parameters(model)

    assert averaged.activation is child
    assert [name for name, _ in averaged.named_children()] == ["module", "activation"]
    assert averaged.n_averaged == 3


@every_subject
def test_apply_visits_every_submodule_and_self(impl: Implementation, subject: str) -> None:
    """`apply` calls the function on the modules of the copy, then on the averaged model; returns it."""
    _, averaged = averaged_of(impl, subject)
    visited = []

    assert averaged.apply(visited.append) is averaged
    assert visited[-2:] == [averaged.module, averaged]
    assert set(visited) == set(averaged.modules())
    assert len(visited) == len(set(visited))


@every_subject
def test_apply_initializes_the_average(impl: Implementation, subject: str) -> None:
    """Initializing by `apply` changes the average and not the model; an update averages with it."""
    model, averaged = averaged_of(impl, subject, 3)
    before = freeze(model)

    @torch.no_grad()
    def ones(module):
        for parameter in module.parameters(recurse=False):
            parameter.fill_(1.0)

    averaged.apply(ones)
    filled = all((p == 1).all() for p in averaged.parameters())
    averaged.update_parameters(model)

    assert filled
    assert freeze(model) == before
    for own, other in zip(averaged.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, 1 + (other - 1) / 4)


@every_subject
def test_buffers_begin_with_the_count(impl: Implementation, subject: str) -> None:
    """`buffers` yields n_averaged and the buffers of the copy; without recursion n_averaged only."""
    _, averaged = averaged_of(impl, subject)
    listed = list(averaged.buffers())

    assert listed[0] is averaged.n_averaged
    assert [id(b) for b in listed[1:]] == [id(b) for b in averaged.module.buffers()]
    assert list(averaged.buffers(recurse=False)) == [averaged.n_averaged]


@every_subject
def test_parameters_are_those_of_the_copy(impl: Implementation, subject: str) -> None:
    """`parameters` yields the Parameters of the copy; without recursion there are none."""
    model, averaged = averaged_of(impl, subject)

    assert [id(p) for p in averaged.parameters()] == [id(p) for p in averaged.module.parameters()]
    assert all(isinstance(p, impl.nn.Parameter) for p in averaged.parameters())
    assert list(averaged.parameters(recurse=False)) == []
    assert {id(p) for p in averaged.parameters()}.isdisjoint(id(p) for p in model.parameters())


@every_subject
def test_names_have_the_prefix_of_the_copy(impl: Implementation, subject: str) -> None:
    """All names are those of the model behind `module.`; a prefix comes before that."""
    model, averaged = averaged_of(impl, subject)
    parameters = [f"x.module.{name}" for name, _ in model.named_parameters()]
    buffers = ["x.n_averaged", *(f"x.module.{name}" for name, _ in model.named_buffers())]
    modules = ["x", *(f"x.module.{n}" if n else "x.module" for n, _ in model.named_modules())]

    assert [name for name, _ in averaged.named_parameters("x")] == parameters
    assert [name for name, _ in averaged.named_buffers("x")] == buffers
    assert [name for name, _ in averaged.named_modules(prefix="x")] == modules
    assert list(dict(averaged.named_buffers(recurse=False))) == ["n_averaged"]


@every_subject
def test_children_and_modules(impl: Implementation, subject: str) -> None:
    """The only child is the copy; `modules` yields the averaged model, the copy and what is in it."""
    model, averaged = averaged_of(impl, subject)
    found = list(averaged.modules())

    assert list(averaged.children()) == [averaged.module]
    assert found[:2] == [averaged, averaged.module]
    assert [type(m) for m in found[1:]] == [type(m) for m in model.modules()]


def test_duplicates_are_returned_once(impl: Implementation) -> None:
    """A layer that the model holds twice is one layer of the copy; by request it has two names."""
    layer = impl.nn.Linear(2, 2)
    averaged = impl.AveragedModel(impl.nn.Sequential(layer, layer))
    names = [name for name, _ in averaged.named_modules()]
    everything = [name for name, _ in averaged.named_modules(remove_duplicate=False)]

    assert averaged.module[0] is averaged.module[1]
    assert names == ["", "module", "module.0"]
    assert everything == ["", "module", "module.0", "module.1"]
    assert len(list(averaged.parameters())) == 2
    assert len(list(averaged.named_parameters(remove_duplicate=False))) == 4


@every_subject
def test_memo_of_named_modules(impl: Implementation, subject: str) -> None:
    """Members in the memo are left out, and listed members are added to it."""
    _, averaged = averaged_of(impl, subject)
    memo = {averaged}

    assert list(averaged.named_modules(memo)) == []
    memo = {averaged.module}
    assert [name for name, _ in averaged.named_modules(memo)] == [""]
    assert memo == {averaged, averaged.module}


@every_subject
def test_getting_members_by_target(impl: Implementation, subject: str) -> None:
    """Each fully-qualified name leads to the member that is listed with it."""
    _, averaged = averaged_of(impl, subject)

    assert averaged.get_buffer("n_averaged") is averaged.n_averaged
    assert averaged.get_submodule("module") is averaged.module
    assert averaged.get_submodule("") is averaged
    for name, parameter in averaged.named_parameters():
        assert averaged.get_parameter(name) is parameter
    for name, buffer in averaged.named_buffers():
        assert averaged.get_buffer(name) is buffer
    for name, module in averaged.named_modules():
        assert averaged.get_submodule(name) is module


@every_subject
@pytest.mark.parametrize("method", ["get_buffer", "get_parameter", "get_submodule"])
@pytest.mark.parametrize(
    "target", ["nothing", "module.nothing", "nothing.weight", "n_averaged", "module", "use_buffers"]
)
def test_invalid_targets(subject: str, method: str, target: str) -> None:
    """A path that leads nowhere, or to another kind of member, raises torch's AttributeError."""

    def scenario(impl: Implementation) -> object:
        return getattr(averaged_of(impl, subject)[1], method)(target)

    valid = {("get_buffer", "n_averaged"), ("get_submodule", "module")}
    kind, *text = same(scenario)

    assert kind == ("returned" if (method, target) in valid else "raised")
    assert kind == "returned" or text[0] == "AttributeError"


@every_subject
def test_register_buffer(impl: Implementation, subject: str) -> None:
    """A buffer is an attribute and part of the state, unless it is not persistent or None."""
    model, averaged = averaged_of(impl, subject)
    averaged.register_buffer("kept", torch.ones(2))
    averaged.register_buffer("scratch", torch.zeros(2), persistent=False)
    averaged.register_buffer("unset", None)
    state = averaged.state_dict()
    averaged.update_parameters(model)

    assert {"kept", "scratch", "unset"} & state.keys() == {"kept"}
    assert [name for name, _ in averaged.named_buffers(recurse=False)] == [
        "n_averaged",
        "kept",
        "scratch",
    ]
    assert averaged.kept.tolist() == [1.0, 1.0]
    assert averaged.n_averaged == 3


@every_subject
def test_register_parameter(impl: Implementation, subject: str) -> None:
    """A parameter is an attribute and part of the state, unless it is None."""
    _, averaged = averaged_of(impl, subject)
    temperature = impl.nn.Parameter(torch.ones(1))
    averaged.register_parameter("temperature", temperature)
    averaged.register_parameter("unset", None)

    assert averaged.temperature is temperature
    assert list(averaged.parameters(recurse=False)) == [temperature]
    assert {"temperature", "unset"} & averaged.state_dict().keys() == {"temperature"}


NAMES = ["n_averaged", "module", "avg_fn", "update_parameters", "with.dot", ""]


@for_each("name", NAMES)
@for_each("method", ["register_buffer", "register_parameter", "add_module"])
def test_names_that_are_taken(method: str, name: str) -> None:
    """A member may be registered anew; any other name that is taken or bad is torch's KeyError."""

    def scenario(impl: Implementation) -> object:
        averaged = averaged_of(impl, "layer")[1]
        member = impl.nn.ReLU() if method == "add_module" else None
        getattr(averaged, method)(name, member)
        return list(averaged._buffers), list(averaged._parameters), list(averaged._modules)

    anew = {("register_buffer", "n_averaged"), ("add_module", "module")}
    kind, *text = same(scenario)

    assert kind == ("returned" if (method, name) in anew else "raised")
    assert kind == "returned" or text[0] == "KeyError"


# --- set_submodule ---------------------------------------------------------------------------------


def diagram(impl: Implementation):
    """Build the network of the diagram."""
    nn = impl.nn

    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.net_b = nn.Module()
            self.net_b.net_c = nn.Module()
            self.net_b.net_c.conv = nn.Conv2d(3, 3, 3)
            self.net_b.linear = nn.Linear(3, 3)

    return A()


@for_each("strict", [False, True])
@for_each("wrapped", [False, True], ids=["model", "average"])
def test_set_submodule_overrides(impl: Implementation, strict: bool, wrapped: bool) -> None:
    """A submodule that exists is replaced, whether strict is True or False."""
    model = diagram(impl)
    root = impl.AveragedModel(model) if wrapped else model
    prefix = "module." if wrapped else ""
    new = impl.nn.Linear(1, 1)
    root.set_submodule(f"{prefix}net_b.net_c.conv", new, strict=strict)

    assert root.get_submodule(f"{prefix}net_b.net_c.conv") is new


@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "average"])
def test_set_submodule_adds(impl: Implementation, wrapped: bool) -> None:
    """With strict=False, a new submodule is created where the parent module exists."""
    model = diagram(impl)
    root = impl.AveragedModel(model) if wrapped else model
    prefix = "module." if wrapped else ""
    new = impl.nn.Conv2d(1, 1, 1)
    root.set_submodule(f"{prefix}net_b.conv", new)

    assert root.get_submodule(f"{prefix}net_b.conv") is new
    assert [name for name, _ in root.get_submodule(f"{prefix}net_b").named_children()] == [
        "net_c",
        "linear",
        "conv",
    ]


ERRORS = {
    "strict and missing": ("net_b.conv", True, True, "AttributeError"),
    "missing parent": ("net_d.conv", True, False, "AttributeError"),
    "not a module on the path": ("net_b.linear.weight.conv", True, False, "AttributeError"),
    "empty": ("", True, False, "ValueError"),
    "not a module": ("net_b.linear", False, False, "ValueError"),
}


@for_each("case", ERRORS)
@for_each("wrapped", [False, True], ids=["model", "average"])
def test_set_submodule_errors(case: str, wrapped: bool) -> None:
    """Empty targets and values that are not modules are ValueErrors; missing paths AttributeErrors."""
    target, is_module, strict, error = ERRORS[case]

    def scenario(impl: Implementation) -> object:
        model = diagram(impl)
        root = impl.AveragedModel(model) if wrapped else model
        path = f"module.{target}" if wrapped and target else target
        root.set_submodule(path, impl.nn.ReLU() if is_module else "relu", strict=strict)

    assert same(scenario)[:2] == ("raised", error)


@every_subject
def test_a_replaced_copy_is_averaged_into(impl: Implementation, subject: str) -> None:
    """If `module` is replaced by `set_submodule`, updates go on in the new copy."""
    model, averaged = averaged_of(impl, subject, 3)
    new = build(impl, subject)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.fill_(1.0)
    averaged.set_submodule("module", new)
    list(training_states(model, 1))
    averaged.update_parameters(model)

    assert averaged.module is new
    assert averaged.n_averaged == 4
    for own, other in zip(new.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, 1 + (other - 1) / 4)


# --- text, modes, gradients ------------------------------------------------------------------------


@every_subject
def test_extra_repr_is_empty(subject: str) -> None:
    """The averaged model adds nothing to its text but the copy."""

    def scenario(impl: Implementation) -> object:
        averaged = averaged_of(impl, subject)[1]
        return averaged.extra_repr(), repr(averaged)

    kind, value = same(scenario)

    assert kind == "returned"
    assert value[1][0] == ("str", "''")


def test_extra_repr_of_a_subclass_is_printed(impl: Implementation) -> None:
    """A subclass may re-implement it to print information."""

    class Described(impl.AveragedModel):
        def extra_repr(self):
            return f"count={self.n_averaged.item()}"

    text = repr(Described(build(impl, "layer")))

    assert text.startswith("Described(\n  count=0\n  (module): Linear(")


@every_subject
@pytest.mark.parametrize("mode", [True, False, None])
def test_train_and_eval_reach_the_copy(impl: Implementation, subject: str, mode) -> None:
    """`train(mode)` and `eval()` set the mode of every module, not the model's, and return self."""
    model, averaged = averaged_of(impl, subject)
    returned = averaged.eval() if mode is None else averaged.eval().train(mode)
    averaged.update_parameters(model)

    assert returned is averaged
    assert {m.training for m in averaged.modules()} == {bool(mode)}
    assert all(m.training for m in model.modules())


@every_subject
@pytest.mark.parametrize("flag", [True, False])
def test_requires_grad_is_set_in_place(impl: Implementation, subject: str, flag: bool) -> None:
    """`requires_grad_` sets the flag of all parameters, returns self, and updates keep it."""
    model, averaged = averaged_of(impl, subject)
    objects = [id(p) for p in averaged.parameters()]

    assert averaged.requires_grad_(flag) is averaged

    averaged.update_parameters(model)

    assert [id(p) for p in averaged.parameters()] == objects
    assert {p.requires_grad for p in averaged.parameters()} == {flag}
    assert all(p.requires_grad for p in model.parameters())
    assert not averaged.n_averaged.requires_grad


@every_subject
def test_zero_grad_resets_the_gradients(impl: Implementation, subject: str) -> None:
    """`zero_grad` sets the gradients of the average to None, or to zero; the model keeps its own."""
    model, averaged = averaged_of(impl, subject)
    for module in model, averaged:
        module(inputs()).square().sum().backward()
    averaged.zero_grad(set_to_none=False)
    zeros = all((p.grad == 0).all() for p in averaged.parameters())
    averaged.zero_grad()

    assert zeros
    assert all(p.grad is None for p in averaged.parameters())
    assert all(p.grad is not None for p in model.parameters())


@every_subject
def test_updates_leave_gradients(impl: Implementation, subject: str) -> None:
    """An update changes no gradient, neither of the average nor of the model."""
    model, averaged = averaged_of(impl, subject)
    for module in model, averaged:
        module(inputs()).square().sum().backward()
    gradients = [p.grad.clone() for m in (model, averaged) for p in m.parameters()]
    averaged.update_parameters(model)
    found = [p.grad for m in (model, averaged) for p in m.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))
    assert len(list(tensors(averaged))) == len(list(tensors(model))) + 1
