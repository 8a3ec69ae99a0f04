import copy
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

import modkit
from tests.helpers import Implementation, freeze
from tests.unit.fast_networks import attributes, make_net


def test_members_become_plain_attributes(impl: Implementation) -> None:
    """Parameters, buffers, children and empty slots stand in the instance dictionary."""
    net = make_net(impl)
    members = dict(scale=net.scale, nothing=None, offset=net.offset, inner=net.inner)
    weight = net.inner.weight

    with modkit.fast_attributes(net) as entered:
        found = {name: vars(net)[name] for name in members}
        inner_weight = vars(net.inner)["weight"]

    assert entered is net
    assert all(found[name] is value for name, value in members.items())
    assert inner_weight is weight


def test_names_that_are_no_identifiers_are_not_copied(impl: Implementation) -> None:
    """The children of a container have numbers for names, which no attribute read uses."""
    net = impl.nn.Sequential(impl.nn.ReLU(), impl.nn.ReLU())

    with modkit.fast_attributes(net):
        inside = set(vars(net))

    assert inside.isdisjoint({"0", "1"})


def test_everything_is_as_before_afterwards(impl: Implementation) -> None:
    """After the block each instance dictionary has the same objects in the same order."""
    net = make_net(impl)
    before = attributes(net)

    with modkit.fast_attributes(net):
        net(torch.rand(3, 4))
        inside = attributes(net)

    assert attributes(net) == before
    assert inside != before


def test_an_exception_restores_everything(impl: Implementation) -> None:
    """A block that is left by an exception is undone like any other, and the exception passes."""
    net = make_net(impl)
    before = attributes(net)

    with pytest.raises(ZeroDivisionError), modkit.fast_attributes(net):
        raise ZeroDivisionError

    assert attributes(net) == before


def test_a_walk_that_fails_changes_nothing(impl: Implementation) -> None:
    """If the modules cannot be listed, no module is left half way."""

    class Broken(impl.Module):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            yield "", self
            raise ValueError("no list")

    net = impl.nn.Sequential(impl.nn.Linear(2, 2))
    before = attributes(net)
    net.broken = Broken()

    with pytest.raises(ValueError, match="no list"), modkit.fast_attributes(net):
        pass
    del net.broken

    assert attributes(net) == before


@pytest.mark.parametrize("inner_first", [True, False])
def test_blocks_nest_and_overlap(impl: Implementation, inner_first: bool) -> None:
    """A member stays fast until the last block around it ends, in whatever order they end."""
    shared = impl.nn.Linear(2, 2)
    left = impl.nn.Sequential(shared, impl.nn.Linear(2, 2))
    right = impl.nn.Sequential(impl.nn.LayerNorm(2), shared)
    before = attributes(left), attributes(right)

    first, second = ExitStack(), ExitStack()
    first.enter_context(modkit.fast_attributes(left))
    second.enter_context(modkit.fast_attributes(right))
    second.enter_context(modkit.fast_attributes(shared))
    order = [second, first] if inner_first else [first, second]
    order[0].close()
    between = "weight" in vars(shared)
    order[1].close()

    assert between
    assert (attributes(left), attributes(right)) == before


def test_the_same_model_twice(impl: Implementation) -> None:
    """The inner block of the same model ends without an effect; the outer one restores."""
    net = make_net(impl)
    before = attributes(net)

    with modkit.fast_attributes(net):
        outer = attributes(net)
        with modkit.fast_attributes(net):
            inner = attributes(net)
        between = attributes(net)

    assert outer == inner == between
    assert attributes(net) == before


def test_shared_modules_and_tied_weights(impl: Implementation) -> None:
    """A module in two places and a weight in two modules are the same objects inside."""
    nn = impl.nn
    net = nn.Module()
    net.encoder = nn.Linear(3, 3)
    net.again = net.encoder
    net.decoder = nn.Linear(3, 3)
    net.decoder.weight = net.encoder.weight
    before = attributes(net)

    with modkit.fast_attributes(net):
        same_module = net.again is net.encoder
        same_weight = net.decoder.weight is net.encoder.weight

    assert same_module
    assert same_weight
    assert attributes(net) == before


LAYERS: dict[str, tuple[Callable[[Any], torch.nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "linear": (lambda nn: nn.Linear(4, 3), lambda: (torch.rand(2, 4),)),
    "conv": (lambda nn: nn.Conv2d(2, 3, 2), lambda: (torch.rand(1, 2, 4, 4),)),
    "norm": (lambda nn: nn.BatchNorm1d(4), lambda: (torch.rand(3, 4),)),
    "embedding": (lambda nn: nn.Embedding(5, 2), lambda: (torch.tensor([1, 3]),)),
    "lstm": (lambda nn: nn.LSTM(4, 3, num_layers=2), lambda: (torch.rand(5, 2, 4),)),
    "attention": (lambda nn: nn.MultiheadAttention(4, 2), lambda: (torch.rand(5, 2, 4),) * 3),
    "transformer": (
        lambda nn: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
        lambda: (torch.rand(5, 2, 4),),
    ),
    "lazy": (lambda nn: nn.LazyLinear(3), lambda: (torch.rand(2, 4),)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_buffers_are_the_same(impl: Implementation, layer: str, training: bool) -> None:
    """A call inside returns the bits that it returns outside, and updates the same buffers."""
    make, make_input = LAYERS[layer]
    plain, inputs = make(impl.nn).train(training), make_input()
    fast = copy.deepcopy(plain)

    torch.manual_seed(1)
    expected = plain(*inputs)
    torch.manual_seed(1)
    with modkit.fast_attributes(fast):
        actual = fast(*inputs)

    assert freeze(actual) == freeze(expected)
    assert freeze(fast.state_dict()) == freeze(plain.state_dict())


def test_changes_in_place_are_seen(impl: Implementation) -> None:
    """An optimizer and ``load_state_dict`` change the tensors that the module reads."""
    net, twin, x = make_net(impl).eval(), make_net(impl).eval(), torch.rand(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    with modkit.fast_attributes(net):
        net(x).sum().backward()
        first = net(x)
        optimizer.step()
        second = net(x)
        net.load_state_dict(twin.state_dict())
        third = net(x)

    assert not torch.equal(first, second)
    assert freeze(second.detach()) != freeze(third.detach())
    assert torch.equal(third, twin(x))


def test_what_changes_no_member_works_inside(impl: Implementation) -> None:
    """Modes, gradients, hooks, saving, walking, printing and plain attributes are as ever."""
    net, x = make_net(impl), torch.rand(3, 4)
    text, names = repr(net), [name for name, _ in net.named_modules()]
    seen: list[str] = []

    with modkit.fast_attributes(net):
        handle = net.inner.register_forward_hook(lambda *_: seen.append("hook"))
        net.eval().requires_grad_(False)
        net(x)
        handle.remove()
        net.label = "changed"
        net.fresh = torch.ones(1)
        net.scale = net.scale
        net.zero_grad()
        state = net.state_dict()
        printed, walked = repr(net), [name for name, _ in net.named_modules()]

    assert seen == ["hook"]
    assert (printed, walked) == (text, names)
    assert freeze(state) == freeze(net.state_dict())
    assert (net.label, net.fresh.item()) == ("changed", 1.0)
    assert not net.training
    assert not net.scale.requires_grad


def test_a_clone_by_dict_stays_consistent(impl: Implementation) -> None:
    """Who copies ``__dict__`` gets a module whose members can be read, but never changed."""
    net = impl.nn.Linear(2, 2)
    clone = type(net).__new__(type(net))

    with modkit.fast_attributes(net):
        clone.__dict__.update(net.__dict__)
    with pytest.raises(RuntimeError, match="leave the fast_attributes block first"):
        clone._parameters["weight"] = None

    assert clone.weight is clone._parameters["weight"] is net.weight


def test_what_the_class_defines_is_not_hidden(impl: Implementation) -> None:
    """A property, a method and a value of the class keep winning over a member of that name."""

    class Shadowed(impl.Module):
        kind = "class value"

        def __init__(self) -> None:
            super().__init__()
            for name in ("kind", "size", "scale"):
                self._parameters[name] = torch.nn.Parameter(torch.ones(1))

        @property
        def size(self) -> str:
            return "property"

        def scale(self) -> str:
            return "method"

    module = Shadowed()
    read = lambda: (module.kind, module.size, module.scale())
    before = attributes(module)

    with modkit.fast_attributes(module):
        inside = read()

    assert inside == read() == ("class value", "property", "method")
    assert attributes(module) == before


def test_what_the_instance_has_is_not_hidden(impl: Implementation) -> None:
    """A value that stands in the instance dictionary under a member's name stays there."""
    net = impl.nn.Linear(2, 2)
    other = torch.ones(2, 2)
    vars(net)["weight"] = other

    with modkit.fast_attributes(net):
        inside = net.weight

    assert inside is net.weight is other


def test_a_value_written_to_the_dictionary_inside_stays(impl: Implementation) -> None:
    """Who writes to the instance dictionary inside finds the value there afterwards."""
    net = impl.nn.Linear(2, 2)
    other = torch.ones(2, 2)

    with modkit.fast_attributes(net):
        vars(net)["weight"] = other

    assert net.weight is other


def test_patched_methods_of_the_instance_are_called(impl: Implementation) -> None:
    """A method that somebody has put on the instance still runs, and is back at its place."""
    net = impl.nn.Linear(2, 2)
    calls = []
    original = net.named_modules
    net.named_modules = lambda *args, **kwargs: calls.append("walk") or original(*args, **kwargs)
    before = list(vars(net).items())

    with modkit.fast_attributes(net):
        calls.clear()
        list(net.named_modules())

    assert calls == ["walk"]
    assert list(vars(net).items()) == before


def unchanged(module: torch.nn.Module) -> bool:
    """Tell whether a block around the module leaves its dictionary alone."""
    before = list(vars(module))
    with modkit.fast_attributes(module):
        return list(vars(module)) == before


@pytest.mark.parametrize("method", ["__getattr__", "__getattribute__"])
def test_attribute_access_of_its_own_is_left_alone(impl: Implementation, method: str) -> None:
    """A class that computes what a read returns goes on computing it."""
    nn = impl.nn

    def read(self: Any, name: str) -> Any:
        value = getattr(super(Doubled, self), method)(name)
        return value * 2 if name == "weight" else value

    Doubled = type("Doubled", (nn.Linear,), {method: read})
    module = Doubled(2, 2)
    module._parameters["weight"] = torch.nn.Parameter(torch.ones(2, 2))
    expected = module.weight

    with modkit.fast_attributes(nn.Sequential(module)):
        inside = module.weight

    assert torch.equal(inside, expected)
    assert unchanged(module)


def test_foreign_registries_are_left_alone(impl: Implementation) -> None:
    """A registry that fetches its values goes on being asked, and can be changed."""

    class Fetching(dict):
        def __getitem__(self, name: str) -> Any:
            fetched.append(name)
            return super().__getitem__(name)

    fetched: list[str] = []
    net = impl.nn.Linear(2, 2)
    net._parameters = Fetching(net._parameters)

    with modkit.fast_attributes(net):
        weight = net.weight
        net.weight = torch.nn.Parameter(torch.ones(2, 2))

    assert "weight" in fetched
    assert net.weight is not weight
    assert unchanged(net)


def test_an_uninitialized_module_is_left_alone(impl: Implementation) -> None:
    """A module without registries, as inside a constructor, has nothing to make fast."""
    net = impl.nn.Linear.__new__(impl.nn.Linear)
    net.__dict__["_modules"] = {}

    assert unchanged(net)


def test_parametrized_weights_are_computed(impl: Implementation) -> None:
    """A parametrization goes on computing the weight from what it has learnt."""
    parametrize = torch.nn.utils.parametrize
    net = impl.nn.Linear(3, 3)
    symmetric = impl.nn.Module()
    symmetric.forward = lambda x: x.triu() + x.triu(1).T
    parametrize.register_parametrization(net, "weight", symmetric)
    before = attributes(net)

    with modkit.fast_attributes(net):
        with torch.no_grad():
            net.parametrizations.weight.original.mul_(2)
        inside = net.weight

    assert torch.equal(inside, inside.T)
    assert torch.equal(inside, net.weight)
    assert attributes(net) == before


def test_a_weight_that_a_hook_computes_stays_current(impl: Implementation) -> None:
    """Pruning computes the weight before each call, from the parameter as it is then."""
    net, x = impl.nn.Linear(3, 3, bias=False), torch.rand(2, 3)
    prune.random_unstructured(net, "weight", 0.5)

    with modkit.fast_attributes(net), torch.no_grad():
        net.weight_orig.fill_(1.0)
        inside = net(x)

    assert torch.equal(inside, x @ net.weight_mask.T)


@pytest.mark.parametrize("managed", [True, False])
def test_whether_fsdp_manages_a_module_can_be_asked(impl: Implementation, managed: bool) -> None:
    """Libraries ask this of any model in eager code, and get the answer that they get outside."""
    net = impl.nn.Linear(2, 2)
    if managed:
        net._is_fsdp_managed_module = True
    before = list(vars(net).items())

    with modkit.fast_attributes(net):
        inside = bool(getattr(net, "_is_fsdp_managed_module", False))

    assert inside is managed
    assert list(vars(net).items()) == before


def test_a_lazy_module_is_initialized_inside(impl: Implementation) -> None:
    """The first call turns a lazy layer into a plain one, and the block ends as usual."""
    net = impl.nn.LazyLinear(3)

    with modkit.fast_attributes(net):
        inside = net(torch.rand(2, 4))

    assert type(net) is impl.nn.Linear
    assert inside.shape == (2, 3)
    assert type(net._parameters) is dict
    assert "weight" not in vars(net)


def test_threads_may_enter_and_leave_at_once(impl: Implementation) -> None:
    """Blocks of several threads overlap at random; all calls agree, and nothing is left."""
    net, x = make_net(impl).eval(), torch.rand(3, 4)
    del net.count
    net.count = 0
    before, expected = list(vars(net)), freeze(net(x))
    outcomes: list[Any] = []

    def work() -> None:
        try:
            for _ in range(30):
                with modkit.fast_attributes(net), torch.inference_mode():
                    outcomes.append(torch.equal(net(x), reference))
        except Exception as error:
            outcomes.append(error)

    reference = net(x).detach()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outcomes == [True] * 120
    assert freeze(net(x)) == expected
    assert list(vars(net)) == before
