import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
import modkit.nn
from tests.integration.torchscript import scripted_tests
from tests.unit.adoptable import Block, Net


def classes(model: nn.Module) -> list[type]:
    """Return the class of each module."""
    return [type(module) for module in model.modules()]


def instance_state(model: nn.Module) -> list[tuple[type, list[tuple[str, int]]]]:
    """Tell the class of each module, and what its ``__dict__`` and its registries hold."""

    def entries(module: nn.Module) -> list[tuple[str, int]]:
        state = vars(module)
        registries = (state["_parameters"], state["_buffers"], state["_modules"])
        return [(name, id(value)) for held in (state, *registries) for name, value in held.items()]

    return [(type(module), entries(module)) for module in model.modules()]


def test_every_module_becomes_one_of_modkit() -> None:
    """Layers are modkit's layers afterwards, and the user's classes derive from modkit's Module."""
    net = Net()

    adopted = modkit.adopt(net)

    assert adopted is net
    assert all(isinstance(module, modkit.nn.Module) for module in net.modules())
    assert type(net.head) is modkit.nn.Linear
    assert type(net.blocks) is modkit.nn.Sequential
    assert isinstance(net, Net)
    assert isinstance(net.blocks[1], Block)


def test_the_class_looks_like_the_original() -> None:
    """Name, module, documentation, signature, source, annotations and repr are the user's."""
    net = Net()
    shown = repr(net)

    modkit.adopt(net)
    cls = type(net)

    assert cls is not Net
    assert (cls.__name__, cls.__qualname__, cls.__module__) == ("Net", "Net", Net.__module__)
    assert cls.__doc__ == Net.__doc__
    assert inspect.signature(cls) == inspect.signature(Net)
    assert inspect.getsource(cls) == inspect.getsource(Net)
    assert inspect.get_annotations(cls) == inspect.get_annotations(Net)
    assert repr(net) == shown


def test_modkit_comes_before_torch_in_the_resolution_order() -> None:
    """The user's methods come first, then modkit's, then torch's; mixins keep their place."""

    class Mixin:
        def train(self, mode: bool = True) -> Any:
            return super().train(mode)

    class Layer(Mixin, nn.Linear): ...

    order = type(modkit.adopt(Layer(2, 2))).__mro__

    assert order[1:] == (
        Layer,
        Mixin,
        modkit.nn.Linear,
        nn.Linear,
        modkit.nn.Module,
        nn.Module,
        object,
    )


def test_nothing_but_the_class_changes() -> None:
    """Members, hooks, mode, outputs and the state dict with its metadata are the same objects."""
    net, x, seen = Net().eval(), torch.randn(3, 4), []
    net.head.register_forward_hook(lambda *_: seen.append("forward"))
    net.blocks[0].register_state_dict_post_hook(lambda *_: seen.append("state"))
    before = [
        [(name, id(value)) for name, value in find()]
        for find in (net.named_parameters, net.named_buffers, net.named_modules)
    ]
    hooks = net.head._forward_hooks
    expected, state = net(x), net.state_dict()
    seen.clear()

    modkit.adopt(net)
    output, after = net(x), net.state_dict()

    assert before == [
        [(name, id(value)) for name, value in find()]
        for find in (net.named_parameters, net.named_buffers, net.named_modules)
    ]
    assert net.head._forward_hooks is hooks
    assert seen == ["forward", "state", "state"]
    assert not any(module.training for module in net.modules())
    assert torch.equal(output, expected)
    assert list(after) == list(state)
    assert after._metadata == state._metadata
    assert net.blocks[0].width == 4


def test_release_restores_everything() -> None:
    """After release, each module has the class and the instance attributes that it had before."""
    net = Net()
    net.plain = nn.Module()
    before = instance_state(net)

    modkit.adopt(net)
    released = modkit.release(net)

    assert released is net
    assert instance_state(net) == before


def test_adopting_twice_changes_nothing() -> None:
    """A second call leaves all as it is, and adopts what has been added since."""
    net = modkit.adopt(Net())
    before = instance_state(net)

    modkit.adopt(net)
    again = instance_state(net)
    net.head = nn.Sequential(Block(), nn.Linear(4, 2))
    modkit.adopt(net)

    assert again == before
    assert type(net.head[0]) is type(net.blocks[0])
    assert all(isinstance(module, modkit.nn.Module) for module in net.modules())


def test_releasing_a_part() -> None:
    """Release works on a part of an adopted model, and leaves the rest adopted."""
    net = modkit.adopt(Net())

    modkit.release(net.blocks)

    assert classes(net.blocks)[:2] == [nn.Sequential, Block]
    assert isinstance(net, modkit.nn.Module)
    assert type(net.head) is modkit.nn.Linear


def test_releasing_what_was_never_adopted() -> None:
    """Models of torch stay as they are; so do classes that users derived from modkit's."""

    class Own(modkit.nn.Module): ...

    net, own = Net(), Own()
    before = instance_state(net)

    modkit.release(net)
    modkit.release(own)

    assert instance_state(net) == before
    assert type(own) is Own


def test_an_optimizer_goes_on() -> None:
    """Training with an optimizer from before gives the losses that it gives without adopt."""
    net = Net()
    twin = copy.deepcopy(net)
    x, y = torch.randn(8, 4), torch.randint(2, (8,))

    def train(model: nn.Module, change: Any) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for step in range(9):
            if step in change:
                change[step](model)
            loss = nn.functional.cross_entropy(model(x), y)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    losses = train(net, {3: modkit.adopt, 6: modkit.release})

    assert losses == train(twin, {})
    assert type(net) is Net


def test_one_class_for_all_instances() -> None:
    """Instances of one class, adopted at different times, have one class afterwards, too."""
    first, second = modkit.adopt(Block()), modkit.adopt(nn.Sequential(Block()))

    same = type(first) is type(second[0])

    assert same


def test_makers_of_classes_do_not_notice() -> None:
    """Neither ``__init_subclass__`` nor a metaclass is called for the class that adopt makes."""
    made = []

    class Meta(type):
        def __new__(cls, name: str, *args: Any, **kwargs: Any) -> Any:
            made.append(("metaclass", name))
            return super().__new__(cls, name, *args, **kwargs)

        def __init__(cls, name: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(name, *args)

    class Base(nn.Module, metaclass=Meta):
        def __init_subclass__(cls, *, key: str) -> None:
            made.append(("subclass", key))

    class Derived(Base, key="derived"): ...

    module = Derived()
    before = list(made)
    modkit.adopt(module)

    assert made == before
    assert isinstance(module, modkit.nn.Module)
    assert type(type(module)) is Meta


def test_abstract_base_classes() -> None:
    """A class with abstract methods has its own register of virtual subclasses when adopted."""
    import abc

    class Base(nn.Module, abc.ABC):
        @abc.abstractmethod
        def forward(self, x: Tensor) -> Tensor: ...

    class Net(Base):
        def forward(self, x: Tensor) -> Tensor:
            return x

    plain, adopted = Net(), modkit.adopt(Net())
    asked = [isinstance(plain, Net), isinstance(plain, type(adopted))]

    assert asked == [True, False]
    assert isinstance(adopted, Base)


def test_a_class_with_access_of_its_own() -> None:
    """A class that guards its attributes is adopted without being asked, and works as before."""

    class Guarded(nn.Module):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise RuntimeError("no")
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            return f"made up {name}" if name.startswith("any") else super().__getattr__(name)

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    module = Guarded()
    module.inner = nn.Linear(2, 2)

    modkit.adopt(module)

    assert isinstance(module, modkit.nn.Module)
    assert module.anything == "made up anything"
    assert type(module.inner) is modkit.nn.Linear


@pytest.mark.parametrize(
    ("mixins", "members"), [((), {"__slots__": ("extra",)}), ((Exception,), {})]
)
def test_classes_that_cannot_be_adopted(mixins: Any, members: dict[str, Any]) -> None:
    """A class whose instances have a layout of their own is named, and nothing is changed."""
    odd = type("Odd", (nn.Module, *mixins), members)
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(odd()))
    before = instance_state(net)

    with pytest.raises(TypeError, match=r"the module '1\.0', .*\.Odd: .*Nothing has been changed"):
        modkit.adopt(net)

    assert instance_state(net) == before


def test_a_class_that_is_refused_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a module does not take its new class, those before it get theirs back."""
    net = Net()
    before = instance_state(net)
    set_class = modkit.nn._adopt._set_class

    def refuse(module: nn.Module, cls: type) -> None:
        if module is net.head and cls is modkit.nn.Linear:
            raise TypeError("no such class")
        set_class(module, cls)

    monkeypatch.setattr(modkit.nn._adopt, "_set_class", refuse)
    with pytest.raises(TypeError, match=r"the module 'head', torch.*Linear: no such class"):
        modkit.adopt(net)

    assert instance_state(net) == before


@pytest.mark.parametrize("function", [modkit.adopt, modkit.release])
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_models_are_refused(function: Any, how: str) -> None:
    """Compiled code stands for the classes that it was made from, so they are not changed."""
    net = nn.Sequential(Net(), nn.ReLU())
    if function is modkit.release:
        modkit.adopt(net)
    if how == "wrapped":
        net[0] = torch.compile(net[0], backend="eager")
    else:
        net[0].compile(backend="eager")
    before = instance_state(net)

    with pytest.raises(RuntimeError, match=r"is compiled, as the module '0' is; call modkit\."):
        function(net)

    assert instance_state(net) == before


def test_adopting_again_after_compiling_in_place() -> None:
    """A model that was adopted and then compiled in place has nothing to adopt, and stays."""
    net = modkit.adopt(Net())
    net.compile(backend="eager")
    before = instance_state(net)

    modkit.adopt(net)

    assert instance_state(net) == before


@scripted_tests
def test_script_and_graph_modules_are_reported() -> None:
    """A warning names the modules that stay; those beside them are adopted, with the same output."""
    net = nn.Sequential(torch.jit.script(Block()), torch.fx.symbolic_trace(Block()), Block())
    kept, x = classes(net)[1], torch.randn(2, 4)
    expected = net(x)

    reported = "the module '0' (ScriptModule), the module '1' (GraphModule)."
    with pytest.warns(UserWarning, match=r"modkit\.adopt has left as they are") as caught:
        modkit.adopt(net)

    assert len(caught) == 1
    assert str(caught[0].message).endswith(reported)
    assert caught[0].filename == __file__
    assert type(net[0]) is kept
    assert not isinstance(net[1], modkit.nn.Module)
    assert isinstance(net[1].linear, modkit.nn.Linear)
    assert isinstance(net[2], modkit.nn.Module)
    assert torch.equal(net(x), expected)
