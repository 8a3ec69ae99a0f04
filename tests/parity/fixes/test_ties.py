import threading
import weakref

import pytest
import torch

from tests.helpers import Implementation
from tests.models import empty


@pytest.fixture
def overwrite():
    """Make conversions replace parameters, until the test ends."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def tied(impl: Implementation, device: str = "cpu") -> torch.nn.Module:
    """Build two layers on different levels that have one weight, as language models do."""
    root = impl.own.Sequential(
        impl.own.Sequential(impl.own.Embedding(3, 2, device=device)),
        impl.own.Linear(2, 3, bias=False, device=device),
    )
    root[1].weight = root[0][0].weight
    return root


def overriding(impl: Implementation, wrap) -> torch.nn.Module:
    """Build the tied layers, the inner one below a module that overrides ``_apply``."""

    class Between(impl.Module):
        def _apply(self, fn, recurse=True):
            return super()._apply(wrap(fn), recurse)

    root = tied(impl)
    between = Between()
    between.inside = root[0]
    root[0] = between
    return root


def weights(root: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weight of every place."""
    return [weight for _, weight in root.named_parameters(remove_duplicate=False)]


REPLACING = {
    "to": ("cpu", lambda m: m.to("meta")),
    "to with dtype": ("cpu", lambda m: m.to("meta", torch.float64)),
    "to_empty": ("meta", lambda m: m.to_empty(device="cpu")),
    "to_empty on meta": ("cpu", lambda m: m.to_empty(device="meta")),
    "_apply": ("cpu", lambda m: m._apply(lambda t: t.to("meta"))),
}


@pytest.mark.parametrize("name", REPLACING)
def test_a_parameter_that_is_replaced_stays_tied(impl: Implementation, name: str) -> None:
    """A shared parameter that has to be a new object on another device is one new object."""
    device, convert = REPLACING[name]
    root = tied(impl, device)
    first, second = weights(convert(root))

    assert first is second
    assert isinstance(first, torch.nn.Parameter)
    assert first.device.type != device
    assert len(list(root.parameters())) == 1


@pytest.mark.usefixtures("overwrite")
def test_a_parameter_that_is_overwritten_stays_tied(impl: Implementation) -> None:
    """The flag that asks for new parameters does not untie them; gradients go along."""
    root = tied(impl)
    old = root[1].weight
    old.grad = torch.ones_like(old)
    first, second = weights(root.double())

    assert first is second
    assert first is not old
    assert first.dtype == first.grad.dtype == torch.float64


def test_a_shared_module_is_replaced_once(impl: Implementation) -> None:
    """A module in two places keeps one set of parameters, each converted once."""
    shared = impl.own.Linear(2, 2)
    root = impl.own.Sequential(impl.own.Sequential(shared), impl.own.Sequential(shared))
    calls = []

    def convert(tensor):
        calls.append(tensor)
        return tensor.to("meta")

    root._apply(convert)

    assert len(calls) == 2
    assert root[0][0].weight is root[1][0].weight


@pytest.mark.parametrize("target", ["meta", "cpu"])
def test_the_function_is_called_once_for_a_shared_parameter(
    impl: Implementation, target: str
) -> None:
    """A function that does not give the same when it is repeated is right for tied weights too."""
    root = tied(impl)
    before = root[1].weight.detach().clone()
    calls = []

    def double(tensor):
        calls.append(tensor)
        return (tensor * 2).to(target)

    root._apply(double)

    assert len(calls) == 1
    assert root[0][0].weight is root[1].weight
    assert root[1].weight.is_meta or torch.equal(root[1].weight, before * 2)


def test_the_gradient_of_a_shared_parameter_is_converted_once(impl: Implementation) -> None:
    """The gradient belongs to the parameter, and is converted with it."""
    root = tied(impl)
    root[1].weight.grad = torch.ones(3, 2)
    root._apply(lambda t: t * 2)

    assert torch.equal(root[0][0].weight.grad, torch.full((3, 2), 2.0))


def test_a_shared_buffer_stays_shared(impl: Implementation) -> None:
    """A buffer with two names, in one module or in several, is converted once, as one tensor."""
    root, child = empty(impl), empty(impl)
    root.child = child
    root.register_buffer("a", torch.ones(2))
    root.register_buffer("b", root.a)
    child.register_buffer("c", root.a)
    calls = []
    root._apply(lambda t: (calls.append(t), t.double() + 1)[1])

    assert len(calls) == 1
    assert root.a is root.b
    assert root.a is child.c
    assert root.a.dtype == torch.float64
    assert root.b.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_hold_across_an_override(impl: Implementation, dtype: torch.dtype) -> None:
    """A class that overrides ``_apply``, and passes on the function or another one, keeps the ties."""
    wrap = {torch.float32: lambda fn: fn, torch.float64: lambda fn: lambda t: fn(t).double()}
    root = overriding(impl, wrap[dtype])
    first, second = weights(root._apply(lambda t: t.to("meta")))

    assert first is second
    assert first.is_meta
    assert first.dtype == dtype


def test_ties_hold_in_recurrent_layers(impl: Implementation) -> None:
    """A recurrent layer, which overrides ``_apply``, shares a weight with another one."""
    root = impl.own.ModuleList([impl.own.RNN(2, 2), impl.own.RNN(2, 2)])
    root[1].weight_hh_l0 = root[0].weight_hh_l0
    root.to("meta")

    assert root[0].weight_hh_l0 is root[1].weight_hh_l0
    assert root[1].weight_hh_l0 is root[1].all_weights[0][1]


def test_the_next_conversion_starts_afresh(impl: Implementation) -> None:
    """Applying a function again applies it to every tensor again, also after an error."""
    root = empty(impl)
    root.weight = torch.nn.Parameter(torch.ones(2))
    root.child = impl.own.Linear(1, 1)

    def double(tensor):
        if tensor.numel() == 1 and failing:
            raise ValueError("no")
        return tensor * 2

    failing = False
    root._apply(double)._apply(double)
    failing = True
    with pytest.raises(ValueError, match="no"):
        root._apply(double)
    failing = False
    root._apply(double)

    assert root.weight.tolist() == [8.0, 8.0]


@pytest.mark.usefixtures("overwrite")
def test_replaced_tensors_are_freed_while_the_conversion_goes_on(impl: Implementation) -> None:
    """Only one module's old tensors are in memory besides the new ones."""
    root = impl.own.Sequential(*(impl.own.BatchNorm1d(2) for _ in range(6)))
    old, alive = [weakref.ref(t) for t in [*root.parameters(), *root.buffers()]], []

    def convert(tensor):
        alive.append(sum(reference() is not None for reference in old))
        return tensor.double() if tensor.is_floating_point() else tensor.clone()

    root._apply(convert)

    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= len(old) // 6


def test_conversions_in_two_threads_do_not_mix(impl: Implementation) -> None:
    """One function applied to two trees at once is applied to each tensor of both."""
    roots = [tied(impl) for _ in range(2)]
    meet = threading.Barrier(2, timeout=30)

    def convert(tensor):
        meet.wait()
        return tensor.to("meta")

    threads = [threading.Thread(target=root._apply, args=(convert,)) for root in roots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [weight for root in roots for weight in weights(root)]

    assert [weight.is_meta for weight in found] == [True] * 4
    assert found[0] is not found[2]


def test_a_conversion_of_another_module_inside_an_override(impl: Implementation) -> None:
    """An override may convert a module of its own in another way, in the midst of it all."""
    helper = impl.own.Linear(2, 2)

    def wrap(fn):
        helper.double()
        return fn

    root = overriding(impl, wrap)
    root.to(torch.float16)

    assert helper.weight.dtype == torch.float64
    assert {weight.dtype for weight in weights(root)} == {torch.float16}
