import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.cases import for_each
from tests.helpers import TORCH, Implementation, freeze
from tests.integration.networks import NETWORKS, agree, gradients, make_batch, make_net


class Sharded:
    """Mixin that a sharding library adds to the class of a module."""

    def unshard(self) -> str:
        """Tell which class was taken over."""
        return type(self).__mro__[2].__name__


def take_over(module: torch.nn.Module) -> None:
    """Give a module a class made on the spot, with all that its own class has."""
    cls = type(module)
    module.__class__ = type(f"Sharded{cls.__name__}", (Sharded, cls), {})


@for_each("network", NETWORKS)
def test_class_is_swapped(network: str) -> None:
    """Every module of a network takes a dynamic subclass, works, and takes its class back."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        net, batch = make_net(impl.nn, network), make_batch(network)
        classes = [type(module) for module in net.modules()]
        for module in net.modules():
            take_over(module)
        output = net(batch)
        output.sum().backward()
        names = [type(module).__name__ for module in net.modules()]
        for module, cls in zip(net.modules(), classes, strict=True):
            assert module.unshard() == cls.__name__
            assert isinstance(module, cls)

            module.__class__ = cls
        return output, gradients(net), names, dict(net.state_dict()), net(batch)

    _, _, names, _, _ = agree(scenario)

    assert names[0].startswith("Sharded")


def test_swapped_class_is_copied_and_saved(impl: Implementation) -> None:
    """A module of a dynamic class keeps it through ``deepcopy``, and its state dict loads."""
    net, batch = make_net(impl.nn, "nested"), make_batch("nested")
    take_over(net)
    clone = copy.deepcopy(net)
    clone.load_state_dict(make_net(torch.nn, "nested").state_dict())

    assert type(clone) is type(net)
    assert torch.equal(clone(batch), net(batch))


def test_torch_initialiser_is_called_explicitly() -> None:
    """A class that calls ``torch.nn.Module.__init__(self)`` is a complete modkit module."""

    def scenario(impl: Implementation) -> tuple[Any, ...]:
        nn = impl.nn

        class Explicit(nn.Module):
            def __init__(self) -> None:
                torch.nn.Module.__init__(self)
                self.linear = nn.Linear(6, 3)
                self.scale = nn.Parameter(torch.ones(3))
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return self.linear(x) * self.scale

        net, batch = Explicit(), make_batch("free")
        handle = net.register_forward_hook(lambda _m, _args, output: output + 1)
        outputs = [net(batch)]
        handle.remove()
        outputs.append(copy.deepcopy(net)(batch))
        outputs[0].sum().backward()
        return outputs, gradients(net), dict(net.state_dict()), list(net.__dict__)

    _, _, state, _ = agree(scenario)

    assert state["calls"] == 1


def test_layer_initialised_as_a_module_only(impl: Implementation) -> None:
    """A layer subclass may skip the layer's own initialiser, as adapters do."""
    nn = impl.nn

    class Adapter(nn.Linear):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.in_features, self.out_features = 2, 3
            self.weight = nn.Parameter(torch.ones(3, 2))
            self.register_parameter("bias", None)

    output = Adapter()(torch.ones(1, 2))

    assert torch.equal(output, torch.full((1, 3), 2.0))
    assert repr(Adapter()) == "Adapter(in_features=2, out_features=3, bias=False)"


def test_cooperative_bases() -> None:
    """Mixins beside a module are initialised exactly where torch would initialise them."""

    def scenario(impl: Implementation) -> list[Any]:
        class Mixin:
            def __init__(self, size: int = 0, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.size = size

        class After(impl.nn.Module, Mixin):
            pass

        class Calling(impl.nn.Module, Mixin):
            call_super_init = True

        class Before(Mixin, impl.nn.Module):
            pass

        return [hasattr(After(), "size"), Calling(size=3).size, Before(size=4).size]

    assert agree(scenario) == [False, 3, 4]


def test_abstract_base_class(impl: Implementation) -> None:
    """A module may be an abstract class: no metaclass is in the way, and no slots."""
    import abc

    class Abstract(impl.nn.Module, abc.ABC):
        @abc.abstractmethod
        def encode(self, x: Tensor) -> Tensor: ...

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

    class Concrete(Abstract):
        def encode(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(TypeError, match="abstract"):
        Abstract()

    assert Concrete()(torch.zeros(1)) == 1
    assert "__slots__" not in vars(impl.nn.Module)


def test_overrides_are_called() -> None:
    """Torch's protected methods that users override run once per module, with torch's arguments."""

    def scenario(impl: Implementation) -> list[Any]:
        calls: list[Any] = []

        class Noting(impl.nn.Linear):
            def _apply(self, fn: Any, recurse: bool = True) -> Any:
                calls.append(("_apply", recurse))
                return super()._apply(fn, recurse)

            def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
                calls.append(("_save_to_state_dict", prefix, keep_vars))
                super()._save_to_state_dict(destination, prefix, keep_vars)

            def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
                calls.append(("_load_from_state_dict", sorted(state_dict), prefix, args[0]))
                super()._load_from_state_dict(state_dict, prefix, *args)

            def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
                calls.append(("named_parameters", args, kwargs))
                return super().named_parameters(*args, **kwargs)

            def train(self, mode: bool = True) -> Any:
                calls.append(("train", mode))
                return super().train(mode)

            def requires_grad_(self, requires_grad: bool = True) -> Any:
                calls.append(("requires_grad_", requires_grad))
                return super().requires_grad_(requires_grad)

        net = impl.nn.Sequential(Noting(2, 2), impl.nn.Sequential(Noting(2, 2)))
        net.double().eval().requires_grad_(False)
        net.load_state_dict(net.state_dict())
        list(net.parameters())
        net.zero_grad()
        return calls

    calls = agree(scenario)

    assert [call for call in calls if call[0] == "_apply"] == [("_apply", True)] * 2
    assert [call for call in calls if call[0] == "train"] == [("train", False)] * 2


def test_patched_methods_of_torch_are_honoured(
    impl: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods that libraries replace on ``torch.nn.Module`` are replaced for modkit's modules."""
    called = []
    original_call = torch.nn.Module.__call__

    def noting_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(type(self).__name__)
        return original_call(self, *args, **kwargs)

    net, batch = make_net(impl.nn, "free"), make_batch("free")
    monkeypatch.setattr(torch.nn.Module, "__call__", noting_call)
    net(batch)
    calls = list(called)
    monkeypatch.undo()
    net(batch)

    assert calls == ["FreeNet", "Linear", "Linear"]
    assert called == calls


def test_patched_attribute_reads(impl: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced ``torch.nn.Module.__getattr__`` sees every read of a member."""
    read = []
    original = torch.nn.Module.__getattr__

    def noting(self: torch.nn.Module, name: str) -> Any:
        read.append(name)
        return original(self, name)

    net = make_net(impl.nn, "free")
    monkeypatch.setattr(torch.nn.Module, "__getattr__", noting)
    torch.tanh(net.w)
    _ = net.inner
    _ = net.running

    assert read == ["w", "inner", "running"]


def test_names_that_tools_compare(impl: Implementation) -> None:
    """The functions whose identity tools check are torch's own."""
    net = make_net(impl.nn, "free")

    assert type(net).__getattr__ is torch.nn.Module.__getattr__
    assert impl.nn.Module.forward is torch.nn.Module.forward
    assert impl.nn.Module.get_extra_state is torch.nn.Module.get_extra_state
    assert impl.nn.Module.set_extra_state is torch.nn.Module.set_extra_state
    assert isinstance(net.inner, torch.nn.Linear)
    assert fx.Tracer().is_leaf_module(net.inner, "inner")
    assert not fx.Tracer().is_leaf_module(net, "")


def test_wrappers_that_forward_attributes() -> None:
    """A wrapper that asks ``super().__getattr__`` first, then its module, finds both."""

    def scenario(impl: Implementation) -> list[Any]:
        class Wrapper(impl.nn.Module):
            def __init__(self, module: torch.nn.Module) -> None:
                super().__init__()
                self.base = module

            def __getattr__(self, name: str) -> Any:
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(self.base, name)

            def forward(self, x: Tensor) -> Tensor:
                return self.base(x)

        wrapper = Wrapper(make_net(impl.nn, "free"))
        with pytest.raises(AttributeError) as caught:
            wrapper.nothing
        return [wrapper(make_batch("free")), wrapper.w, wrapper.counter, str(caught.value)]

    *_, text = agree(scenario)

    assert "'FreeNet' object has no attribute 'nothing'" in text


def test_mixed_trees(impl: Implementation) -> None:
    """Modules of torch and of the implementation hold one another."""
    nn, batch = impl.nn, make_batch("free")
    net = torch.nn.Sequential(
        nn.Linear(6, 6), torch.nn.Linear(6, 6), nn.Sequential(torch.nn.ReLU())
    )
    outer = nn.Sequential(net, nn.Linear(6, 3)).double()
    reference = copy.deepcopy(outer)
    outer.load_state_dict(reference.state_dict())

    assert freeze(outer(batch.double())) == freeze(reference(batch.double()))
    assert {p.dtype for p in outer.parameters()} == {torch.float64}
    assert isinstance(outer, TORCH.nn.Module)
    assert len(list(outer.modules())) == 7
