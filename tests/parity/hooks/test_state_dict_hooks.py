import collections

import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import parent_and_child
from tests.parity.hooks.tools import PARENTS_BEFORE_CHILDREN_AFTER, capturing, noting, returning


def test_pre_hook_gets_the_module_the_prefix_and_keep_vars(impl: Implementation) -> None:
    """A state_dict pre-hook is called with (module, prefix, keep_vars) (rule 31)."""
    calls: list[object] = []
    module = parent_and_child(impl)
    module.register_state_dict_pre_hook(lambda *received: calls.append(received))
    module.c.register_state_dict_pre_hook(lambda *received: calls.append(received))
    module.state_dict()
    module.state_dict(prefix="p.", keep_vars=True)

    assert calls == [
        (module, "", False),
        (module.c, "c.", False),
        (module, "p.", True),
        (module.c, "p.c.", True),
    ]


def test_value_of_a_pre_hook_is_ignored(impl: Implementation) -> None:
    """The return value of a state_dict pre-hook is ignored (rule 31)."""
    module = parent_and_child(impl)
    module.register_state_dict_pre_hook(returning({"other": 1}))

    assert list(module.state_dict()) == ["v", "c.w", "c.b"]


def test_pre_hook_may_change_what_is_saved(impl: Implementation) -> None:
    """The pre-hook runs before the module's members are read (rule 31)."""
    module = parent_and_child(impl)
    module.register_state_dict_pre_hook(lambda module, *_: module.v.data.fill_(7.0))

    assert module.state_dict()["v"].item() == 7.0


def test_post_hook_gets_state_dict_prefix_and_metadata(impl: Implementation) -> None:
    """A post-hook is called with (module, state_dict, prefix, local_metadata) (rule 31)."""
    calls: list[object] = []
    module = parent_and_child(impl)
    module.c.register_state_dict_post_hook(lambda *received: calls.append(received))
    state = module.state_dict(prefix="p.")

    assert len(calls) == 1
    assert calls[0][0] is module.c
    assert calls[0][1] is state
    assert calls[0][2:] == ("p.c.", {"version": 1})
    assert state._metadata["p.c"] is calls[0][3]


def test_order_is_parent_pre_child_pre_child_post_parent_post(impl: Implementation) -> None:
    """Pre-hooks run parent first, post-hooks children first, in table order (rule 31)."""
    log: list[str] = []
    module = parent_and_child(impl)
    for name, target in {"parent": module, "child": module.c}.items():
        target.register_state_dict_pre_hook(noting(log, f"{name} pre 1"))
        target.register_state_dict_pre_hook(noting(log, f"{name} pre 2"))
        target.register_state_dict_post_hook(noting(log, f"{name} post 1"))
        target.register_state_dict_post_hook(noting(log, f"{name} post 2"))
    module.state_dict()

    assert log == PARENTS_BEFORE_CHILDREN_AFTER


def test_private_and_public_post_hooks_share_one_order(impl: Implementation) -> None:
    """Post-hooks of both registrations run in the order in which they came (rule 31)."""
    log: list[str] = []
    module = impl.own.Identity()
    module._register_state_dict_hook(noting(log, "private 1"))
    module.register_state_dict_post_hook(noting(log, "public"))
    module._register_state_dict_hook(noting(log, "private 2"))
    module.state_dict()

    assert log == ["private 1", "public", "private 2"]


def test_metadata_holds_the_version_of_every_module(impl: Implementation) -> None:
    """Each module's `_version` stands under its prefix without the last dot (rule 31)."""

    class Versioned(impl.Module):
        _version = 7

    module = impl.Module()
    module.child = Versioned()
    module.none = None
    module._modules["empty"] = None
    state = module.state_dict()
    prefixed = module.state_dict(prefix="p.")

    assert type(state) is collections.OrderedDict
    assert type(state._metadata) is collections.OrderedDict
    assert dict(state._metadata) == {"": {"version": 1}, "child": {"version": 7}}
    assert dict(prefixed._metadata) == {"p": {"version": 1}, "p.child": {"version": 7}}


def test_destination_without_metadata_gets_none(impl: Implementation) -> None:
    """A plain dict as destination is filled, and given no metadata (rule 31)."""
    seen: list[tuple[object, ...]] = []
    destination: dict[str, object] = {"already": "there"}
    module = parent_and_child(impl)
    module.register_state_dict_post_hook(capturing(seen))
    result = module.state_dict(destination=destination)

    assert result is destination
    assert list(destination) == ["already", "v", "c.w", "c.b"]
    assert not hasattr(destination, "_metadata")
    assert seen[0][2] == {"version": 1}


def test_destination_with_metadata_gets_more(impl: Implementation) -> None:
    """A destination that has `_metadata` keeps what is there (rule 31)."""
    destination = parent_and_child(impl).state_dict(prefix="a.")
    parent_and_child(impl).state_dict(destination=destination, prefix="b.")

    assert list(destination) == ["a.v", "a.c.w", "a.c.b", "b.v", "b.c.w", "b.c.b"]
    assert list(destination._metadata) == ["a", "a.c", "b", "b.c"]


def test_members_are_saved_in_order_and_none_is_skipped(impl: Implementation) -> None:
    """Parameters, persistent buffers, extra state, then the children in order (rule 31)."""

    class Everything(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = impl.own.Identity()
            self.child.register_buffer("inner", torch.zeros(1))
            self.register_buffer("kept", torch.ones(1))
            self.register_buffer("dropped", torch.ones(1), persistent=False)
            self.register_buffer("empty_buffer", None)
            self.register_parameter("empty", None)
            self.p = impl.own.Parameter(torch.zeros(1))
            self._modules["no_child"] = None

        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    state = Everything().state_dict()

    assert list(state) == ["p", "kept", "_extra_state", "child.inner"]
    assert state["_extra_state"] == {"a": 1}


def test_children_are_asked_by_keyword(impl: Implementation) -> None:
    """A child's own `state_dict` is called with destination, prefix and keep_vars (rule 31)."""
    received: list[object] = []

    class Child(impl.Module):
        def state_dict(self, *args, **kwargs):
            received.append((args, sorted(kwargs), kwargs["prefix"], kwargs["keep_vars"]))
            return super().state_dict(*args, **kwargs)

    module = impl.Module()
    module.child = Child()
    module.state_dict(keep_vars=True)

    assert received == [((), ["destination", "keep_vars", "prefix"], "child.", True)]


@for_each("value", [0, {}, "text", collections.OrderedDict()], ids=repr)
def test_public_post_hook_must_return_none(value: object) -> None:
    """Any value from a public post-hook is an error, on the root and below (rule 32)."""

    def scenario(impl: Implementation, target: str) -> object:
        module = parent_and_child(impl)
        module.get_submodule(target).register_state_dict_post_hook(returning(value))
        return module.state_dict()

    expected = ("raised", "RuntimeError", "state_dict post-hook must return None")

    assert same(lambda impl: scenario(impl, "")) == expected
    assert same(lambda impl: scenario(impl, "c")) == expected


def test_post_hook_edits_the_state_dict_in_place(impl: Implementation) -> None:
    """A post-hook may add, remove and rename keys of the whole dict (rule 32)."""
    module = parent_and_child(impl)

    def edit(_module, state_dict, prefix, _metadata) -> None:
        state_dict[f"{prefix}renamed"] = state_dict.pop(f"{prefix}w")

    def drop(_module, state_dict, *_: object) -> None:
        del state_dict["c.b"]

    module.c.register_state_dict_post_hook(edit)
    module.register_state_dict_post_hook(drop)

    assert list(module.state_dict()) == ["v", "c.renamed"]


def test_post_hook_sees_all_keys_written_so_far(impl: Implementation) -> None:
    """The dict is the whole one: a child's post-hook sees its parent's keys (rule 32)."""
    keys: list[list[str]] = []
    module = parent_and_child(impl)
    module.d = impl.own.Identity()
    module.d.register_buffer("b", torch.zeros(1))
    for target in (module, module.c, module.d):
        target.register_state_dict_post_hook(lambda _, state, *__: keys.append(list(state)))
    module.state_dict()

    assert keys == [["v", "c.w", "c.b"], ["v", "c.w", "c.b", "d.b"], ["v", "c.w", "c.b", "d.b"]]


def test_private_hook_of_the_root_may_replace_the_state_dict(impl: Implementation) -> None:
    """The return value of the root's private hook is the result, and the next hook's input (rule 32)."""
    seen: list[tuple[object, ...]] = []
    module = parent_and_child(impl)
    module._register_state_dict_hook(returning({"replaced": 1}))
    module._register_state_dict_hook(returning(None))
    module._register_state_dict_hook(capturing(seen))

    assert module.state_dict() == {"replaced": 1}
    assert seen[0][0] == {"replaced": 1}


def test_value_of_a_private_hook_below_the_root_is_dropped(impl: Implementation) -> None:
    """A child's private hook can only edit in place: its value is not used (rule 32)."""
    module = parent_and_child(impl)
    module.c._register_state_dict_hook(returning({"replaced": 1}))

    assert list(module.state_dict()) == ["v", "c.w", "c.b"]
    assert module.c.state_dict() == {"replaced": 1}


def test_hooks_run_around_an_overridden_save(impl: Implementation) -> None:
    """Both kinds of hook run even if `_save_to_state_dict` is overridden (rule 33)."""
    log: list[str] = []

    class SavesItself(impl.Module):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            log.append("save")
            destination[f"{prefix}own"] = torch.ones(1)

    module = SavesItself()
    module.register_buffer("b", torch.zeros(1))
    module.register_state_dict_pre_hook(noting(log, "pre"))
    module.register_state_dict_post_hook(noting(log, "post"))

    assert list(module.state_dict()) == ["own"]
    assert log == ["pre", "save", "post"]


def test_hooks_run_around_a_lazy_module(impl: Implementation) -> None:
    """A lazy layer saves its uninitialized parameters itself; hooks run around it (rule 33)."""
    log: list[str] = []
    module = impl.own.LazyLinear(3)
    module.register_state_dict_pre_hook(noting(log, "pre"))
    module.register_state_dict_post_hook(noting(log, "post"))
    state = module.state_dict()

    assert log == ["pre", "post"]
    assert [type(value).__name__ for value in state.values()] == ["UninitializedParameter"] * 2
