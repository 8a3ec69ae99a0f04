from tests.helpers import Implementation, same
from tests.models import tree


def test_a_class_may_have_a_property_of_that_name(impl: Implementation) -> None:
    """`train` and `eval` set `training` through a property of the class, below the root too."""
    modes: list[bool] = []

    class Noting(impl.Module):
        training = property(lambda self: modes[-1], lambda self, mode: modes.append(mode))

    model = impl.own.Sequential(Noting(), impl.own.Identity())
    modes.clear()
    model.eval().train()

    assert modes == [False, True]


def test_the_constructor_sets_training_as_an_attribute() -> None:
    """A property or a slot of that name gets the value, and the instance has no other one."""

    def scenario(impl):
        modes = []

        class Noting(impl.Module):
            training = property(lambda self: modes[-1], lambda self, mode: modes.append(mode))

        class Slotted(impl.Module):
            __slots__ = ("training",)

        class Constant(impl.Module):
            training = False

        modules = [Noting(), Slotted(), Constant(), Slotted().eval()]
        return modes, [(module.training, [*vars(module)]) for module in modules]

    kind, (_, ((_, modes), _)) = same(scenario)

    assert kind == "returned"
    assert modes == [("bool", "True")]


def test_train_and_eval(impl: Implementation) -> None:
    """The mode is set on every module, and the module is returned."""
    module = tree(impl)

    assert module.eval() is module
    assert not any(each.training for each in module.modules())
    assert module.left.train() is module.left
    assert [each.training for each in module.modules()] == [False, True, True, False]
    assert module.train(False).train(True).left.inner.training is True
