import copy
import importlib.util
import inspect

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, same
from tests.parity.jit.networks import build, inputs, jit_tests, make_net, reloaded


pytestmark = jit_tests


@pytest.mark.skipif("warn" not in torch.jit.script.__code__.co_names, reason="torch does not warn")
def test_each_call_warns_that_torchscript_is_deprecated(impl):
    """The second call, too."""
    for _ in range(2):
        with pytest.warns((DeprecationWarning, FutureWarning), match="`torch.jit.script` is"):
            impl.jit.script(impl.nn.Linear(1, 1))


def test_methods_of_every_annotation_run(impl):
    """Exported methods are compiled, ignored ones run in Python on the compiled module."""

    class Net(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            return self.helper(x)

        def helper(self, x):
            return x + 1

        @impl.jit.export
        def exported(self, x):
            return x * 2

        @impl.jit.ignore
        def ignored(self, x: torch.Tensor) -> torch.Tensor:
            return self.exported(x) + len(type(self).__name__)

        @impl.jit.unused
        def unused(self, x):
            return [x, "text"]

    module = impl.jit.script(Net())
    x = torch.ones(1)

    assert module(x) == 2
    assert module.exported(x) == 2
    assert type(module.exported).__name__ == "ScriptMethod"
    assert module.ignored(x) == 2 + len(type(module).__name__)
    assert module.ignored.__self__ is module
    assert module.unused(x) == [x, "text"]
    assert module.helper(x) == 2
    if impl is MODKIT:  # copies of torch lack it
        copied = copy.copy(module)
        assert copied.ignored.__self__ is copied


@for_each("outer, inner", [(TORCH, MODKIT), (MODKIT, TORCH)], ids=str)
@for_each("kind", ["eager", "scripted", "traced", "loaded", "class-based"])
@for_each("compiler", [TORCH, MODKIT], ids=str)
def test_networks_of_both_mix_in_one_tree(outer, inner, kind, compiler):
    """A network of either compiles with children of either, compiled before or not."""

    class Net(outer.nn.Module):
        def __init__(self, child):
            super().__init__()
            self.child = child
            self.last = inner.nn.Linear(2, 2)

        def forward(self, x):
            return self.last(self.child(x))

    child = make_net(inner) if kind == "eager" else build(inner, kind)
    net = Net(child.eval())
    module = compiler.jit.script(net)

    assert torch.equal(module(inputs()), net.last(child(inputs())))
    assert module.child.gain is child.gain
    if compiler is MODKIT:
        assert isinstance(module.child, MODKIT.jit.ScriptModule) or kind == "class-based"
        assert torch.equal(reloaded(MODKIT, module)(inputs()), module(inputs()))


@for_each("compiler", [TORCH, MODKIT], ids=str)
@for_each("kind", ["scripted", "class-based"])
def test_children_that_torch_has_wrapped_are_copied(compiler, kind):
    """A deep copy has what a child of torch computes, with weights of its own, tied as there."""

    class Scale(torch.jit.ScriptModule):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(3, 3)
            self.gain = torch.nn.Parameter(torch.ones(3))

        @torch.jit.script_method
        def forward(self, x):
            return self.lin(x) * self.gain

    child = Scale() if kind == "class-based" else torch.jit.script(torch.nn.Linear(3, 3))
    outer = compiler.jit.script(compiler.nn.Sequential(child, compiler.nn.ReLU(), child))
    # The compiler has wrapped a scripted child once more; one that comes later stays torch's.
    setattr(outer, "0", child)
    setattr(outer, "2", child)
    expected = outer(inputs())
    copied = copy.deepcopy([outer])[0]
    shared = next(copied.parameters())
    with torch.no_grad():
        shared.zero_()

    assert torch.equal(outer(inputs()), expected)
    assert not torch.equal(copied(inputs()), expected)
    assert copied.state_dict().keys() == outer.state_dict().keys()
    if compiler is MODKIT:
        assert len([*copied.parameters()]) == len([*child.parameters()])
        assert all(type(p) is torch.nn.Parameter and p.is_leaf for p in copied.parameters())
        assert torch.equal(copy.deepcopy(copied)(inputs()), copied(inputs()))


OPTIONS = {
    "example_inputs": ([(inputs(),)], "monkeytype is not installed"),
    "optimize": (True, "`optimize` is deprecated"),
}


@pytest.mark.skipif(
    importlib.util.find_spec("monkeytype") is not None, reason="MonkeyType would run the inputs"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_without_effect_warns(impl, name):
    """Torch's warnings name what is missing, or that the option is not used."""
    value, text = OPTIONS[name]
    with pytest.warns((UserWarning, FutureWarning), match=text):
        impl.jit.script(make_net(impl), **{name: value})


def test_what_is_compiled_is_returned_as_it_is():
    """Compiling twice is compiling once, in both libraries; ``from_torch`` makes a wrapper."""
    module = build(MODKIT, "scripted")
    plain = build(TORCH, "scripted")
    ours = MODKIT.jit.ScriptModule.from_torch(plain)

    assert MODKIT.jit.script(module) is module
    assert TORCH.jit.script(module) is module
    assert MODKIT.jit.script(plain) is plain
    assert ours._c is plain._c
    assert ours is not plain
    assert MODKIT.jit.ScriptModule.from_torch(ours) is ours
    with pytest.warns(UserWarning, match="already a ScriptModule"):
        assert MODKIT.jit.trace(module, inputs()) is module
    with pytest.raises(TypeError, match=r"takes a torch.jit.ScriptModule, not a .*Linear"):
        MODKIT.jit.ScriptModule.from_torch(torch.nn.Linear(1, 1))


def test_a_class_has_the_signature_of_its_constructor(impl):
    """``inspect``, and tools that make objects of a class, see what its constructor takes."""

    class Base(impl.jit.ScriptModule):
        def __init__(self, width: int, *, bias: bool = True) -> None:
            super().__init__()

    class Derived(Base):
        def __init__(self):
            super().__init__(1)

    class Same(Base):
        pass

    texts = [str(inspect.signature(cls)) for cls in (Base, Derived, Same)]

    assert texts == ["(width: int, *, bias: bool = True) -> None", "()", texts[0]]


def test_names_around_a_class_are_found_when_it_is_compiled(impl):
    """Script methods and definitions see local names of the function around them."""
    offset = 3

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + offset_function()

    def offset_function() -> int:
        return 3

    class Net(impl.jit.ScriptModule):
        @impl.jit.script_method
        def forward(self, x):
            return shifted(x)

    module = Net()
    module.define("def twice(self, x: Tensor) -> Tensor:\n    return shifted(shifted(x))\n")

    assert module(torch.zeros(1)) == offset
    assert module.twice(torch.zeros(1)) == 2 * offset


def test_a_derived_class_has_the_methods_and_constants_of_its_base(impl):
    """Script methods and constants are inherited, and overridden, as in torch."""

    class Base(impl.jit.ScriptModule):
        __constants__ = ["step"]

        def __init__(self, step: int):
            super().__init__()
            self.step = step
            self.names = impl.jit.Attribute({}, dict[str, int])

        @impl.jit.script_method
        def forward(self, x):
            return self.change(x) + self.step

        @impl.jit.script_method
        def change(self, x):
            return x

    class Derived(Base):
        @impl.jit.script_method
        def change(self, x):
            return x * 10

        def in_python(self, x):
            return self(x), self.change(x)

    module = Derived(2)
    module.names = {"a": 1}

    assert module(torch.ones(1)) == 12
    assert module.in_python(torch.ones(1)) == (12, 10)
    assert Base(1)(torch.ones(1)) == 2
    assert module.names == {"a": 1}


def test_instances_of_a_class_are_compiled_once(impl):
    """They have one compiled type."""

    class Net(impl.jit.ScriptModule):
        @impl.jit.script_method
        def forward(self, x):
            return x

    assert Net()._c._type() == Net()._c._type()


@pytest.fixture
def scorer(impl):
    """Return the implementation with an interface and a network that has a child of that type."""

    @impl.jit.interface
    class Scores(impl.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pass

    class Doubles(impl.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Squares(impl.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x

    class Net(impl.nn.Module):
        child: Scores

        def __init__(self):
            super().__init__()
            self.child = Doubles()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child.forward(x)

    return impl, Net(), Squares()


def test_a_child_of_an_interface_can_be_swapped(scorer):
    """Any module that implements the interface can take the child's place."""
    impl, net, squares = scorer
    module = impl.jit.script(net)
    before = module(torch.tensor([3.0]))
    module.child = impl.jit.script(squares)
    with pytest.raises(RuntimeError, match="non-scripted"):
        module.child = squares

    assert (before, module(torch.tensor([3.0]))) == (6, 9)


def test_typed_hooks_are_compiled(impl):
    """Hooks with types run in compiled code, from Python, and after loading."""

    def before(self, input: tuple[torch.Tensor]) -> tuple[torch.Tensor]:  # noqa: A002
        return (input[0] * 2,)

    def after(self, input: tuple[torch.Tensor], result: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return result + 1

    class Inner(impl.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Outer(impl.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    net = Outer()
    for part in (net, net.inner):
        part.register_forward_pre_hook(before)
        part.register_forward_hook(after)
    module = impl.jit.script(net)
    loaded = reloaded(impl, module)
    expected = net(torch.ones(1))

    assert module(torch.ones(1)) == expected == 6
    assert loaded(torch.ones(1)) == expected
    assert module.inner(torch.ones(1)) == 3
    assert copy.deepcopy(module)(torch.ones(1)) == expected


@pytest.mark.parametrize("obj", [5, type("Sub", (dict,), {})], ids=["number", "derived"])
def test_an_interface_is_refused_as_in_torch(obj):
    """An object that cannot be an interface raises torch's error."""
    assert same(lambda impl: impl.jit.interface(obj))[0] == "raised"
