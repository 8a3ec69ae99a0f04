import collections
from typing import Any

import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import parent_and_child
from tests.parity.hooks.tools import (
    PARENTS_BEFORE_CHILDREN_AFTER,
    capturing,
    noting,
    recording,
    returning,
)


KEYS = ["v", "c.w", "c.b"]


def test_what_hooks_are_given(impl: Implementation) -> None:
    """Pre-hooks (module, prefix, keep_vars), post-hooks the state and its metadata (rule 7)."""
    before: list[Any] = []
    after: list[Any] = []
    module = parent_and_child(impl)
    for target in (module, module.c):
        target.register_state_dict_pre_hook(recording(before))
    module.c.register_state_dict_post_hook(recording(after))
    module.state_dict()
    state = module.state_dict(prefix="p.", keep_vars=True)

    assert before == [
        *((module, "", False), (module.c, "c.", False)),
        *((module, "p.", True), (module.c, "p.c.", True)),
    ]
    owner, given, *rest = after[1]
    assert owner is module.c
    assert given is state
    assert rest == ["p.c.", {"version": 1}]
    assert state._metadata["p.c"] is rest[1]


def test_order_is_parent_pre_child_pre_child_post_parent_post(impl: Implementation) -> None:
    """In table order, which private and public post-hooks share (rule 7)."""
    log: list[str] = []
    module = parent_and_child(impl)
    for name, target in {"parent": module, "child": module.c}.items():
        target.register_state_dict_pre_hook(noting(log, f"{name} pre 1"))
        target.register_state_dict_pre_hook(noting(log, f"{name} pre 2"))
        target._register_state_dict_hook(noting(log, f"{name} post 1"))
        target.register_state_dict_post_hook(noting(log, f"{name} post 2"))
    module.state_dict()

    assert log == PARENTS_BEFORE_CHILDREN_AFTER


def test_a_pre_hook_changes_the_module_that_is_saved(impl: Implementation) -> None:
    """It runs before the members are read, and what it returns is ignored (rule 7)."""
    module = parent_and_child(impl)
    module.register_state_dict_pre_hook(lambda module, *_: module.v.data.fill_(7.0))
    module.c.register_state_dict_pre_hook(lambda module, *_: module.register_buffer("n", module.b))
    module.c.register_state_dict_pre_hook(returning({"other": 1}))
    state = module.state_dict()

    assert list(state) == [*KEYS, "c.n"]
    assert state["v"].item() == 7.0


def test_hooks_with_a_destination_without_metadata(impl: Implementation) -> None:
    """A plain dict is given no metadata, and hooks get that of the module (rule 7)."""
    seen: list[tuple[object, ...]] = []
    destination: dict[str, object] = {"already": "there"}
    module = parent_and_child(impl)
    module.register_state_dict_post_hook(capturing(seen))
    result = module.state_dict(destination=destination)

    assert result is destination
    assert list(destination) == ["already", *KEYS]
    assert not hasattr(destination, "_metadata")
    assert seen[0][2] == {"version": 1}


@for_each("value", [0, {}, "text", collections.OrderedDict()], ids=repr)
@for_each("target", ["", "c"])
def test_public_post_hook_must_return_none(value: object, target: str) -> None:
    """Any value from a public post-hook is an error, on the root and below (rule 8)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        module.get_submodule(target).register_state_dict_post_hook(returning(value))
        return module.state_dict()

    assert same(scenario) == ("raised", "RuntimeError", "state_dict post-hook must return None")


def test_post_hooks_edit_the_state_dict_in_place(impl: Implementation) -> None:
    """The dict is the whole one, with all keys that have been written so far (rule 8)."""
    keys: list[list[str]] = []
    module = parent_and_child(impl)
    module.d = impl.own.Identity()
    module.d.register_buffer("b", torch.zeros(1))

    def edit(_module, state_dict, prefix, _metadata) -> None:
        keys.append(list(state_dict))
        state_dict[f"{prefix}renamed"] = state_dict.pop(f"{prefix}w")

    module.c.register_state_dict_post_hook(edit)
    module.register_state_dict_post_hook(lambda _, state, *__: state.__delitem__("d.b"))

    assert list(module.state_dict()) == ["v", "c.b", "c.renamed"]
    assert keys == [KEYS]


def test_a_private_hook_may_replace_the_state_dict_of_the_root(impl: Implementation) -> None:
    """The next hook gets the replacement; that of a child is dropped (rule 8)."""
    seen: list[tuple[Any, ...]] = []
    module = parent_and_child(impl)
    module.c._register_state_dict_hook(returning({"replaced": 1}))

    assert list(module.state_dict()) == KEYS
    assert module.c.state_dict() == {"replaced": 1}

    module._register_state_dict_hook(returning({"replaced": 2}))
    module._register_state_dict_hook(returning(None))
    module._register_state_dict_hook(capturing(seen))

    assert module.state_dict() == {"replaced": 2}
    assert seen[0][0] == {"replaced": 2}


@for_each("kind", ["override", "lazy"])
def test_hooks_run_around_a_save_of_the_modules_own(impl: Implementation, kind: str) -> None:
    """Also if `_save_to_state_dict` is overridden, or the layer is lazy (rule 9)."""
    log: list[str] = []

    class SavesItself(impl.Module):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            log.append("save")
            destination[f"{prefix}own"] = torch.ones(1)

    child = SavesItself() if kind == "override" else impl.own.LazyLinear(3)
    child.register_state_dict_pre_hook(noting(log, "pre"))
    child.register_state_dict_post_hook(noting(log, "post"))
    state = impl.own.Sequential(child).state_dict()

    assert log == (["pre", "save", "post"] if kind == "override" else ["pre", "post"])
    assert list(state) == (["0.own"] if kind == "override" else ["0.weight", "0.bias"])


def test_a_child_that_overrides_state_dict_is_asked_by_keyword(impl: Implementation) -> None:
    """With destination, prefix and keep_vars; its hooks run once, around its own members (rule 7)."""
    received: list[Any] = []
    log: list[str] = []

    class Child(impl.Module):
        def state_dict(self, *args, **kwargs):
            received.append((args, sorted(kwargs), kwargs["prefix"], kwargs["keep_vars"]))
            return super().state_dict(*args, **kwargs)

    module = impl.own.Sequential(Child())
    module[0].register_state_dict_pre_hook(noting(log, "pre"))
    module[0].register_state_dict_post_hook(noting(log, "post"))
    module.state_dict(keep_vars=True)

    assert received == [((), ["destination", "keep_vars", "prefix"], "0.", True)]
    assert log == ["pre", "post"]
