import pytest

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import child_leaf, tree, with_dtypes
from tests.parity.module.contents import state


def test_a_class_may_have_a_property_of_that_name(impl: Implementation) -> None:
    """`train` and `eval` set `training` through a property of the class, below the root too."""
    modes: list[bool] = []

    class Noting(impl.Module):
        training = property(lambda self: modes[-1], lambda self, mode: modes.append(mode))

    model = impl.own.Sequential(Noting(), impl.own.Identity())
    modes.clear()
    model.eval().train()

    assert modes == [False, True]


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


def test_requires_grad_reaches_all_parameters(impl: Implementation) -> None:
    """``requires_grad_`` sets every floating point parameter, and no buffer."""
    module = tree(impl)
    returned = module.requires_grad_(False)

    assert returned is module
    assert not any(p.requires_grad for p in module.parameters())
    assert module.requires_grad_().gain.requires_grad
    assert not any(b.requires_grad for b in module.buffers())


def test_requires_grad_of_integers():
    """Integer parameters can be frozen, but not unfrozen."""

    def scenario(impl):
        module = with_dtypes(impl).requires_grad_(False)
        return module.requires_grad_()

    assert same(scenario)[0] == "raised"


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@for_each("set_to_none", [True, False])
@for_each("graph", [True, False])
def test_zero_grad(set_to_none, graph):
    """Gradients are dropped, or zeroed in place and cut from their graph."""

    def scenario(impl):
        module = tree(impl)
        loss = module.gain.square().sum() + module.right.weight.sum() * module.tied
        loss.backward(create_graph=graph)
        grad = module.gain.grad
        returned = module.zero_grad(set_to_none=set_to_none)
        result = [returned, module.gain.grad is grad, grad, grad.grad_fn is None, state(module)]
        for parameter in module.parameters():
            parameter.grad = None
        return result

    assert same(scenario)[0] == "returned"


def test_zero_grad_of_a_replica_warns(impl: Implementation) -> None:
    """On a data-parallel replica ``zero_grad`` says, at the caller's line, that it does nothing."""
    replica = child_leaf(impl)._replicate_for_data_parallel()
    with pytest.warns(UserWarning, match="has no effect") as caught:
        replica.zero_grad()

    assert len(caught) == 1
    assert same(lambda impl: child_leaf(impl)._replicate_for_data_parallel().zero_grad())


def test_train_and_eval(impl: Implementation) -> None:
    """The mode is set on every module, and the module is returned."""
    module = tree(impl)

    assert module.eval() is module
    assert not any(each.training for each in module.modules())
    assert module.left.train() is module.left
    assert [each.training for each in module.modules()] == [False, True, True, False]
    assert module.train(False).train(True).left.inner.training is True
