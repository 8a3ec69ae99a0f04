import copy
import io
import pickle

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import child_leaf, leaf, tree
from tests.parity.module.contents import contents
from tests.parity.module.picklable import NETS, hook


def net(impl: Implementation, depth: int = 1) -> torch.nn.Module:
    """Build the net that can be pickled."""
    return NETS[impl.name](depth)


def saved_and_loaded(module: torch.nn.Module) -> torch.nn.Module:
    """Send a module through ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": saved_and_loaded,
    **{
        f"pickle {protocol}": lambda m, protocol=protocol: pickle.loads(
            pickle.dumps(m, protocol=protocol)
        )
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    },
}


@for_each("way", COPIES)
def test_a_copy_is_complete(impl: Implementation, way: str) -> None:
    """A copy has all members, modes and plain values, ties and sharing included."""
    module = net(impl, 2)
    module.child.eval()
    copied = COPIES[way](module)

    assert type(copied) is type(module)
    assert list(vars(copied)) == list(vars(module))
    assert freeze(copied) == freeze(module)
    assert copied.tied is copied.weight
    assert copied.again is copied.child
    assert [m.training for m in copied.modules()] == [m.training for m in module.modules()]
    assert copied.config == {"width": 2, "names": ["a"]}
    assert copied._non_persistent_buffers_set == {"loose"}
    assert [type(v) for v in vars(copied).values()] == [type(v) for v in vars(module).values()]


@for_each("way", COPIES)
def test_a_copy_is_independent(impl: Implementation, way: str) -> None:
    """No tensor, table or plain value is shared with the original."""
    module = net(impl)
    copied = COPIES[way](module)
    with torch.no_grad():
        copied.weight.fill_(9)
    copied.mean.fill_(9)
    copied.config["names"].append("b")
    copied.register_forward_hook(hook)
    copied.extra = torch.nn.Parameter(torch.ones(1))

    assert module.weight.tolist() == [1.0, 2.0]
    assert module.mean.tolist() == [0.0, 0.0]
    assert module.config["names"] == ["a"]
    assert len(module._forward_hooks) == 0
    assert not hasattr(module, "extra")


@for_each("way", COPIES)
def test_hooks_are_copied(impl: Implementation, way: str) -> None:
    """Hooks keep their ids, options and order; a bound method follows the copied module."""
    module = net(impl)
    handles = [
        module.register_forward_hook(module.count, with_kwargs=True, always_call=True),
        module.register_forward_pre_hook(hook, with_kwargs=True),
        module.register_full_backward_hook(hook),
        module.register_full_backward_pre_hook(hook),
        module.register_state_dict_pre_hook(hook),
        module.register_load_state_dict_pre_hook(hook),
        module.register_load_state_dict_post_hook(hook),
    ]
    copied = COPIES[way](module)
    copied(torch.ones(2))
    tables = [key for key in vars(module) if "hooks" in key]

    assert copied.calls == 1
    assert not hasattr(module, "calls")
    assert [list(vars(copied)[key]) for key in tables] == [
        list(vars(module)[key]) for key in tables
    ]
    assert copied._is_full_backward_hook is True
    for handle in handles:
        handle.remove()
    assert len(copied._forward_hooks) == 1


def test_a_load_hook_is_bound_to_the_copy(impl: Implementation) -> None:
    """The module that a load hook is called with is the copy, and lives as long as that."""
    seen = []
    module = leaf(impl)
    module.register_load_state_dict_pre_hook(lambda m, *_: seen.append(m))
    copied = copy.deepcopy(module)
    del module
    copied.load_state_dict(copied.state_dict())

    assert seen == [copied]


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_local_hook_cannot_be_pickled(way):
    """A lambda as hook makes pickling fail as in torch."""

    def scenario(impl):
        module = net(impl)
        module.register_forward_hook(lambda *_: None)
        return pickle.dumps(module) if way == "pickle" else saved_and_loaded(module)

    assert same(scenario)[0] == "raised"


def test_a_shallow_copy_shares_the_tables(impl: Implementation) -> None:
    """``copy.copy`` makes a new instance over the same registries."""
    module = tree(impl)
    copied = copy.copy(module)
    copied.late = torch.nn.Parameter(torch.ones(1))
    copied.label = "copy"

    assert copied is not module
    assert all(vars(copied)[key] is vars(module)[key] for key in ("_parameters", "_modules"))
    assert module.late is copied.late
    assert module.label == "tree"
    assert list(vars(copied)) == list(vars(module))


def test_getstate_leaves_out_the_compiled_call(impl: Implementation) -> None:
    """The state is a copy of the instance dict without ``_compiled_call_impl``."""
    module = leaf(impl)
    module._compiled_call_impl = lambda *args: args
    state = module.__getstate__()

    assert state is not vars(module)
    assert state == {k: v for k, v in vars(module).items() if k != "_compiled_call_impl"}
    assert "_compiled_call_impl" in vars(module)
    assert copy.deepcopy(module)._compiled_call_impl is None
    assert copy.copy(module)._compiled_call_impl is None


def filled_in_by_torch() -> tuple[str, ...]:
    """Return the attributes that torch adds to an empty state."""
    revived = torch.nn.Module.__new__(torch.nn.Module)
    revived.__setstate__({})
    return tuple(vars(revived))


ADDED_LATER = filled_in_by_torch()


@for_each("missing", [*((name,) for name in ADDED_LATER), ADDED_LATER, ()])
def test_states_of_older_releases(missing):
    """Tables that did not exist when a state was written are filled in, as in torch."""

    def scenario(impl):
        module = tree(impl).right
        state = {key: value for key, value in vars(module).items() if key not in missing}
        revived = type(module).__new__(type(module))
        returned = revived.__setstate__(state)
        kinds = [(key, type(value).__name__, value) for key, value in vars(revived).items()]
        revived.register_forward_pre_hook(hook).remove()
        output = revived(torch.ones(3))
        return returned, kinds, output, revived.state_dict(), state is vars(revived)

    assert same(scenario)[0] == "returned"


@for_each("missing", ["_parameters", "_buffers", "_modules", "training", "_forward_hooks"])
def test_states_that_lack_more(missing):
    """Attributes that torch does not fill in are missing in the unpickled module as well."""

    def scenario(impl):
        module = leaf(impl)
        state = {key: value for key, value in vars(module).items() if key != missing}
        revived = type(module).__new__(type(module))
        revived.__setstate__(state)
        return list(vars(revived)), hasattr(revived, "weight")

    assert same(scenario)[0] == "returned"


def test_setstate_updates_an_existing_module(impl: Implementation) -> None:
    """``__setstate__`` adds to what the instance holds."""
    module, other = leaf(impl), leaf(impl)
    module.own = 1
    other.flag = 5
    module.__setstate__(other.__getstate__())

    assert (module.own, module.flag) == (1, 5)
    assert module.weight is other.weight


def test_setstate_of_bad_states():
    """A state that is not a mapping of names fails as in torch."""

    def scenario(impl):
        found = []
        for state in (None, 3, "text", [("a", 1)], {1: 2}, {}):
            module = leaf(impl)
            try:
                module.__setstate__(state)
                found.append(hasattr(module, "a"))
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        return found

    assert same(scenario)[0] == "returned"


def test_overrides_of_the_pickle_protocol(impl: Implementation) -> None:
    """``__getstate__`` and ``__setstate__`` of a subclass may drop and restore attributes."""

    class Net(impl.Module):
        def __init__(self):
            super().__init__()
            self.cache = object()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def __getstate__(self):
            state = super().__getstate__()
            state.pop("cache")
            return state

        def __setstate__(self, state):
            super().__setstate__(state)
            self.cache = "restored"

    copied = copy.deepcopy(Net())

    assert copied.cache == "restored"
    assert torch.equal(copied.weight, torch.ones(1))


def test_an_override_of_deepcopy(impl: Implementation) -> None:
    """A child's ``__deepcopy__`` is called with the memo."""

    class Shared(impl.Module):
        def __deepcopy__(self, memo):
            return self

    module = impl.Module()
    module.shared = Shared()

    assert copy.deepcopy(module).shared is module.shared


def test_deepcopy_of_parameters(impl: Implementation) -> None:
    """``deepcopy`` keeps ``requires_grad`` and drops gradients, as ``Parameter`` does it."""
    module = child_leaf(impl)
    module.weight.grad = torch.full((1,), 3.0)
    module.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    copied = copy.deepcopy(module)

    assert copied.weight.grad is None
    assert module.weight.grad.tolist() == [3.0]
    assert copied.frozen.requires_grad is False


def test_a_module_that_holds_itself_is_copied(impl: Implementation) -> None:
    """A cycle of modules, and a back reference as plain attribute, survive a copy."""
    module = net(impl)
    module.child.back = module
    vars(module.child)["plain"] = module
    copied = copy.deepcopy(module)

    assert copied.child.back is copied
    assert vars(copied.child)["plain"] is copied


def test_replicate_for_data_parallel(impl: Implementation) -> None:
    """A replica shares children and buffers by reference in tables of its own, without parameters."""
    module = tree(impl).right
    module.child = child_leaf(impl)
    before = contents(module)
    replica = module._replicate_for_data_parallel()

    assert type(replica) is type(module)
    assert replica._is_replica is True
    assert replica._parameters == {}
    assert replica._buffers == module._buffers
    assert replica._buffers is not module._buffers
    assert replica._modules is not module._modules
    assert replica.child is module.child
    assert replica.flag == 3
    assert contents(module) == before


def test_a_replica_takes_tensors_as_parameters(impl: Implementation) -> None:
    """On a replica a plain tensor may stand under a parameter's name, as data parallel does."""
    replica = child_leaf(impl)._replicate_for_data_parallel()
    tensor = torch.ones(1) * 2
    replica.weight = tensor

    assert replica.weight is tensor
    assert list(replica.parameters()) == []


def test_compile_sets_the_compiled_call(impl: Implementation, monkeypatch) -> None:
    """``compile`` passes ``_call_impl`` and its arguments to ``torch.compile``, in place."""
    seen = []

    def fake_compile(function, *args, **keywords):
        seen.append((function.__func__ is type(module)._call_impl, args, keywords))
        return lambda *values: ("compiled", values)

    monkeypatch.setattr(torch, "compile", fake_compile)
    module = leaf(impl)
    returned = module.compile("mode", backend="eager")

    assert returned is None
    assert seen == [(True, ("mode",), {"backend": "eager"})]
    assert module(1) == ("compiled", (1,))
    assert "_compiled_call_impl" in vars(module)
