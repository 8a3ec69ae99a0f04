from collections.abc import Iterator

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation
from tests.parity.module_page.nets import (
    BUFFERS,
    LINEAR,
    MODULES,
    PARAMETERS,
    SEQUENTIAL,
    network,
    scaling,
)


def shared(impl: Implementation):
    """Build a user module that holds one child, one parameter and one buffer twice each."""
    module = impl.nn.Module()
    module.first = module.second = scaling(impl)
    module.third = module.first.factor
    module.register_buffer("a", torch.ones(1))
    module.register_buffer("b", module.a)
    return module


@for_each(
    "method",
    [
        "buffers",
        "children",
        "modules",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
    ],
)
def test_listing_is_an_iterator(impl: Implementation, method: str) -> None:
    """Each listing returns an iterator, also on a module without members."""
    full = getattr(network(impl), method)()
    empty = getattr(impl.nn.Module(), method)()

    assert isinstance(full, Iterator)
    assert isinstance(empty, Iterator)
    assert next(full) is not None
    assert len(list(empty)) == (1 if method in {"modules", "named_modules"} else 0)


@for_each("kind", ["buffers", "children", "modules", "parameters"])
def test_named_listing_pairs_names_with_members(impl: Implementation, kind: str) -> None:
    """A named listing yields tuples of a str and the member that the plain listing yields."""
    model = network(impl)
    pairs = list(getattr(model, f"named_{kind}")())
    members = list(getattr(model, kind)())

    assert {type(pair) for pair in pairs} == {tuple}
    assert {type(name) for name, _ in pairs} == {str}
    assert [id(member) for _, member in pairs] == [id(member) for member in members]


def test_apply_visits_all_modules_and_then_self(impl: Implementation) -> None:
    """`apply` calls the function on every submodule recursively, children before parents."""
    model = network(impl)
    names = {module: name for name, module in model.named_modules()}
    visited: list[str] = []
    model.apply(lambda module: visited.append(names[module]))

    assert visited == [
        "block.linear",
        "block.norm",
        "block.dropout",
        "block",
        "head.0.linear",
        "head.0.norm",
        "head.0.dropout",
        "head.0",
        "head.1",
        "head",
        "",
    ]


def test_apply_returns_self(impl: Implementation) -> None:
    """`apply` returns the module and ignores what the function returns."""
    model = network(impl)

    assert model.apply(lambda _: "ignored") is model


def test_apply_initializes_parameters(impl: Implementation) -> None:
    """`apply` with functions of nn.init initializes the parameters of the tree."""
    init = impl.submodule("nn.init")
    model = network(impl)

    def initialize(module) -> None:
        if isinstance(module, impl.nn.Linear):
            init.constant_(module.weight, 3.0)
            init.zeros_(module.bias)

    model.apply(initialize)

    for linear in (model.block.linear, model.head[0].linear, model.head[1]):
        assert torch.equal(linear.weight, torch.full_like(linear.weight, 3.0))
        assert torch.equal(linear.bias, torch.zeros_like(linear.bias))


def test_apply_prints_modules_and_weights(
    impl: Implementation, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of `apply` prints exactly what the page shows."""
    nn = impl.nn

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


def test_buffers_include_those_of_submodules(impl: Implementation) -> None:
    """`buffers` and `named_buffers` yield the buffers of the module and all submodules."""
    model = network(impl)

    assert [name for name, _ in model.named_buffers()] == BUFFERS
    assert [id(b) for b in model.buffers()] == [id(model.get_buffer(name)) for name in BUFFERS]


def test_buffers_without_recursion_are_direct_members(impl: Implementation) -> None:
    """recurse=False leaves the buffers of submodules out."""
    model = network(impl)

    assert [name for name, _ in model.named_buffers(recurse=False)] == ["mean", "count", "scratch"]
    assert [id(b) for b in model.buffers(recurse=False)] == [
        id(model.mean),
        id(model.count),
        id(model.scratch),
    ]
    assert list(model.head.buffers(recurse=False)) == []


def test_parameters_include_those_of_submodules(impl: Implementation) -> None:
    """`parameters` and `named_parameters` yield those of the module and all submodules."""
    model = network(impl)

    assert [name for name, _ in model.named_parameters()] == PARAMETERS
    assert [id(p) for p in model.parameters()] == [id(model.get_parameter(n)) for n in PARAMETERS]


def test_parameters_without_recursion_are_direct_members(impl: Implementation) -> None:
    """recurse=False leaves the parameters of submodules out."""
    model = network(impl)

    assert [name for name, _ in model.named_parameters(recurse=False)] == ["scale"]
    assert [id(p) for p in model.parameters(recurse=False)] == [id(model.scale)]
    assert list(model.head.parameters(recurse=False)) == []


def test_parameters_go_to_an_optimizer(impl: Implementation) -> None:
    """An optimizer built on `parameters()` updates every parameter of the tree."""
    model = network(impl)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()

    assert all(torch.equal(p, old - 1) for p, old in zip(model.parameters(), before, strict=True))


def test_printing_buffers_and_parameters(impl: Implementation) -> None:
    """The loops over `buffers()` and `parameters()` print types and sizes as torch 2.13 does.

    The page shows the output of an older version: sizes as tuples of longs, parameters as tensors.
    """
    model = impl.nn.Module()
    model.register_buffer("flat", torch.zeros(20))
    model.register_buffer("kernel", torch.zeros(20, 1, 5, 5))
    model.bias = impl.nn.Parameter(torch.zeros(20))
    model.weight = impl.nn.Parameter(torch.zeros(20, 1, 5, 5))

    assert [f"{type(buf)} {buf.size()}" for buf in model.buffers()] == [
        "<class 'torch.Tensor'> torch.Size([20])",
        "<class 'torch.Tensor'> torch.Size([20, 1, 5, 5])",
    ]
    assert [f"{type(param)} {param.size()}" for param in model.parameters()] == [
        "<class 'torch.nn.parameter.Parameter'> torch.Size([20])",
        "<class 'torch.nn.parameter.Parameter'> torch.Size([20, 1, 5, 5])",
    ]


def test_iterating_over_buffers_and_parameters(impl: Implementation) -> None:
    """`buffers()` and `parameters()` of layers yield tensors with their types and sizes."""
    model = impl.nn.Sequential(impl.nn.Conv2d(1, 20, 5), impl.nn.BatchNorm2d(20))

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
    norm = impl.nn.BatchNorm1d(3)
    model = impl.nn.Module()
    for number in range(1, 6):
        model.add_module(f"conv{number}", impl.nn.Conv2d(1, number, 1))

    assert [b.size() for n, b in norm.named_buffers() if n == "running_var"] == [(3,)]
    assert [p.size() for n, p in norm.named_parameters() if n == "bias"] == [(3,)]
    assert [str(m) for n, m in model.named_children() if n in {"conv4", "conv5"}] == [
        "Conv2d(1, 4, kernel_size=(1, 1), stride=(1, 1))",
        "Conv2d(1, 5, kernel_size=(1, 1), stride=(1, 1))",
    ]


@pytest.mark.parametrize(
    ("method", "names"), [("named_buffers", BUFFERS), ("named_parameters", PARAMETERS)]
)
def test_prefix_is_prepended_to_all_names(
    impl: Implementation, method: str, names: list[str]
) -> None:
    """The prefix and a dot stand before every name; the default prefix is empty."""
    listing = getattr(network(impl), method)

    assert [name for name, _ in listing(prefix="p.q")] == [f"p.q.{name}" for name in names]
    assert [name for name, _ in listing(prefix="")] == names


def test_duplicate_buffers_are_removed_by_default(impl: Implementation) -> None:
    """A buffer with two names is listed once, or twice with remove_duplicate=False."""
    module = shared(impl)

    assert [name for name, _ in module.named_buffers()] == ["a"]
    assert [name for name, _ in module.named_buffers(remove_duplicate=True)] == ["a"]
    assert [name for name, _ in module.named_buffers(remove_duplicate=False)] == ["a", "b"]


def test_duplicate_parameters_are_removed_by_default(impl: Implementation) -> None:
    """A parameter with several names is listed once, or by all with remove_duplicate=False."""
    module = shared(impl)

    assert [name for name, _ in module.named_parameters()] == ["third"]
    assert [name for name, _ in module.named_parameters(remove_duplicate=True)] == ["third"]
    assert [name for name, _ in module.named_parameters(remove_duplicate=False)] == [
        "third",
        "first.factor",
        "second.factor",
    ]


def test_children_are_immediate(impl: Implementation) -> None:
    """`children` and `named_children` yield the direct children, not their children."""
    model = network(impl)

    assert list(model.children()) == [model.block, model.head]
    assert list(model.named_children()) == [("block", model.block), ("head", model.head)]


def test_modules_cover_the_whole_network(impl: Implementation) -> None:
    """`modules` and `named_modules` yield the module itself and all its descendants."""
    model = network(impl)

    assert [name for name, _ in model.named_modules()] == MODULES
    assert list(model.modules()) == [model.get_submodule(name) for name in MODULES]


def test_modules_lists_a_duplicate_once(impl: Implementation) -> None:
    """The example of `modules` enumerates the network and the shared layer."""
    l = impl.nn.Linear(2, 2)  # noqa: E741 - the example's name
    net = impl.nn.Sequential(l, l)

    assert [f"{idx} -> {m}" for idx, m in enumerate(net.modules())] == [
        f"0 -> {SEQUENTIAL}",
        f"1 -> {LINEAR}",
    ]


def test_modules_lists_a_duplicate_user_module_once(impl: Implementation) -> None:
    """A shared user module is listed once, under its first name."""
    module = shared(impl)

    assert list(module.modules()) == [module, module.first]
    assert list(module.named_modules()) == [("", module), ("first", module.first)]


def test_named_modules_lists_a_duplicate_once(impl: Implementation) -> None:
    """The example of `named_modules` names the shared layer by its first place."""
    l = impl.nn.Linear(2, 2)  # noqa: E741 - the example's name
    net = impl.nn.Sequential(l, l)

    assert [f"{idx} -> {m}" for idx, m in enumerate(net.named_modules())] == [
        f"0 -> ('', {SEQUENTIAL})",
        f"1 -> ('0', {LINEAR})",
    ]
    assert [name for name, _ in net.named_modules(remove_duplicate=False)] == ["", "0", "1"]


def test_memo_holds_the_modules_already_listed(impl: Implementation) -> None:
    """`named_modules` skips what is in the memo and adds what it yields."""
    model = network(impl)
    memo = {model.block}
    names = [name for name, _ in model.named_modules(memo)]

    assert names == [name for name in MODULES if not name.startswith("block")]
    assert memo == {model.block, *(model.get_submodule(name) for name in names)}


def test_prefix_is_added_to_module_names(impl: Implementation) -> None:
    """The prefix is the name of the module itself and stands before all others."""
    names = [name for name, _ in network(impl).named_modules(prefix="p")]

    assert names == ["p", *(f"p.{name}" for name in MODULES[1:])]


def test_duplicate_modules_are_listed_on_request(impl: Implementation) -> None:
    """remove_duplicate=False names a shared module, and its members, once for each place."""
    module = shared(impl)
    listed = list(module.named_modules(remove_duplicate=False))

    assert listed == [("", module), ("first", module.first), ("second", module.first)]
