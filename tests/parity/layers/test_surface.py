import importlib
import inspect
import pickle
from types import ModuleType

import pytest
import torch
from torch import nn

import modkit.nn
from tests.helpers import MODKIT, TORCH, Implementation
from tests.parity.layers.samples import modkit_of, public_layers, samples


LAYERS = public_layers()
FILES = [
    name
    for name, value in vars(nn.modules).items()
    if inspect.ismodule(value) and value.__name__.startswith("torch.nn.modules.") and name[0] != "_"
]
EVERY_LAYER = sorted(
    {
        value
        for file in (*(getattr(nn.modules, name) for name in FILES), nn.parallel.distributed)
        for value in vars(file).values()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and value.__module__.startswith("torch.nn.")
    }
    - {nn.Module},
    key=lambda layer: layer.__name__,
)


@pytest.fixture(params=EVERY_LAYER, ids=lambda layer: layer.__name__)
def layer(request: pytest.FixtureRequest) -> type[nn.Module]:
    """A layer class of torch; the private ones, from which others inherit, are among them."""
    return request.param


def _parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_all_public_names_are_there():
    """What ``dir(torch.nn)`` shows without an underscore, ``modkit.nn`` has as well."""
    names = {name for name in dir(nn) if not name.startswith("_")}
    # A subpackage shows up once anything has imported it, in torch as here.
    for name in sorted(names):
        if isinstance(getattr(nn, name), ModuleType):
            importlib.import_module(f"modkit.nn.{name}")

    assert names - set(dir(modkit.nn)) == set()


@pytest.mark.parametrize("file", FILES)
def test_files_list_the_same_names(file):
    """A file below ``nn.modules`` has torch's ``__all__``, and every name in it."""
    mine, theirs = getattr(modkit.nn.modules, file), getattr(nn.modules, file)

    assert sorted(mine.__all__) == sorted(theirs.__all__)
    assert [name for name in mine.__all__ if not hasattr(mine, name)] == []


def test_package_of_layers_lists_the_same_names():
    """``nn.modules.__all__`` is torch's, and every name in it is there."""
    assert sorted(modkit.nn.modules.__all__) == sorted(nn.modules.__all__)
    assert [name for name in nn.modules.__all__ if not hasattr(modkit.nn.modules, name)] == []


def test_layer_is_found_where_torch_has_it(layer):
    """A class lives in the modkit file of torch's name, and is a subclass of both libraries'."""
    mine = getattr(
        importlib.import_module(layer.__module__.replace("torch", "modkit", 1)), layer.__name__
    )

    assert mine.__bases__[0] is layer
    assert issubclass(mine, MODKIT.nn.Module)
    assert mine.__module__ == layer.__module__.replace("torch", "modkit", 1)
    assert (mine.__name__, mine.__qualname__) == (layer.__name__, layer.__qualname__)


def test_layer_keeps_its_ancestors(layer):
    """The modkit classes of torch's ancestors are ancestors too, in torch's order."""
    wanted = [modkit_of(ancestor) for ancestor in layer.__mro__]
    ancestors = [ancestor for ancestor in modkit_of(layer).__mro__ if ancestor in wanted]

    assert ancestors == wanted


def test_constructor_has_torch_signature(layer):
    """Names, kinds, defaults and annotations of the constructor's parameters are torch's."""
    assert inspect.signature(modkit_of(layer)) == inspect.signature(layer)


def test_layer_has_all_of_torch_attributes(layer):
    """No attribute is missing; new are how to find torch's source, and what quantization sets."""
    difference = set(dir(layer)) ^ set(dir(modkit_of(layer)))

    assert difference <= {"__wrapped__", "qconfig"}


def test_methods_have_torch_signatures(layer):
    """Every public method takes torch's parameters, with torch's defaults."""
    mine = modkit_of(layer)
    differing = [
        name
        for name, method in inspect.getmembers(layer, inspect.isroutine)
        if not name.startswith("_")
        and inspect.isfunction(method)
        and _parameters(getattr(mine, name)) != _parameters(method)
    ]

    assert differing == []


@pytest.mark.parametrize("attribute", ["__constants__", "_version", "__annotations__"])
def test_class_attributes_are_torch_ones(layer, attribute):
    """What TorchScript and checkpoints read from the class is torch's."""
    absent = object()
    expected = getattr(layer, attribute, absent)

    assert getattr(modkit_of(layer), attribute, absent) == expected


def test_documentation_names_torch_class(layer):
    """The documentation is torch's, followed by a line that names torch's class."""
    theirs, mine = layer.__doc__, modkit_of(layer).__doc__

    assert (mine is None) == (theirs is None)
    assert mine is None or mine.startswith(theirs.rstrip())
    assert mine is None or mine.endswith(f".{layer.__name__}``.")


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_source_is_torch_source(layer):
    """``inspect`` leads from the class to the code that runs; from a subclass to its own."""

    class Own(modkit_of(layer)):
        pass

    assert inspect.getsource(modkit_of(layer)) == inspect.getsource(layer)
    assert inspect.getsource(Own).strip().startswith("class Own")


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_class_is_pickled_by_its_modkit_name(name):
    """A pickled class is found again, under the name of modkit."""
    mine = getattr(modkit.nn, name)
    data = pickle.dumps(mine)

    assert b"modkit.nn" in data
    assert pickle.loads(data) is mine


@pytest.mark.parametrize("name", samples())
def test_instance_is_pickled_by_its_modkit_name(name):
    """A pickled layer says modkit; its class and the classes of its children come back."""
    made = samples()[name].build(MODKIT)
    data = pickle.dumps(made)
    loaded = pickle.loads(data)

    assert f"modkit.nn.modules.{type(made).__module__.rsplit('.', 1)[1]}".encode() in data
    assert [type(m) for m in loaded.modules()] == [type(m) for m in made.modules()]


@pytest.mark.parametrize("name", samples())
def test_instance_has_torch_attributes(name):
    """An instance holds what torch's holds, and the one entry that tells fx where it belongs."""
    theirs, mine = samples()[name].build(TORCH), samples()[name].build(MODKIT)

    assert vars(mine).keys() - vars(theirs).keys() == {"__module__"}
    assert vars(theirs).keys() <= vars(mine).keys()
    assert mine.__module__ == theirs.__module__
    assert mine.__annotations__ == theirs.__annotations__


def test_functions_and_parameters_are_torch_objects():
    """Everything public that is no module class is the very object that torch has."""
    other = [
        name
        for name in dir(nn)
        if not name.startswith("_")
        and not (inspect.isclass(getattr(nn, name)) and issubclass(getattr(nn, name), nn.Module))
        and not inspect.ismodule(getattr(nn, name))
        and getattr(modkit.nn, name) is not getattr(nn, name)
    ]

    assert other == []


def test_unknown_name_is_an_attribute_error(impl: Implementation):
    """A name that torch does not have is missing in the same way."""
    with pytest.raises(AttributeError, match=r"module '\w+\.nn' has no attribute 'Lineer'"):
        _ = impl.nn.Lineer
    with pytest.raises(ImportError, match="cannot import name 'Lineer'"):
        exec(f"from {impl.name}.nn import Lineer")


def test_layers_are_accepted_as_torch_layers():
    """``isinstance`` holds for torch's class, the modkit class, and both ``Module`` classes."""
    layer = modkit.nn.Conv2d(1, 1, 1)

    assert isinstance(layer, (nn.Conv2d,))
    assert isinstance(layer, modkit.nn.modules.conv._ConvNd)
    assert isinstance(layer, modkit.nn.Module)
    assert isinstance(layer, torch.nn.Module)
    assert not isinstance(nn.Conv2d(1, 1, 1), modkit.nn.Module)
