import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.module_page.nets import network, scaling


def test_train_sets_all_modules(impl: Implementation) -> None:
    """`train` sets training mode in the whole tree, by default and with mode=True."""
    model = network(impl).eval()

    assert model.train() is model
    assert all(m.training is True for m in model.modules())

    model.eval()

    assert model.train(mode=True) is model
    assert all(m.training is True for m in model.modules())


def test_train_with_false_is_evaluation_mode(impl: Implementation) -> None:
    """`train(False)` sets evaluation mode in the whole tree."""
    model = network(impl)

    assert model.train(False) is model
    assert all(m.training is False for m in model.modules())


def test_a_class_may_have_a_property_of_that_name(impl: Implementation) -> None:
    """`train` and `eval` set `training` through a property of the class, below the root too."""
    modes: list[bool] = []

    class Noting(impl.Module):
        training = property(lambda self: modes[-1], lambda self, mode: modes.append(mode))

    model = impl.own.Sequential(Noting(), impl.own.Identity())
    modes.clear()
    model.eval().train()

    assert modes == [False, True]


@pytest.mark.parametrize("mode", [None, 1, "train"], ids=repr)
def test_mode_must_be_a_bool(mode: object) -> None:
    """A mode that is not a bool is a ValueError."""
    assert same(lambda impl: network(impl).train(mode))[:2] == ("raised", "ValueError")


def test_eval_is_equivalent_to_train_false(impl: Implementation) -> None:
    """`eval` calls `train(False)`, overrides included, and returns the module."""
    modes: list[bool] = []

    class Watched(impl.nn.Module):
        def train(self, mode=True):
            modes.append(mode)
            return super().train(mode)

    model = Watched()
    model.child = Watched()

    assert model.eval() is model
    assert modes == [False, False]
    assert [m.training for m in model.modules()] == [False, False]


@for_each(
    ("name", "affected"),
    [("Dropout", True), ("BatchNorm1d", True), ("Linear", False), ("LayerNorm", False)],
)
def test_mode_affects_certain_layers(impl: Implementation, name: str, affected: bool) -> None:
    """The mode changes what Dropout and BatchNorm compute and nothing in other layers."""
    layer = {
        "Dropout": lambda nn: nn.Dropout(0.5),
        "BatchNorm1d": lambda nn: nn.BatchNorm1d(8),
        "Linear": lambda nn: nn.Linear(8, 8),
        "LayerNorm": lambda nn: nn.LayerNorm(8),
    }[name](impl.nn)
    x = torch.randn(16, 8)
    training, evaluation = layer.train()(x), layer.eval()(x)

    assert torch.equal(training, evaluation) is not affected
    if name == "Dropout":
        assert torch.equal(evaluation, x)


def test_mode_reaches_layers_below_user_classes(impl: Implementation) -> None:
    """In evaluation mode a network with Dropout is deterministic and keeps its statistics."""
    model = network(impl)
    x = torch.randn(8, 3)
    model(x)
    statistics = model.block.norm.running_mean.clone()

    assert not torch.equal(model.train()(x), model(x))

    model.eval()
    after = model.block.norm.running_mean.clone()

    assert torch.equal(model(x), model(x))
    assert torch.equal(model.block.norm.running_mean, after)
    assert not torch.equal(after, statistics)


def test_eval_keeps_recording_gradients(impl: Implementation) -> None:
    """Evaluation mode is independent of autograd: parameters still require and get gradients."""
    model = network(impl).eval()
    model(torch.randn(4, 3)).sum().backward()

    assert all(p.requires_grad and p.grad is not None for p in model.parameters())


def test_requires_grad_sets_parameters_in_place(impl: Implementation) -> None:
    """`requires_grad_` sets the attribute of the same parameters; its default is True."""
    model = network(impl)
    parameters = list(model.parameters())

    assert model.requires_grad_(False) is model
    assert not any(p.requires_grad for p in parameters)
    assert model.requires_grad_() is model
    assert all(p.requires_grad for p in parameters)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]


def test_requires_grad_switches_recording(impl: Implementation) -> None:
    """Autograd records operations on parameters only while they require grad."""
    model = network(impl)
    x = torch.randn(4, 3)

    assert model(x).requires_grad
    assert not model.requires_grad_(False)(x).requires_grad
    assert model.requires_grad_(requires_grad=True)(x).requires_grad


def test_freezing_a_part(impl: Implementation) -> None:
    """A frozen submodule gets no gradients while the rest of the model trains."""
    model = network(impl)
    model.block.requires_grad_(False)
    model(torch.randn(4, 3)).square().sum().backward()

    assert all(p.grad is None for p in model.block.parameters())
    assert all(p.grad is not None for p in (model.scale, *model.head.parameters()))


def test_requires_grad_leaves_buffers(impl: Implementation) -> None:
    """`requires_grad_` concerns parameters; buffers stay without gradients."""
    model = network(impl).requires_grad_(True)

    assert not any(b.requires_grad for b in model.buffers())


def test_requires_grad_on_integral_parameters() -> None:
    """An integral parameter cannot require grad: torch's error."""

    def scenario(impl: Implementation) -> object:
        module = impl.nn.Module()
        module.index = impl.nn.Parameter(torch.tensor([1]), requires_grad=False)
        return module.requires_grad_()

    assert same(scenario)[:2] == ("raised", "RuntimeError")


def with_gradients(impl: Implementation):
    """Build a network whose parameters have gradients."""
    model = network(impl)
    model(torch.randn(4, 3)).square().sum().backward()
    return model


def test_zero_grad_sets_gradients_to_none(impl: Implementation) -> None:
    """`zero_grad` sets all gradients of the tree to None by default, and returns None."""
    model = with_gradients(impl)

    assert all(p.grad is not None for p in model.parameters())
    assert model.zero_grad() is None
    assert all(p.grad is None for p in model.parameters())


def test_zero_grad_sets_gradients_to_zero(impl: Implementation) -> None:
    """set_to_none=False fills the existing gradients with zeros and leaves missing ones out."""
    model = with_gradients(impl)
    model.spare = scaling(impl)
    gradients = [id(p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=False)
    kept = [p for p in model.parameters() if p.grad is not None]

    assert [id(p.grad) for p in kept] == gradients
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in kept)
    assert model.spare.factor.grad is None


@pytest.mark.parametrize("options", [{}, {"set_to_none": True}, {"set_to_none": False}], ids=str)
def test_zero_grad_resets_as_an_optimizer_does(
    impl: Implementation, options: dict[str, bool]
) -> None:
    """`zero_grad` leaves the gradients that an optimizer's `zero_grad` leaves."""
    model, other = with_gradients(impl), with_gradients(impl)
    model.zero_grad(**options)
    torch.optim.SGD(other.parameters()).zero_grad(**options)

    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) is (theirs.grad is None) is (options != {"set_to_none": False})
        if mine.grad is not None:
            assert torch.equal(mine.grad, theirs.grad)


def test_zero_grad_both_ways(impl: Implementation) -> None:
    """`zero_grad` on a layer sets zeros on request and None by default."""
    linear = impl.nn.Linear(2, 1)
    linear(torch.ones(1, 2)).sum().backward()
    linear.zero_grad(set_to_none=False)

    assert torch.equal(linear.weight.grad, torch.zeros(1, 2))

    linear.zero_grad()

    assert linear.weight.grad is None
