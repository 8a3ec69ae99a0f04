import copy
import io
import pickle

import pytest
import torch
from torch.utils.hooks import RemovableHandle

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import parent_and_child
from tests.parity.hooks.tools import MODULE_REGISTRARS, do_nothing, inner_tensor, leaf, noting


TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def hooked(impl: Implementation) -> torch.nn.Module:
    """Make a layer with one picklable hook of each kind that works beside the others."""
    module = impl.own.Linear(1, 1)
    module.register_forward_pre_hook(do_nothing, with_kwargs=True)
    module.register_forward_hook(do_nothing, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(do_nothing)
    module.register_full_backward_hook(do_nothing)
    module.register_state_dict_pre_hook(do_nothing)
    module._register_state_dict_hook(do_nothing_private)
    module.register_load_state_dict_pre_hook(do_nothing)
    module.register_load_state_dict_post_hook(do_nothing)
    return module


def do_nothing_private(*_arguments: object) -> None:
    """Be a state-dict hook that no test registers publicly."""


def pickled(module: torch.nn.Module) -> torch.nn.Module:
    """Send the module through pickle."""
    return pickle.loads(pickle.dumps(module))


def saved(module: torch.nn.Module) -> torch.nn.Module:
    """Send the module through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


ROUTES = pytest.mark.parametrize("route", [copy.deepcopy, pickled, saved])


@ROUTES
def test_copies_keep_hooks_ids_and_flags(impl: Implementation, route) -> None:
    """deepcopy, pickle and torch.save carry every hook table with its ids (rule 5)."""
    module = hooked(impl)
    copied = route(module)

    for name in TABLES:
        assert type(getattr(copied, name)) is type(getattr(module, name))
        assert list(getattr(copied, name)) == list(getattr(module, name))
        assert getattr(copied, name) is not getattr(module, name)
    assert copied._is_full_backward_hook is True
    assert all(len(getattr(copied, name)) == 1 for name in TABLES)


@ROUTES
def test_hooks_of_a_copy_run(impl: Implementation, route) -> None:
    """A copy calls its hooks: those that count are module-level functions here (rule 5)."""
    COUNTS.clear()
    module = impl.own.Identity()
    module.register_forward_hook(count_forward)
    module.register_full_backward_hook(count_backward)
    copied = route(module)
    copied(leaf()).sum().backward()

    assert COUNTS == ["forward", "backward"]


COUNTS: list[str] = []


def count_forward(*_arguments: object) -> None:
    """Note a forward."""
    COUNTS.append("forward")


def count_backward(*_arguments: object) -> None:
    """Note a backward."""
    COUNTS.append("backward")


def test_handle_does_not_reach_the_copies(impl: Implementation) -> None:
    """Removing a hook from the original leaves it in its copies (rule 5)."""
    module = impl.own.Identity()
    handle = module.register_forward_hook(do_nothing)
    copied = copy.deepcopy(module)
    handle.remove()

    assert len(module._forward_hooks) == 0
    assert list(copied._forward_hooks) == [handle.id]


def test_hook_added_to_a_copy_is_not_on_the_original(impl: Implementation) -> None:
    """The tables of a deep copy are its own (rule 5)."""
    module = impl.own.Identity()
    copied = copy.deepcopy(module)
    copied.register_forward_hook(do_nothing)

    assert len(module._forward_hooks) == 0


def test_bound_method_hooks_follow_the_copied_module(impl: Implementation) -> None:
    """A method of the module itself becomes a method of the copy in the copy's table (rule 5)."""

    class Counts(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_forward_hook(self.count)

        def count(self, module, args, output) -> None:
            self.calls += 1

        def forward(self, x):
            return x

    original = Counts()
    copied = copy.deepcopy(original)
    copied(0)
    copied(0)
    original(0)

    assert (original.calls, copied.calls) == (1, 2)


@pytest.mark.parametrize("route", [copy.deepcopy, pickled])
def test_load_pre_hook_of_a_copy_gets_the_copy(impl: Implementation, route) -> None:
    """The weakly held module of a load pre-hook is the copy in the copy (rule 5)."""
    SEEN.clear()
    module = impl.own.Identity()
    module.register_load_state_dict_pre_hook(see_module)
    copied = route(module)
    copied.load_state_dict({})

    assert len(SEEN) == 1
    assert SEEN[0] is copied


SEEN: list[object] = []


def see_module(module: torch.nn.Module, *_arguments: object) -> None:
    """Note the module that a load pre-hook is called with."""
    SEEN.append(module)


def test_shallow_copy_shares_the_hook_tables(impl: Implementation) -> None:
    """`copy.copy` copies the instance's dict: both have the same tables (rule 5)."""
    module = hooked(impl)
    copied = copy.copy(module)

    for name in TABLES:
        assert getattr(copied, name) is getattr(module, name)


@for_each("registrar", MODULE_REGISTRARS)
def test_module_with_a_local_hook_cannot_be_pickled(registrar: str) -> None:
    """A hook that is a local function stops pickle, with pickle's own error (rule 5)."""

    def scenario(impl: Implementation) -> bytes:
        module = impl.own.Identity()
        getattr(module, registrar)(noting([], "ran"))
        return pickle.dumps(module)

    kind, _, text = same(scenario)

    assert kind == "raised"
    assert "noting.<locals>.hook" in text


def test_handle_of_a_pickled_pair_removes_the_copys_hook(impl: Implementation) -> None:
    """A handle pickled along with its module belongs to the copy (rule 1)."""
    module = impl.own.Identity()
    handle = module.register_forward_hook(do_nothing)
    copied, copied_handle = pickle.loads(pickle.dumps((module, handle)))
    copied_handle.remove()

    assert len(copied._forward_hooks) == 0
    assert list(module._forward_hooks) == [handle.id]


def test_ids_after_a_copy_go_on_counting(impl: Implementation) -> None:
    """A hook registered on a copy gets a new id beside the copied one (rules 1 and 5)."""
    module = impl.own.Identity()
    first = module.register_forward_hook(do_nothing)
    copied = pickled(module)
    second = copied.register_forward_hook(do_nothing)

    assert second.id == first.id + 1 == RemovableHandle.next_id - 1
    assert list(copied._forward_hooks) == [first.id, second.id]


def test_copy_of_a_hooked_network_behaves_alike() -> None:
    """Outputs, gradients and hook calls of a deep copy equal on both implementations."""

    def scenario(impl: Implementation) -> object:
        log: list[object] = []
        network = impl.own.Sequential(impl.own.Linear(2, 2), impl.own.Tanh())
        network[0].register_forward_hook(lambda _, args, out: out * 2)
        network[0].register_full_backward_hook(lambda _, gi, go: (gi[0] + 1,))
        network.register_forward_pre_hook(noting(log, "pre"))
        copied = copy.deepcopy(network)
        x = leaf(1.0, 2.0)
        copied(x).sum().backward()
        return copied, x.grad, [p.grad for p in copied.parameters()], log

    assert same(scenario)[0] == "returned"


def test_replicas_for_data_parallel_keep_the_hooks(impl: Implementation) -> None:
    """`_replicate_for_data_parallel` shares the original's hook tables."""
    log: list[str] = []
    module = impl.own.Identity()
    module.register_forward_hook(noting(log, "ran"))
    replica = module._replicate_for_data_parallel()
    replica(inner_tensor())

    assert log == ["ran"]
    assert replica._forward_hooks is module._forward_hooks


def test_hooks_survive_conversion_and_modes(impl: Implementation) -> None:
    """to, train, eval, requires_grad_, zero_grad and loading leave all hooks in place."""
    module = parent_and_child(impl)
    handle = module.c.register_forward_hook(do_nothing)
    module.double().eval().train().requires_grad_(requires_grad=False).zero_grad()
    module.load_state_dict(module.state_dict(), assign=True)
    module.to_empty(device="cpu")

    assert list(module.c._forward_hooks) == [handle.id]
