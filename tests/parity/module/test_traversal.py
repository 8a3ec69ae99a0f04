import inspect
import itertools
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, empty, leaf, tree
from tests.parity.module.contents import run


def names(module: torch.nn.Module, root: torch.nn.Module) -> str:
    """Return the path of a module below the root, to compare across implementations."""
    return next((path for path, each in root.named_modules() if each is module), "?")


@for_each("recurse", [True, False])
@for_each("method", ["parameters", "buffers"])
def test_members(method, recurse):
    """Members come in the order of registration, each once, without ``None`` slots."""

    def scenario(impl):
        module = tree(impl)
        keyword = [*getattr(module, method)(recurse=recurse)]
        positional = [*getattr(module, method)(recurse)]
        assert all(a is b for a, b in zip(keyword, positional, strict=True))
        return keyword

    assert same(scenario)[0] == "returned"


@for_each("prefix", ["", "net", "a.b", "net."])
@for_each(("recurse", "unique"), list(itertools.product([True, False], [True, False])))
@for_each("method", ["named_parameters", "named_buffers"])
def test_named_members(method, recurse, unique, prefix):
    """Every combination of flags and prefixes gives torch's names and order."""

    def scenario(impl):
        module = tree(impl)
        found = [*getattr(module, method)(prefix, recurse, unique)]
        again = getattr(module, method)(remove_duplicate=unique, prefix=prefix, recurse=recurse)
        assert [name for name, _ in found] == [name for name, _ in again]
        return found

    assert same(scenario)[0] == "returned"


@for_each("prefix", ["", "net", "a.b"])
@for_each("unique", [True, False])
def test_named_modules(unique, prefix):
    """Modules come parents first, depth first; shared ones once, or under every path."""

    def scenario(impl):
        pairs = tree(impl).named_modules(prefix=prefix, remove_duplicate=unique)
        return [(name, type(module).__name__) for name, module in pairs]

    assert same(scenario)[0] == "returned"


@pytest.mark.parametrize("unique", [True, False])
def test_modules(impl: Implementation, unique: bool) -> None:
    """``modules`` yields what ``named_modules`` yields, without the names."""
    module = tree(impl)
    expected = [each for _, each in module.named_modules(remove_duplicate=unique)]
    found = list(module.modules(unique))

    assert len(found) == len(expected) == (5 if unique else 6) - 1
    assert all(a is b for a, b in zip(found, expected, strict=True))
    assert found[0] is module


class Memo(list):
    """A memo that has `in` and `add` alone of what sets have."""

    def __contains__(self, module):
        return any(module is each for each in self)

    def add(self, module):
        """Append a module."""
        self.append(module)


@for_each("held", [[], [""], ["left"], ["left.inner"], ["right"]])
@for_each("unique", [True, False])
@for_each("kind", [set, Memo])
def test_a_given_memo(kind, unique, held):
    """It leaves out what it holds, and gets each module when that is yielded, unless all are kept."""

    def scenario(impl):
        module = tree(impl)
        memo = kind(module.get_submodule(name) for name in held)
        steps = [(name, len(memo)) for name, _ in module.named_modules(memo, "p", unique)]
        return steps, sorted(names(each, module) for each in memo)

    assert same(scenario)[0] == "returned"


def test_a_tensor_shared_as_parameter_and_buffer(impl: Implementation) -> None:
    """Parameters and buffers are deduplicated apart from each other."""
    module = empty(impl)
    parameter = torch.nn.Parameter(torch.ones(1))
    module.p = parameter
    module.register_buffer("b", parameter)
    module.register_buffer("c", parameter)

    assert [name for name, _ in module.named_parameters()] == ["p"]
    assert [name for name, _ in module.named_buffers()] == ["b"]


@for_each(
    "call",
    [
        "m.parameters()",
        "m.named_parameters()",
        "m.buffers()",
        "m.named_buffers()",
        "m.children()",
        "m.named_children()",
        "m.modules()",
        "m.named_modules()",
        "m._named_members(lambda module: module._buffers.items())",
    ],
)
def test_walks_are_lazy_generators(impl: Implementation, call: str) -> None:
    """A walk is a generator that looks at the module when it is advanced, not when it is made."""
    module = leaf(impl)
    walk = run(call, module)
    module.late = child_leaf(impl)
    module.register_buffer("newer", torch.full((1,), 5.0))
    module.late_parameter = torch.nn.Parameter(torch.ones(1))
    found = list(walk)

    assert inspect.isgenerator(walk)
    assert len(found) == len(list(run(call, module)))
    assert list(walk) == []


@for_each("method", ["parameters", "named_parameters", "buffers", "named_buffers"])
def test_members_do_not_look_ahead(impl: Implementation, method: str) -> None:
    """Only what has been asked for is walked: a later child may still be exchanged."""
    module = empty(impl)
    module.a, module.b = leaf(impl), leaf(impl)
    walk = getattr(module, method)()
    next(walk)
    module.b = replacement = empty(impl)
    replacement.p = torch.nn.Parameter(torch.zeros(7))
    replacement.register_buffer("q", torch.zeros(7))
    last = list(walk)[-1]

    assert (last[1] if isinstance(last, tuple) else last).shape == (7,)


@for_each(
    "call",
    [
        "[m.add_module(n + 'x', Identity()) for n, _ in m.named_children()]",
        "[m.add_module('x', Identity()) for _ in m.children()]",
        "[m.add_module('x', Identity()) for _ in m.modules()]",
        "[m.add_module('x', Identity()) for _ in m.named_modules()]",
        "[m.register_buffer(n + 'x', ones(1)) for n, _ in m.right.named_buffers()]",
        "[m.right.register_buffer(n + 'x', ones(1)) for n, _ in m.right.named_buffers()]",
        "[m.register_parameter(n + 'x', Parameter(ones(1))) for n, _ in m.named_parameters()]",
        "[m.add_module('x', Identity()) for _ in m.parameters()]",
        "[m.register_parameter('x', Parameter(ones(1))) for _ in m.parameters()]",
        "[delattr(m, n) for n, _ in m.named_children()]",
        "[delattr(m, 'right') for n, _ in m.named_modules() if n == 'right']",
        "m.apply(lambda module: m.add_module('x', Identity()))",
        "m._apply(lambda t: (m.register_buffer('x', t), t)[1])",
    ],
)
def test_changing_the_tree_while_walking(call: str) -> None:
    """A change under a running walk is noticed, or not, exactly as in torch."""

    def scenario(impl):
        module = tree(impl)
        try:
            run(call.replace("n + 'x'", "n.replace('.', '_') + 'x'"), module)
        finally:
            ended = [name for name, _ in module.named_modules()]
        return ended

    assert same(scenario)


@pytest.mark.parametrize("call", ["m.modules()", "m.named_modules()", "m.parameters()"])
def test_walks_of_a_cycle_end(impl: Implementation, call: str) -> None:
    """A module that contains itself is yielded once."""
    module = tree(impl)
    count = len(list(run(call, module)))
    module.left.inner.back = module
    module.itself = module

    assert len(list(run(call, module))) == count


def test_a_shared_child_is_visited_once_per_parent(impl: Implementation) -> None:
    """``train``, ``apply`` and ``_apply`` visit a module once per parent that holds it."""
    log = []

    class Shared(impl.Module):
        def train(self, mode=True):
            log.append("train")
            return super().train(mode)

        def _apply(self, fn, recurse=True):
            log.append("_apply")
            return super()._apply(fn, recurse)

    shared = Shared()
    root = empty(impl)
    for name in ("a", "b"):
        parent = empty(impl)
        parent.x = parent.y = shared
        setattr(root, name, parent)
    root.train()
    root.float()
    root.apply(lambda module: log.append("apply") if module is shared else None)

    assert log == ["train", "train", "_apply", "_apply", "apply", "apply"]


def test_apply_sees_children_that_the_function_adds(impl: Implementation) -> None:
    """A child that is added to a module whose children are done is not visited."""
    module = tree(impl)
    log = []

    def grow(each):
        log.append(names(each, module))
        if "grown" not in each._modules:
            each.grown = empty(impl)

    module.apply(grow)

    assert log == ["left.inner", "left", "right", ""]


def test_named_members_with_a_function_of_ones_own():
    """``_named_members`` walks any pairs that the function returns, dropping ``None`` and doubles."""

    def scenario(impl):
        module = tree(impl)

        def members(each):
            return [("flag", getattr(each, "flag", None)), ("kind", type(each).__name__)]

        flags = [(), (True,), (False,)]
        once = [[*module._named_members(members, "p", *flag)] for flag in flags]
        every = [*module._named_members(members, prefix="p", recurse=True, remove_duplicate=False)]
        return once, every

    assert same(scenario)[0] == "returned"


def test_a_given_memo_goes_by_its_own_equality():
    """A module counts as seen if the caller's set takes one that it holds for equal to it."""

    def scenario(impl):
        class Alike(impl.Module):
            def __eq__(self, other):
                return isinstance(other, Alike)

            def __hash__(self):
                return 1

        module = empty(impl)
        module.a, module.b = Alike(), Alike()
        memo = {Alike()}
        return [name for name, _ in module.named_modules(memo)], len(memo)

    assert same(scenario)[0] == "returned"


def override(impl: Implementation, prefixes: list[str]) -> Any:
    """Return a class whose `named_modules` notes the prefixes that it gets."""

    class Own(impl.Module):
        def named_modules(self, memo=None, prefix="", remove_duplicate=True):
            prefixes.append(prefix)
            return super().named_modules(memo, prefix, remove_duplicate)

    return Own


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_modules_tells_an_override_below_where_it_is(impl, depth):
    """`modules()` calls a child's own `named_modules` with its path as the prefix."""
    prefixes: list[str] = []
    own = override(impl, prefixes)
    model = own()
    for _ in range(depth):
        model = impl.own.Sequential(impl.own.Identity(), model, impl.own.Identity())
    count = len(list(model.modules()))

    assert prefixes == [".".join("1" * depth)]
    assert count == 1 + 3 * depth


def test_modules_names_an_override_below_a_parent_that_grows(impl: Implementation) -> None:
    """A child that is added in the middle of a walk does not change the paths of the others."""
    prefixes: list[str] = []
    own = override(impl, prefixes)
    root = impl.Module()
    root.first = impl.nn.Sequential(impl.nn.Identity(), own())
    with pytest.raises(RuntimeError, match="dictionary changed size"):
        for module in root.modules():
            if isinstance(module, impl.nn.Identity):
                root.second = impl.nn.Tanh()

    assert prefixes == ["first.1"]


def test_modules_names_an_override_below_a_parent_that_is_replaced(impl: Implementation) -> None:
    """A walk stays below a child that is replaced in the middle of it, and keeps the child's name."""
    prefixes: list[str] = []
    own = override(impl, prefixes)
    root = impl.Module()
    root.first = impl.nn.Sequential(impl.nn.Identity(), own())
    root.second = impl.nn.Tanh()
    found = []
    for module in root.modules():
        found.append(type(module).__name__)
        if isinstance(module, impl.nn.Identity):
            root.first = impl.nn.ReLU()

    assert found == ["Module", "Sequential", "Identity", "Own", "Tanh"]
    assert prefixes == ["first.1"]


@pytest.mark.parametrize("names", [[""], ["", ""], ["", "a", "", "b"]])
def test_modules_names_an_override_below_children_without_names(impl, names) -> None:
    """The prefix starts with the first name that is not empty, as in `named_modules`."""
    prefixes: list[str] = []
    own = override(impl, prefixes)
    module = root = impl.Module()
    for name in names:
        setattr(module, name, impl.Module())
        module = getattr(module, name)
    module.own = own()
    list(root.modules())
    list(root.named_modules())

    assert prefixes[0] == prefixes[1] == ".".join([*names, "own"]).lstrip(".")


def test_modules_names_an_override_that_has_two_names(impl: Implementation) -> None:
    """Each name is told, also of a Sequential whose layers were deleted: its table is another one."""
    prefixes: list[str] = []
    shared = override(impl, prefixes)()
    model = impl.nn.Sequential(impl.nn.Tanh(), shared, impl.nn.Tanh(), shared)
    del model[0]
    root = impl.Module()
    root.layers = model
    list(root.modules())

    assert prefixes == ["layers.0", "layers.2"]


def test_a_table_is_read_by_its_items(impl) -> None:
    """The tables of a module may be replaced by others, which decide what they hold and in which order."""

    class Table(dict[str, Any]):
        def items(self):
            shown = [pair for pair in super().items() if pair[0] != "hidden"]
            return dict(reversed(shown)).items()

    model = impl.Module()
    for name in ("first", "hidden", "last"):
        setattr(model, name, impl.nn.Linear(1, 1, bias=False))
        model.register_parameter(f"{name}_own", torch.nn.Parameter(torch.ones(1)))
    model.hidden_own = None
    model._modules = Table(model._modules)
    model._parameters = Table(model._parameters)
    found = [model.last_own, model.first_own, model.last.weight, model.first.weight]

    assert [*model.modules()] == [model, model.last, model.first]
    assert all(a is b for a, b in zip(model.parameters(), found, strict=True))
    assert [name for name, _ in model.named_modules()] == ["", "last", "first"]
