import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import empty, tree


def names(module: torch.nn.Module, root: torch.nn.Module) -> str:
    """Return the path of a module below the root, to compare across implementations."""
    return next((path for path, each in root.named_modules() if each is module), "?")


class Memo(list):
    """A memo that has `in` and `add` alone of what sets have."""

    def __contains__(self, module):
        return any(module is each for each in self)

    def add(self, module):
        """Append a module."""
        self.append(module)


@for_each("held", [[], [""], ["left"], ["left.inner"], ["right"]])
@for_each("unique", [True, False])
@for_each("kind", [set, Memo])
def test_a_given_memo(kind, unique, held):
    """It leaves out what it holds, and gets each module when that is yielded, unless all are kept."""

    def scenario(impl):
        module = tree(impl)
        memo = kind(module.get_submodule(name) for name in held)
        steps = [(name, len(memo)) for name, _ in module.named_modules(memo, "p", unique)]
        return steps, sorted(names(each, module) for each in memo)

    assert same(scenario)[0] == "returned"


def test_a_shared_child_is_visited_once_per_parent(impl: Implementation) -> None:
    """``train``, ``apply`` and ``_apply`` visit a module once per parent that holds it."""
    log = []

    class Shared(impl.Module):
        def train(self, mode=True):
            log.append("train")
            return super().train(mode)

        def _apply(self, fn, recurse=True):
            log.append("_apply")
            return super()._apply(fn, recurse)

    shared = Shared()
    root = empty(impl)
    for name in ("a", "b"):
        parent = empty(impl)
        parent.x = parent.y = shared
        setattr(root, name, parent)
    root.train()
    root.float()
    root.apply(lambda module: log.append("apply") if module is shared else None)

    assert log == ["train", "train", "_apply", "_apply", "apply", "apply"]


def test_a_given_memo_goes_by_its_own_equality():
    """A module counts as seen if the caller's set takes one that it holds for equal to it."""

    def scenario(impl):
        class Alike(impl.Module):
            def __eq__(self, other):
                return isinstance(other, Alike)

            def __hash__(self):
                return 1

        module = empty(impl)
        module.a, module.b = Alike(), Alike()
        memo = {Alike()}
        return [name for name, _ in module.named_modules(memo)], len(memo)

    assert same(scenario)[0] == "returned"
