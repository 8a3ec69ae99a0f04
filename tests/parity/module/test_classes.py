import abc
import functools
import inspect
import sys
from collections.abc import Iterable

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same


def finished_by_metaclass(impl: Implementation, base: type) -> bool:
    """Make a module of a class whose metaclass marks instances."""

    class Meta(base):
        def __call__(cls, *args, **keywords):
            instance = super().__call__(*args, **keywords)
            instance.finished = True
            return instance

    class Net(impl.Module, metaclass=Meta):
        pass

    return Net().finished


def test_a_module_with_a_metaclass(impl: Implementation) -> None:
    """A class with a metaclass of its own may derive from Module."""
    assert finished_by_metaclass(impl, type)


def test_a_metaclass_derived_from_that_of_module(impl: Implementation) -> None:
    """The remedy: the metaclass derives from ``type(nn.Module)``, which in torch is ``type``."""
    assert finished_by_metaclass(impl, type(impl.nn.Module))


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


def test_a_generic_function_takes_layers(impl: Implementation) -> None:
    """``functools.singledispatch`` finds the function for ``Module`` by the bases of a layer."""

    class Net(impl.Module):
        pass

    @functools.singledispatch
    def kind(value: object) -> str:
        return "object"

    kind.register(impl.Module, lambda _: "module")
    kind.register(torch.nn.Linear, lambda _: "linear")

    values = (Net(), torch.nn.Identity(), torch.nn.Linear(1, 1), 1)
    assert [*map(kind, values)] == ["module", "module", "linear", "object"]


def test_a_generic_function_takes_layers_that_fit_twice(impl: Implementation) -> None:
    """A container is a module and iterable: its own methods are nearer than its base."""

    @functools.singledispatch
    def kind(value: object) -> str:
        return "object"

    kind.register(impl.Module, lambda _: "module")
    kind.register(Iterable, lambda _: "iterable")

    assert kind(torch.nn.Sequential()) == "iterable"


def test_abcmeta_as_the_metaclass(impl: Implementation) -> None:
    """A class whose metaclass is ABCMeta is abstract while a method is missing."""

    class Base(impl.Module, metaclass=abc.ABCMeta):
        @abc.abstractmethod
        def encode(self): ...

    with pytest.raises(TypeError, match="abstract"):
        Base()
    assert issubclass(Base, impl.Module)


def test_a_plain_class_is_not_abstract(impl: Implementation) -> None:
    """A class with an abstract method counts as concrete, unless it derives from ABC."""

    class Base(impl.Module):
        @abc.abstractmethod
        def encode(self): ...

    assert Base().training
    assert not inspect.isabstract(Base)


def test_registrations_of_abstract_classes():
    """`register` holds for a class and those above it, for subclasses, and from then on, as in torch."""

    def scenario(impl):
        class Base(impl.Module, metaclass=abc.ABCMeta):
            pass

        class Middle(Base):
            pass

        class Sibling(Base):
            pass

        class Derived(Middle):
            pass

        class Other(impl.Module, abc.ABC):
            pass

        class Plain(impl.Module):
            pass

        class BelowPlain(Plain, abc.ABC):
            pass

        class Virtual:
            pass

        class BelowVirtual(Virtual):
            pass

        classes = [impl.Module, Base, Middle, Sibling, Derived, Other]
        found = []
        for base, registered in (
            (object, None),
            (Middle, Virtual),
            (Derived, torch.nn.Linear),
            (Other, Virtual),
            (Base, int),
        ):
            if registered is not None:
                found.append(base.register(registered) is registered)
            # A class that is made later has a registry of its own.
            classes.append(type("After", (Base,), {}))
            classes.append(abc.ABCMeta("After", (impl.Module,), {}))
            for cls in (Virtual, BelowVirtual, int, Derived, Sibling):
                found.append([issubclass(cls, each) for each in classes])
                found.append([isinstance(cls(), each) for each in classes])
            found.append([isinstance(torch.nn.Linear(1, 1), each) for each in classes])
        # The class above an abstract one stays plain.
        BelowPlain.register(Virtual)
        found.append([issubclass(Virtual, each) for each in (BelowPlain, Plain)])
        return found, [len([*abc._get_dump(each)[0]]) for each in classes[1:]]

    assert same(scenario)[0] == "returned"


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


@pytest.mark.parametrize("name", ["Module", "AveragedModel", "jit.ScriptModule"])
def test_the_source_of_a_public_class(impl: Implementation, name: str) -> None:
    """Python finds the definition of the class itself."""
    *parents, name = name.split(".")
    home = getattr(impl, parents[0]) if parents else impl

    assert inspect.getsource(getattr(home, name)).lstrip().startswith(f"class {name}")


def test_a_method_that_was_patched_and_put_back_leaves_no_trace() -> None:
    """After a manual patch of ``Module.__call__``, later patches of torch's class reach the modules."""

    def scenario(impl: Implementation) -> list[object]:
        class Block(impl.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + 1

        class AllAreLeaves(torch.fx.Tracer):
            def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
                return True

        called: list[object] = []
        call = impl.Module.__call__

        def counted(self: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
            called.append(type(self).__name__)
            return call(self, *args)

        net = impl.nn.Sequential(Block(), Block())
        impl.Module.__call__ = counted
        try:
            net[0](torch.ones(1))
        finally:
            impl.Module.__call__ = call
        net[1](torch.ones(1))

        graph = AllAreLeaves().trace(net)
        return [called, [node.op for node in graph.nodes]]

    expected = [["Block"], ["placeholder", "call_module", "call_module", "output"]]
    assert same(scenario) == ("returned", freeze(expected))
