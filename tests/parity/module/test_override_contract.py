"""One contract for overrides: whatever torch calls is called, wherever it has been set."""

import copy
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import for_each
from tests.helpers import MODKIT, TORCH, Implementation, same


METHODS = [
    name
    for name, value in vars(torch.nn.Module).items()
    if isinstance(inspect.unwrap(value) if callable(value) else value, types.FunctionType)
    and name
    != "__annotate_func__"  # of Python 3.14, which evaluates annotations when they are read
]


class Extra:
    """Extra state, of two kinds of modules below: one has it, the other has not."""

    def get_extra_state(self):
        """Return it."""
        return {"extra": 1}

    def set_extra_state(self, state):
        """Keep it."""
        self.__dict__["extra"] = state


def network(impl: Implementation) -> Any:
    """Make a tree of users' modules and layers, with members of every kind."""

    class Leaf(impl.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("transient", torch.zeros(2), persistent=False)
            self.plain = 1

        def forward(self, x):
            return x * self.weight + self.mean

    class WithExtra(Extra, Leaf):
        pass

    class Net(impl.Module):
        def __init__(self):
            super().__init__()
            self.leaf = Leaf()
            self.extra = WithExtra()
            self.body = impl.nn.Sequential(impl.nn.Linear(2, 2), Leaf(), impl.nn.BatchNorm1d(2))
            self.shared = self.leaf
            self.add_module("nothing", None)

        def forward(self, x):
            return self.body(self.extra(self.leaf(x)))

    return Net()


def walk(m: Any) -> None:
    """Iterate in every way."""
    list(m.named_modules()), list(m.modules()), list(m.named_children()), list(m.children())
    list(m.named_modules(remove_duplicate=False)), list(m.named_parameters(recurse=False))
    list(m.named_parameters()), list(m.parameters()), list(m.named_buffers()), list(m.buffers())
    m.get_submodule("body.0"), m.get_parameter("body.0.weight"), m.get_buffer("leaf.mean")
    m.apply(lambda _: None)
    repr(m), dir(m), m._get_name(), m.extra_repr()


def convert(m: Any) -> None:
    """Convert in every way that a machine without accelerators allows."""
    m.train(), m.eval(), m.train(False), m.requires_grad_(True), m.zero_grad()
    m.float(), m.double(), m.half(), m.bfloat16(), m.type(torch.float64), m.cpu()
    m.to(torch.float32), m.to("cpu"), m.to(memory_format=torch.channels_last)
    m.share_memory()
    for move in (m.cuda, m.xpu, m.ipu, m.mtia):
        with pytest.raises((RuntimeError, AssertionError, AttributeError, NotImplementedError)):
            move()
    m.to_empty(device="cpu")


def register(m: Any) -> None:
    """Register, set and delete members of every kind."""
    m.register_parameter("p", torch.nn.Parameter(torch.ones(1)))
    m.register_buffer("b", torch.ones(1))
    m.add_module("c", type(m.leaf)()), m.register_module("d", type(m.leaf)())
    m.set_submodule("body.0", type(m.leaf)()), m.set_submodule("new", type(m.leaf)())
    m.p = torch.nn.Parameter(torch.zeros(1))
    m.p = m.b = m.c = None
    m.q = torch.nn.Parameter(torch.zeros(1))
    m.b = torch.zeros(2)
    m.flag = 1
    m.leaf = type(m.leaf)()
    del m.p, m.b, m.c, m.flag
    hasattr(m, "missing")


def call(m: Any) -> None:
    """Call with hooks of every kind."""
    x = torch.ones(3, 2, requires_grad=True)
    m(x)
    m.leaf.register_forward_pre_hook(lambda *_: None)
    m.leaf.register_forward_hook(lambda *_: None, always_call=True)
    m.extra.register_full_backward_pre_hook(lambda *_: None)
    m.extra.register_full_backward_hook(lambda *_: None)
    m.body[1].register_backward_hook(lambda *_: None)
    m(x).sum().backward()
    m.compile(backend="eager")


def save_and_load(m: Any) -> None:
    """Save and load in every way, with hooks of every kind."""
    m.leaf.register_state_dict_pre_hook(lambda *_: None)
    m.leaf.register_state_dict_post_hook(lambda *_: None)
    m.body._register_state_dict_hook(lambda *_: None)
    state = m.state_dict()
    m.load_state_dict(state), m.load_state_dict(state, assign=True)
    m.leaf.register_load_state_dict_pre_hook(lambda *_: None)
    m.leaf._register_load_state_dict_pre_hook(lambda *_: None)
    m.leaf.register_load_state_dict_post_hook(lambda *_: None)
    m.load_state_dict({}, strict=False), m.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError):
        m.load_state_dict({"stray": torch.ones(1)})


def copying(m: Any) -> None:
    """Copy, and replicate as DataParallel does."""
    copy.copy(m), copy.deepcopy(m)
    m.leaf.__setstate__(m.leaf.__getstate__())
    m._replicate_for_data_parallel()


OPERATIONS = (walk, convert, register, call, save_and_load, copying)


def shown(value: Any) -> Any:
    """Turn an argument into something that compares across the two libraries."""
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if isinstance(value, set):
        return ("set", sorted(map(str, map(shown, value))))
    if isinstance(value, Mapping):
        return [(str(key), shown(item)) for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return [shown(item) for item in value]
    if isinstance(value, type):
        # Two classes, of torch and of modkit, have one name.
        return value.__name__
    if callable(value):
        return "callable"
    return value if isinstance(value, (int, str, bool, float, type(None))) else type(value).__name__


def calls_seen(
    impl: Implementation, name: str, operation: Callable[[Any], None]
) -> list[tuple[Any, ...]]:
    """Replace one function of ``torch.nn.Module`` by a wrapper; return the calls that it sees."""
    original = getattr(torch.nn.Module, name)
    static = inspect.getattr_static(torch.nn.Module, name)
    signature = inspect.signature(original)
    log: list[tuple[Any, ...]] = []

    def wrapper(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *others = bound.arguments.values()
        log.append((type(self).__name__, shown(others)))
        return original(self, *args, **kwargs)

    try:
        setattr(torch.nn.Module, name, wrapper)
        module = network(impl)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            operation(module)
    finally:
        setattr(torch.nn.Module, name, static)
    return log


@for_each("name", METHODS)
def test_a_replaced_function_sees_the_calls_that_it_sees_in_torch(name: str) -> None:
    """Whatever function of ``torch.nn.Module`` is wrapped, the wrapper gets the same calls."""
    expected = {each.__name__: calls_seen(TORCH, name, each) for each in OPERATIONS}
    actual = {each.__name__: calls_seen(MODKIT, name, each) for each in OPERATIONS}

    assert actual == expected
    # Some are not called here: torch's ``__call__`` is ``_wrapped_call_impl`` under another name.
    if name not in {
        "forward",
        "get_extra_state",
        "set_extra_state",
        "_slow_forward",
        "_wrapped_call_impl",
    }:
        assert any(expected.values())


@for_each("where", ["class", "instance"])
@for_each("name", ["apply", "_apply", "children", "named_children"])
def test_a_module_below_that_overrides_a_method_is_called(name: str, where: str) -> None:
    """Methods that visit children call those that override them or their own children."""

    def scenario(impl):
        log = []
        net = network(impl)
        net.outer = impl.nn.Sequential(impl.nn.Sequential(network(impl).leaf))
        overriding = net.outer[0]
        original = getattr(overriding, name)

        def override(*args):
            log.append((name, shown(args)))
            return original(*args)

        if where == "instance":
            setattr(overriding, name, override)
        else:
            derived = {name: lambda _, *args: override(*args)}
            overriding.__class__ = type("Derived", (type(overriding),), derived)
        net.apply(lambda each: log.append(type(each).__name__))
        net.double()
        return log, net.outer[0][0].weight.dtype

    assert f"'{name}'" in str(same(scenario))


class Descriptor:
    """Binds itself, as the wrappers of some libraries do; it is not a function."""

    def __init__(self, function):
        self.function = function

    def __get__(self, instance, owner=None):
        """Bind the function."""
        return functools.partial(self.function, instance, owner is not None)


# Objects that a test or a library may put in place of a function.
REPLACEMENTS: dict[str, Any] = {
    "classmethod": classmethod,
    "descriptor": Descriptor,
    "mock": lambda function: mock.Mock(side_effect=function),
    "partialmethod": lambda function: functools.partialmethod(function, 1),
    "property": lambda function: property(lambda self: functools.partial(function, self)),
    "staticmethod": staticmethod,
}


def replacement_seen(impl: Implementation, name: str, kind: str) -> Any:
    """Put something else than a function into ``torch.nn.Module``; return how it is called."""
    log: list[tuple[Any, ...]] = []

    def record(*args, **kwargs):
        log.append((*map(shown, args), sorted(kwargs)))
        return []

    leaf = network(impl).leaf
    arguments = [*inspect.signature(getattr(torch.nn.Module, name)).parameters][1:]
    static = inspect.getattr_static(torch.nn.Module, name)
    try:
        setattr(torch.nn.Module, name, REPLACEMENTS[kind](record))
        returned = getattr(leaf, name)(*arguments)
    finally:
        setattr(torch.nn.Module, name, static)
    return log, returned


@for_each("kind", REPLACEMENTS)
@for_each("name", [name for name in METHODS if name != "forward" and name[:2] != "__"])
def test_a_replacement_that_is_no_function_is_bound_as_in_torch(name: str, kind: str) -> None:
    """A mock of ``torch.nn.Module.to`` gets the arguments alone, without the module."""
    expected = replacement_seen(TORCH, name, kind)
    actual = replacement_seen(MODKIT, name, kind)

    assert actual == expected
    assert expected[0]


def plain(impl: Implementation) -> Any:
    """Define a class whose forward returns what it gets."""

    class Plain(impl.Module):
        def forward(self, x):
            return x

    return Plain


def test_a_method_set_on_module_holds_for_layers(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that is set on the library's ``Module`` is that of its layers."""
    monkeypatch.setattr(impl.nn.Module, "extra_repr", lambda self: "patched")

    assert repr(impl.nn.Tanh()) == "Tanh(patched)"


# --- the order of bases ---------------------------------------------------------------------------


class Mixin(torch.nn.Module):
    """A module of a library that knows nothing of modkit."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.lora = torch.nn.Parameter(torch.ones(1))

    def train(self, mode=True):
        """Note the mode."""
        self.__dict__["seen"] = mode
        return super().train(mode)


def test_a_mixin_keeps_its_init_and_its_overrides(impl: Implementation) -> None:
    """A module of torch behind a user's class comes before ``Module`` in the order of bases."""

    class Base(impl.Module):
        def __init__(self):
            super().__init__()
            self.own = torch.nn.Parameter(torch.ones(1))

    class Net(Base, Mixin):
        pass

    net = Net().eval()

    assert sorted(net._parameters) == ["lora", "own"]
    assert net.seen is False
    assert Net.__mro__[:3] == (Net, Base, Mixin)
    assert [cls.__name__ for cls in Net.__mro__[3:]] == [
        *(["Module"] if impl is MODKIT else []),
        "Module",
        "object",
    ]


def test_a_saved_method_does_not_call_a_later_patch(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that was saved before `torch.nn.Module` was patched is the one that was saved."""
    calls = []
    saved = impl.Module.apply
    original = torch.nn.Module.apply
    monkeypatch.setattr(
        torch.nn.Module, "apply", lambda self, fn: calls.append(fn) or original(self, fn)
    )
    saved(impl.Module(), id)

    assert calls == []


def test_module_before_a_mixin_is_refused(impl: Implementation) -> None:
    """``class Net(Module, Mixin)`` has no order of bases, with Python's own error."""
    with pytest.raises(TypeError, match=r"(?s)method resolution.*for bases Module, Mixin"):

        class Net(impl.nn.Module, Mixin):
            pass


# --- classes of modules ---------------------------------------------------------------------------


def test_instances_and_subclasses_of_a_users_class(impl: Implementation) -> None:
    """Only ``Module`` itself counts other libraries' modules as its own."""
    kind = plain(impl)

    assert isinstance(kind(), kind)
    assert isinstance(kind(), impl.nn.Module)
    assert not isinstance(torch.nn.Linear(1, 1), kind)
    assert not issubclass(torch.nn.Linear, kind)
    assert isinstance(torch.nn.Linear(1, 1), impl.nn.Module)
    assert issubclass(torch.nn.Linear, impl.nn.Module)
    assert not isinstance(1, impl.nn.Module)
    assert not issubclass(int, impl.nn.Module)
    with pytest.raises(TypeError, match="must be a class"):
        issubclass(1, impl.nn.Module)
