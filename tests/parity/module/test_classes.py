import abc
import dataclasses
import enum
import inspect
import sys
import typing
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, leaf


def test_init_does_not_call_the_next_class_by_default(impl: Implementation) -> None:
    """Without ``call_super_init`` a mixin behind Module is not initialized."""

    class Mixin:
        def __init__(self):
            self.mixed = True

    class Net(impl.Module, Mixin):
        def __init__(self):
            super().__init__()

    assert not hasattr(Net(), "mixed")


def test_init_passes_arguments_on_with_call_super_init(impl: Implementation) -> None:
    """With ``call_super_init`` the next class of the MRO gets all arguments."""

    class Mixin:
        def __init__(self, first, *, second):
            self.mixed = (first, second)

    class Net(impl.Module, Mixin):
        call_super_init = True

        def __init__(self):
            super().__init__(1, second=2)

    module = Net()

    assert module.mixed == (1, 2)
    assert list(module.parameters()) == []


def test_a_mixin_before_module_cooperates(impl: Implementation) -> None:
    """A mixin in front may add attributes before and after Module is initialized."""

    class Mixin:
        def __init__(self, width):
            self.early = width
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width))

    class Net(Mixin, impl.Module):
        pass

    module = Net(3)

    assert module.early == 3
    assert [name for name, _ in module.named_parameters()] == ["weight"]


def test_the_chain_of_three_cooperates(impl: Implementation) -> None:
    """Mixins in front and behind are all initialized, in the order of the MRO."""
    log = []

    class Front:
        def __init__(self, **keywords):
            log.append("front")
            super().__init__(**keywords)

    class Back:
        def __init__(self, tag=None):
            log.append(("back", tag, hasattr(self, "_modules")))
            super().__init__()

    class Net(Front, impl.Module, Back):
        call_super_init = True

    Net(tag="t")

    assert log == ["front", ("back", "t", True)]


@for_each("arguments", [((), {}), ((1,), {}), ((), {"a": 1}), ((1,), {"a": 1})])
@for_each("flag", [False, True])
def test_constructor_errors(arguments, flag):
    """Arguments without a receiver raise the same error as in torch, flag or not."""
    args, keywords = arguments

    def scenario(impl):
        class Net(impl.Module):
            call_super_init = flag

        return list(vars(Net(*args, **keywords)))

    assert same(scenario)


def test_an_instance_may_set_call_super_init_in_front(impl: Implementation) -> None:
    """The flag is read from the instance, so a mixin in front can switch it."""

    class Front:
        def __init__(self, value):
            vars(self)["call_super_init"] = True
            super().__init__(value)

    class Back:
        def __init__(self, value):
            self.value = value

    class Net(Front, impl.Module, Back):
        pass

    assert Net(4).value == 4


def test_init_of_torchs_class_leaves_a_working_module(impl: Implementation) -> None:
    """Calling ``torch.nn.Module.__init__`` by its name initializes a module of either kind."""

    class Net(impl.Module):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, value):
            return value * self.weight

    module = Net()

    assert list(vars(module)) == list(vars(child_leaf(impl)))
    assert torch.equal(module(torch.ones(2)), torch.ones(2))
    assert list(module.state_dict()) == ["weight"]


def test_a_second_init_empties_the_module(impl: Implementation) -> None:
    """``__init__`` on an initialized module starts from empty registries; plain values stay."""
    module = leaf(impl)
    module.eval()
    impl.Module.__init__(module)

    assert list(module.named_parameters()) == []
    assert list(module.state_dict()) == []
    assert module.training is True
    assert module.flag == 3


def test_forward_is_looked_up_at_the_call(impl: Implementation) -> None:
    """A ``forward`` on the instance, or a new one on the class, is used at once."""

    class Net(impl.Module):
        def forward(self, value):
            return ("class", value)

    module = Net()
    results = [module(1)]
    module.forward = lambda value: ("instance", value)
    results.append(module(2))
    del module.forward
    Net.forward = lambda self, value: ("new", value)
    results.append(module(3))

    assert results == [("class", 1), ("instance", 2), ("new", 3)]


@for_each("name", ["module", "args", "kwargs", "input", "result", "state", "hook"])
def test_a_keyword_of_any_name_reaches_forward(impl: Implementation, name: str) -> None:
    """No keyword is taken by the call itself, with and without hooks."""

    class Net(impl.Module):
        def forward(self, *args, **keywords):
            return args, keywords

    module = Net()
    plain = module(1, **{name: 2})
    module.register_forward_hook(lambda *_: None)

    assert plain == module(1, **{name: 2}) == ((1,), {name: 2})


def test_the_keyword_self_is_taken():
    """``self`` is the one keyword that a call cannot pass on, with torch's error."""

    def scenario(impl):
        class Net(impl.Module):
            def forward(this, *args, **keywords):
                return args, keywords

        return Net()(1, self=2)

    assert same(scenario)[0] == "raised"


@for_each("method", ["_call_impl", "_wrapped_call_impl", "__call__", "_slow_forward"])
def test_the_ways_to_call(impl: Implementation, method: str) -> None:
    """Each of the methods behind a call runs ``forward`` with the arguments."""

    class Net(impl.Module):
        def forward(self, value, *, add):
            return value + add

    assert getattr(Net(), method)(1, add=2) == 3
    assert getattr(Net, method)(Net(), 1, add=2) == 3


@pytest.mark.parametrize("method", ["_call_impl", "__call__"])
def test_overrides_of_the_call(impl: Implementation, method: str) -> None:
    """A subclass may wrap the call by overriding one of its methods."""

    def wrapped(self, *args, **keywords):
        return ("wrapped", getattr(impl.Module, method)(self, *args, **keywords))

    net = type("Net", (impl.Module,), {"forward": lambda self, x: x, method: wrapped})

    assert net()(3) == ("wrapped", 3)


def test_a_compiled_call_replaces_the_call(impl: Implementation) -> None:
    """``_compiled_call_impl`` on the instance is called instead of the hooks and ``forward``."""
    module = leaf(impl)
    module._compiled_call_impl = lambda *args, **keywords: (args, keywords)

    assert module(1, a=2) == ((1,), {"a": 2})
    module._compiled_call_impl = None
    assert isinstance(module(torch.ones(3)), torch.Tensor)


def test_the_class_of_an_instance_can_be_swapped(impl: Implementation) -> None:
    """Assigning ``__class__`` works in both directions between module classes."""

    class Net(impl.Module):
        def forward(self, value):
            return value

    class Loud(Net):
        def forward(self, value):
            return super().forward(value) + 1

    module = Net()
    module.__class__ = Loud
    loud = module(1)
    module.__class__ = type("Made", (Loud,), {"extra": 3})

    assert loud == 2
    assert module.extra == 3
    assert isinstance(module, impl.Module)


def test_a_dataclass_module(impl: Implementation) -> None:
    """A dataclass with identity comparison may initialize Module in ``__post_init__``."""

    @dataclasses.dataclass(eq=False)
    class Net(impl.Module):
        width: int
        bias: bool = True

        def __post_init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(self.width))

    module = Net(2, bias=False)

    assert (module.width, module.bias) == (2, False)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert dataclasses.asdict(dataclasses.replace(module, width=3))["width"] == 3


def test_a_dataclass_that_holds_children(impl: Implementation) -> None:
    """A dataclass field that is a module is registered if ``__new__`` prepared the instance."""

    @dataclasses.dataclass(eq=False, repr=False)
    class Net(impl.Module):
        child: Any

        def __new__(cls, *args, **keywords):
            instance = super().__new__(cls)
            impl.Module.__init__(instance)
            return instance

    module = Net(child_leaf(impl))

    assert [name for name, _ in module.named_parameters()] == ["child.weight"]


def test_an_abstract_module(impl: Implementation) -> None:
    """``abc.ABC`` mixes in: abstract methods keep a class from being instantiated."""

    class Base(impl.Module, abc.ABC):
        @abc.abstractmethod
        def forward(self, value): ...

    class Net(Base):
        def forward(self, value):
            return value

    with pytest.raises(TypeError, match="abstract"):
        Base()

    assert Net()(1) == 1


def test_a_generic_module(impl: Implementation) -> None:
    """``Generic`` mixes in, before or after Module."""
    item = TypeVar("item")

    class After(impl.Module, Generic[item]):
        pass

    class Before(Generic[item], impl.Module):
        pass

    module = After[int]()
    module.child = Before[str]()

    assert isinstance(module, After)
    assert [name for name, _ in module.named_modules()] == ["", "child"]


def test_a_module_with_a_protocol(impl: Implementation) -> None:
    """A module class may implement a protocol explicitly."""

    class Sized(Protocol):
        def width(self) -> int: ...

    class Net(impl.Module, Sized):
        def width(self) -> int:
            return 3

    assert Net().width() == 3


def test_a_module_with_a_metaclass(impl: Implementation) -> None:
    """A class with a metaclass of its own may derive from Module."""

    class Meta(type):
        def __call__(cls, *args, **keywords):
            instance = super().__call__(*args, **keywords)
            instance.finished = True
            return instance

    class Net(impl.Module, metaclass=Meta):
        pass

    assert Net().finished is True


def test_a_metaclass_derived_from_that_of_module(impl: Implementation) -> None:
    """The remedy: the metaclass derives from ``type(nn.Module)``, which in torch is ``type``."""

    class Meta(type(impl.nn.Module)):
        def __call__(cls, *args, **keywords):
            instance = super().__call__(*args, **keywords)
            instance.finished = True
            return instance

    class Net(impl.Module, metaclass=Meta):
        pass

    assert Net().finished is True


def test_the_metaclass_is_type(impl: Implementation) -> None:
    """Libraries ask for the exact metaclass to tell a class from an instance."""

    class Net(impl.Module):
        pass

    assert isinstance(Net, type)
    assert type(Net) is type


def test_layers_name_module_among_their_bases(impl: Implementation) -> None:
    """optimum-quanto asks for it where others call ``issubclass``."""
    assert issubclass(impl.nn.Linear, impl.Module)
    assert impl.Module in impl.nn.Linear.__mro__


def test_a_plain_class_cannot_register(impl: Implementation) -> None:
    """A class that is not abstract has no ``register``."""

    class Net(impl.Module):
        pass

    assert not hasattr(Net, "register")


def test_layers_are_found_below_the_base_class(impl: Implementation) -> None:
    """A walk over ``__subclasses__``, as tools that look a class up by its name do, meets each once."""

    class Net(impl.Module):
        pass

    class Derived(Net):
        pass

    def walk(cls: type) -> list[type]:
        return [cls, *(found for each in cls.__subclasses__() for found in walk(each))]

    direct, every = impl.Module.__subclasses__(), walk(impl.Module)

    assert [each for each in (impl.Linear, impl.Sequential, Net) if direct.count(each) != 1] == []
    assert Derived in every
    assert impl.LazyLinear in every
    assert impl.Module not in every[1:]
    assert Net.__subclasses__() == [Derived]


def test_abcmeta_as_the_metaclass(impl: Implementation) -> None:
    """A class whose metaclass is ABCMeta is abstract while a method is missing."""

    class Base(impl.Module, metaclass=abc.ABCMeta):
        @abc.abstractmethod
        def encode(self): ...

    with pytest.raises(TypeError, match="abstract"):
        Base()
    assert issubclass(Base, impl.Module)


def test_register_with_abcmeta_as_the_metaclass(impl: Implementation) -> None:
    """``register`` makes a class count as a virtual subclass, and its subclasses and instances too."""

    class Base(impl.Module, metaclass=abc.ABCMeta):
        pass

    class Middle(Base):
        pass

    class Sibling(Base):
        pass

    class Derived(Middle):
        pass

    @Middle.register
    class Virtual:
        pass

    class BelowVirtual(Virtual):
        pass

    Derived.register(torch.nn.Linear)
    layer, net = torch.nn.Linear(1, 1), Derived()

    assert Virtual.__name__ == "Virtual"
    for cls in (Virtual, BelowVirtual):
        assert [issubclass(cls, each) for each in (Base, Middle)] == [True, True]
        assert [isinstance(cls(), each) for each in (Base, Middle)] == [True, True]
        assert [issubclass(cls, each) for each in (Sibling, Derived)] == [False, False]
        assert not issubclass(cls, impl.Module)
    assert [isinstance(layer, each) for each in (Base, Middle, Derived)] == [True, True, True]
    assert not isinstance(layer, Sibling)
    assert [isinstance(net, each) for each in (Base, Middle, Derived)] == [True, True, True]
    assert not isinstance(net, Sibling)


def test_a_registration_changes_later_checks(impl: Implementation) -> None:
    """A class that was refused before is accepted, by abstract classes that remember it too."""

    class Base(impl.Module, abc.ABC):
        pass

    class Derived(Base, metaclass=abc.ABCMeta):
        pass

    class Other(impl.Module, metaclass=abc.ABCMeta):
        pass

    class Virtual:
        pass

    classes = (Base, Derived, Other)
    before = [isinstance(Virtual(), each) for each in classes]
    Derived.register(Virtual)
    between = [isinstance(Virtual(), each) for each in classes]
    Other.register(Virtual)

    assert before == [False, False, False]
    assert between == [True, True, False]
    assert [isinstance(Virtual(), each) for each in classes] == [True, True, True]


def test_a_registration_holds_for_one_class(impl: Implementation) -> None:
    """Classes without a common base of their own do not share a registry, made before or after."""

    class Registering(impl.Module, metaclass=abc.ABCMeta):
        pass

    class Before(impl.Module, metaclass=abc.ABCMeta):
        pass

    class BelowBefore(Registering):
        pass

    Registering.register(int)

    class After(impl.Module, metaclass=abc.ABCMeta):
        pass

    class BelowAfter(Registering):
        pass

    assert issubclass(int, Registering)
    for cls in (Before, BelowBefore, After, BelowAfter):
        assert not issubclass(int, cls)
        assert [*abc._get_dump(cls)[0]] == []


@for_each("refused", ["not a class", "a class above it", "by Module"])
def test_registrations_that_are_refused(refused):
    """``register`` takes classes that it does not derive from, and Module has no such method."""

    def scenario(impl):
        class Base(impl.Module, metaclass=abc.ABCMeta):
            pass

        class Derived(Base):
            pass

        if refused == "by Module":
            return impl.Module.register(int)
        return Derived.register(3 if refused == "not a class" else Base)

    assert same(scenario)[0] == "raised"


def test_super_of_module_sets_plain_attributes(impl: Implementation) -> None:
    """``super(nn.Module, self).__setattr__`` keeps a module out of the children."""

    class Net(impl.Module):
        def __init__(self, other):
            super().__init__()
            super(impl.nn.Module, self).__setattr__("other", other)

    net = Net(impl.nn.ReLU())

    assert "other" in vars(net)
    assert list(net.children()) == []


def test_subclass_hooks_and_class_keywords(impl: Implementation) -> None:
    """``__init_subclass__`` and class keywords work as for any class."""
    seen = {}

    class Base(impl.Module):
        def __init_subclass__(cls, tag=None, **keywords):
            super().__init_subclass__(**keywords)
            seen[cls.__name__] = tag

    class Net(Base, tag="t"):
        pass

    assert seen == {"Net": "t"}
    assert Net().training


# Those of Python 3.10's ABCMeta may not.
@pytest.mark.parametrize("abstract", [False, True][: 1 + (sys.version_info >= (3, 11))])
def test_a_class_keyword_may_have_any_name(impl: Implementation, abstract: bool) -> None:
    """A class with the keyword `name`, as registries of models have, gets it."""

    class Base(impl.Module):
        def __init_subclass__(cls, **keywords):
            super().__init_subclass__()
            cls.keywords = keywords

    class Middle(Base, *[abc.ABC] * abstract):
        pass

    class Net(Middle, name="net", bases=1, namespace=2):
        pass

    assert {"name": "net", "bases": 1, "namespace": 2} == Net.keywords


def test_slots_in_a_subclass(impl: Implementation) -> None:
    """A subclass may declare slots; they hold plain values beside the members."""

    class Net(impl.Module):
        __slots__ = ("fast",)

    module = Net()
    module.fast = 3
    module.weight = torch.nn.Parameter(torch.ones(1))

    assert module.fast == 3
    assert "fast" not in vars(module)
    assert list(module._parameters) == ["weight"]


def test_class_annotations_do_not_create_attributes(impl: Implementation) -> None:
    """Annotations without values declare members that ``__init__`` fills in."""

    class Net(impl.Module):
        weight: torch.Tensor
        child: torch.nn.Module
        mode: str = "fast"

        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(1))
            self.child = child_leaf(impl)

    module = Net()

    assert list(module.state_dict()) == ["weight", "child.weight"]
    assert Net.__annotations__.keys() == {"weight", "child", "mode"}
    assert module.mode == "fast"


def test_an_enum_or_class_as_plain_attribute(impl: Implementation) -> None:
    """Classes, enum members and callables are plain attributes."""

    class Kind(enum.Enum):
        A = 1

    module = leaf(impl)
    module.kind, module.factory, module.act = Kind.A, torch.nn.ReLU, torch.relu

    assert (module.kind, module.factory, module.act) == (Kind.A, torch.nn.ReLU, torch.relu)
    assert list(module.children()) == []


def test_a_custom_new_and_a_singleton(impl: Implementation) -> None:
    """``__new__`` may return an instance that exists already."""

    class Single(impl.Module):
        instance = None

        def __new__(cls):
            if cls.instance is None:
                cls.instance = super().__new__(cls)
            return cls.instance

    first = Single()
    first.weight = torch.nn.Parameter(torch.ones(1))

    assert Single() is first
    assert list(first.parameters()) == []


def test_an_unhashable_value_is_a_plain_attribute(impl: Implementation) -> None:
    """Objects whose comparison or truth raises can be assigned and read."""

    class Awkward:
        __hash__ = None

        def __eq__(self, other):
            raise ValueError("not comparable")

        def __bool__(self):
            raise ValueError("no truth")

    module = leaf(impl)
    module.awkward = value = Awkward()
    module.awkward = value

    assert module.awkward is value


# Attributes of the class that users and libraries read, beside its methods.
CLASS_ATTRIBUTES = ("T_destination", "_version", "call_super_init", "dump_patches")


def test_module_has_the_annotations_of_torch(impl: Implementation) -> None:
    """The class shows torch's annotations itself, and instances find them behind their own class."""
    expected = torch.nn.Module.__annotations__

    class Net(impl.Module):
        pass

    assert "training" in expected
    assert impl.Module.__annotations__ == expected
    assert inspect.get_annotations(impl.Module) == expected
    assert inspect.get_annotations(Net) == {}
    # TorchScript reads the types of attributes here. Since Python 3.14 there are none.
    of_instance = getattr(torch.nn.Module(), "__annotations__", None)
    assert getattr(Net(), "__annotations__", None) == of_instance


def test_the_hints_of_module_name_the_class_of_the_namespace(impl: Implementation) -> None:
    """``typing.get_type_hints`` resolves all of them; a child is a ``Module`` of the library asked."""
    expected = typing.get_type_hints(torch.nn.Module)
    expected["_modules"] = dict[str, impl.Module | None]

    class Net(impl.Module):
        width: "int"

    hints = typing.get_type_hints(Net)

    assert typing.get_type_hints(impl.Module) == expected
    assert hints == {**expected, "width": int}


def test_class_attributes_are_those_of_torch(impl: Implementation) -> None:
    """Reading them from the class or an instance gives torch's values; ``training`` is not one."""
    for name in CLASS_ATTRIBUTES:
        expected = getattr(torch.nn.Module, name)

        assert getattr(impl.Module, name) is expected
        assert getattr(impl.Module(), name) is expected
    assert not hasattr(impl.Module, "training")


def test_the_source_of_a_class_of_the_user(impl: Implementation) -> None:
    """Python finds the definition of a class that derives from ``Module``, and of its methods."""

    class Net(impl.Module):
        def forward(self, x):
            return x

    source = inspect.getsource(Net)

    assert source.lstrip().startswith("class Net(impl.Module):")
    assert inspect.getsource(Net.forward) in source
    assert inspect.getsourcefile(Net) == __file__


@pytest.mark.parametrize("name", ["Module", "AveragedModel", "jit.ScriptModule"])
def test_the_source_of_a_public_class(impl: Implementation, name: str) -> None:
    """Python finds the definition of the class itself."""
    *parents, name = name.split(".")
    home = getattr(impl, parents[0]) if parents else impl

    assert inspect.getsource(getattr(home, name)).lstrip().startswith(f"class {name}")
