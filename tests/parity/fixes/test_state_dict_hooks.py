import copy
import pickle

import pytest
import torch

from tests.helpers import TORCH, Implementation
from tests.parity.hooks.tools import noting, returning
from tests.processes import python


MUST_RETURN_NONE = "state_dict post-hook must return None"


class Owner:
    """An object with a method that can be a hook."""

    def __init__(self, value: object = None) -> None:
        self.value = value
        self.prefixes: list[str] = []

    def hook(self, module, state_dict, prefix, local_metadata) -> object:
        """Note the prefix, and return the value."""
        self.prefixes.append(prefix)
        return self.value


def answer(*_arguments: object) -> dict[str, int]:
    """Be a hook that can be pickled, and return what only a private one may."""
    return {"replaced": 1}


def answer_publicly(*_arguments: object) -> dict[str, int]:
    """Return that entry from a second function: torch remembers how a function was registered."""
    return {"replaced": 1}


def test_bound_method_may_be_a_public_hook(impl: Implementation) -> None:
    """A method of any object can be registered, and removed again."""
    owner = Owner()
    module = impl.own.Sequential(impl.own.Identity())
    handle = module[0].register_state_dict_post_hook(owner.hook)
    module.state_dict()
    handle.remove()
    module.state_dict()

    assert owner.prefixes == ["0."]
    assert not module[0]._state_dict_hooks


def test_bound_method_that_is_a_public_hook_must_return_none(impl: Implementation) -> None:
    """The rule for public hooks holds for methods too."""
    module = impl.own.Identity()
    module.register_state_dict_post_hook(Owner({}).hook)

    with pytest.raises(RuntimeError, match=MUST_RETURN_NONE):
        module.state_dict()


def test_method_of_the_module_itself_follows_a_copy(impl: Implementation) -> None:
    """A public hook that is a method of its module is a method of the copy in the copy."""

    class Counts(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_state_dict_post_hook(self.count)

        def count(self, module, state_dict, prefix, local_metadata) -> None:
            self.calls += 1

    module = Counts()
    copied = copy.deepcopy(module)
    copied.state_dict()

    assert (module.calls, copied.calls) == (0, 1)


def test_public_registration_leaves_the_callable_as_it_was(impl: Implementation) -> None:
    """A registered function has no new attribute, neither before nor after it is removed."""
    hook = noting([], "ran")
    handle = impl.own.Identity().register_state_dict_post_hook(hook)
    during = dict(vars(hook))
    handle.remove()

    assert during == {}
    assert vars(hook) == {}


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("where", ["same module", "other module", "module of torch"])
def test_public_hook_may_be_registered_privately_too(
    impl: Implementation, removed: bool, where: str
) -> None:
    """A flag of one registration of a function does not apply to another registration."""
    hook = returning({"replaced": 1})
    module = impl.own.Identity()
    handle = module.register_state_dict_post_hook(hook)
    if removed:
        handle.remove()
    others = {"same module": module, "other module": impl.own.Identity()}
    other = others.get(where, TORCH.nn.Identity())
    other._register_state_dict_hook(hook)

    if removed or other is not module:
        assert other.state_dict() == {"replaced": 1}
    if not removed:
        with pytest.raises(RuntimeError, match=MUST_RETURN_NONE):
            module.state_dict()


ROUTES = pytest.mark.parametrize(
    "route",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["copy", "pickle"],
)


@ROUTES
def test_copies_know_which_bound_methods_are_public(impl: Implementation, route) -> None:
    """A copy refuses the value of a public hook, and takes that of a private one."""
    public, private = impl.own.Identity(), impl.own.Identity()
    public.register_state_dict_post_hook(Owner({"replaced": 1}).hook)
    private._register_state_dict_hook(Owner({"replaced": 1}).hook)

    assert route(private).state_dict() == {"replaced": 1}
    with pytest.raises(RuntimeError, match=MUST_RETURN_NONE):
        route(public).state_dict()


ANOTHER_PROCESS = """
import pickle, sys
import tests.helpers

public, private = pickle.loads(sys.stdin.buffer.read())
print(private.state_dict())
try:
    print(public.state_dict())
except RuntimeError as error:
    print(error)
"""


def test_another_process_knows_which_hooks_are_public(impl: Implementation) -> None:
    """The kind of a hook is part of what is pickled."""
    public, private = impl.own.Identity(), impl.own.Identity()
    private._register_state_dict_hook(answer)
    public.register_state_dict_post_hook(answer_publicly)
    result = python(ANOTHER_PROCESS, stdin=pickle.dumps((public, private)))

    assert result.stdout.splitlines() == ["{'replaced': 1}", MUST_RETURN_NONE]


def test_tables_hold_the_callables_under_the_ids_of_their_handles(impl: Implementation) -> None:
    """Other libraries look at the values of the table, and handles at its keys."""
    first, second = returning(None), returning(None)
    module = impl.own.Identity()
    private = module._register_state_dict_hook(first)
    public = module.register_state_dict_post_hook(second)

    assert dict(module._state_dict_hooks) == {private.id: first, public.id: second}
    assert public.id == private.id + 1
    assert f"{public.id}" == f"{private.id + 1}"


def test_hooks_registered_through_torch_are_public(impl: Implementation) -> None:
    """A hook registered by torch's own function must return None here too."""
    module = impl.own.Identity()
    torch.nn.Module.register_state_dict_post_hook(module, returning({}))

    with pytest.raises(RuntimeError, match=MUST_RETURN_NONE):
        module.state_dict()


def test_hooks_below_a_module_of_torch_are_public(impl: Implementation) -> None:
    """A plain torch parent does not get around the rule for the hooks of its children."""
    parent = torch.nn.Sequential(impl.own.Identity())
    parent[0].register_state_dict_post_hook(returning({}))

    with pytest.raises(RuntimeError, match=MUST_RETURN_NONE):
        parent.state_dict()
