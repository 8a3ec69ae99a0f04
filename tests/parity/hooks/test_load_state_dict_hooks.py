import collections
from typing import Any

import pytest
import torch
from torch.nn.modules.module import _IncompatibleKeys

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import parent_and_child
from tests.parity.hooks.tools import (
    noting,
    recording,
    returning,
)


KEYS = ["v", "c.w", "c.b"]


# --- what modules and pre-hooks are given -----------------------------------------------------------


def test_hooks_edit_a_copy_of_the_callers_mapping(impl: Implementation) -> None:
    """Any Mapping is copied to an OrderedDict: edits stay inside the load (rule 10)."""
    types: list[type] = []
    module = parent_and_child(impl)
    state = collections.ChainMap(module.state_dict())

    def edit(_module, state_dict, *_: object) -> None:
        types.append(type(state_dict))
        state_dict.pop("v")
        state_dict["other"] = torch.ones(1)

    module.register_load_state_dict_pre_hook(edit)
    result = module.load_state_dict(state, strict=False)

    assert result == (["v"], ["other"])
    assert list(state) == KEYS
    assert types == [collections.OrderedDict]


def test_order_is_parent_pre_child_pre_child_post_parent_post(impl: Implementation) -> None:
    """Load pre-hooks run parent first, post-hooks children first, in table order (rule 11)."""
    log: list[str] = []
    module = parent_and_child(impl)
    for name, target in {"parent": module, "child": module.c}.items():
        target.register_load_state_dict_pre_hook(noting(log, f"{name} pre 1"))
        target._register_load_state_dict_pre_hook(noting(log, f"{name} pre 2"))
        target.register_load_state_dict_post_hook(noting(log, f"{name} post 1"))
        target.register_load_state_dict_post_hook(noting(log, f"{name} post 2"))
    module.load_state_dict(module.state_dict())

    assert log == [
        *("parent pre 1", "parent pre 2", "child pre 1", "child pre 2"),
        *("child post 1", "child post 2", "parent post 1", "parent post 2"),
    ]


def test_a_pre_hook_gets_the_module_and_all_containers(impl: Implementation) -> None:
    """A public pre-hook has eight arguments, the private one seven (rule 12)."""
    calls: list[tuple[Any, ...]] = []
    module = parent_and_child(impl)
    module.register_load_state_dict_pre_hook(recording(calls))
    module._register_load_state_dict_pre_hook(recording(calls))
    module._register_load_state_dict_pre_hook(recording(calls), with_module=True)
    module.register_load_state_dict_pre_hook(returning({"other": 1}))
    module.load_state_dict(module.state_dict())

    assert [len(call) for call in calls] == [8, 7, 8]
    assert calls[0][0] is calls[2][0] is module
    assert calls[0][1:] == calls[1] == calls[2][1:]
    assert (list(calls[1][0]), *calls[1][1:]) == (KEYS, "", {"version": 1}, True, [], [], [])


# --- what pre-hooks change --------------------------------------------------------------------------


def test_a_pre_hook_changes_what_is_loaded(impl: Implementation) -> None:
    """Members, entries and versions, of the module and of all below it (rule 12)."""
    versions: list[object] = []

    class Versioned(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = parent_and_child(impl).c

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
            versions.append(local_metadata["version"])

    def change(module, state_dict, prefix, metadata, *_: object) -> None:
        module.register_buffer("late", torch.zeros(1))
        state_dict[f"{prefix}c.w"] = state_dict.pop(f"{prefix}c.old")
        metadata["version"] = 99

    module = Versioned()
    module.register_load_state_dict_pre_hook(change)
    module.load_state_dict(
        {"c.old": torch.full((2,), 5.0), "c.b": torch.zeros(1), "late": torch.ones(1)}
    )

    assert versions == [99]
    assert module.c.w.tolist() == [5.0, 5.0]
    assert module.late.item() == 1.0


def test_a_dict_that_a_hook_keeps_and_fills_anew_later(impl: Implementation) -> None:
    """Names that change are found, also if there are as many as before and the last is the same."""
    module = impl.own.Sequential(*(impl.own.Linear(1, 1, bias=False) for _ in range(4)))
    held: list[dict[str, object]] = []

    def fill(*_: object) -> None:
        for name in list(held[0]):
            held[0][name.replace("old", "2")] = held[0].pop(name)

    module.register_load_state_dict_pre_hook(lambda _, state_dict, *__: held.append(state_dict))
    module[1].register_load_state_dict_pre_hook(fill)
    names = ["0.weight", "1.weight", "old.weight", "3.weight"]
    result = module.load_state_dict(dict.fromkeys(names, torch.ones(1, 1)), strict=False)

    assert result.missing_keys == []


@for_each("position", [5, 6, 7], ids=["missing_keys", "unexpected_keys", "error_msgs"])
@for_each("strict", [False, True])
def test_what_a_pre_hook_adds_to_the_lists(strict: bool, position: int) -> None:
    """Keys are reported, or raise if strict; entries of error_msgs always raise (rule 12)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        module.c.register_load_state_dict_pre_hook(lambda *args: args[position].append("added"))
        return list(module.load_state_dict(module.state_dict(), strict=strict))

    outcome = same(scenario)
    added = [["added"] if index == position else [] for index in (5, 6)]
    if position == 7:
        text = "Error(s) in loading state_dict for Parent:\n\tadded"
        assert outcome == ("raised", "RuntimeError", text)
    elif strict:
        assert outcome[:2] == ("raised", "RuntimeError")
        assert '"added"' in outcome[2]
    else:
        assert outcome == same(lambda impl: added)


# --- keys that do not match -------------------------------------------------------------------------


@for_each("strict", [False, True])
@for_each("change", ["clear", "missing_keys", "unexpected_keys"])
def test_what_a_post_hook_does_to_the_lists(change: str, strict: bool) -> None:
    """It runs before the strict check: what it clears or adds counts (rule 14)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        state = module.state_dict()

        def edit(_module, keys: _IncompatibleKeys) -> None:
            if change == "clear":
                keys.missing_keys.clear()
                keys.unexpected_keys.clear()
            else:
                getattr(keys, change).append("added")

        module.c.register_load_state_dict_post_hook(edit)
        if change == "clear":
            state = {"other": torch.zeros(1)}
        return list(module.load_state_dict(state, strict=strict))

    outcome = same(scenario)
    if strict and change != "clear":
        assert outcome[:2] == ("raised", "RuntimeError")
        assert '"added"' in outcome[2]
    else:
        expected = [["added"] * (change == name) for name in _IncompatibleKeys._fields]
        assert outcome == same(lambda impl: expected)


@for_each("value", [0, False, (), "text"], ids=repr)
def test_post_hook_must_return_none(value: object) -> None:
    """Any value from a load post-hook is an AssertionError (rule 14)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        module.register_load_state_dict_post_hook(returning(value))
        with pytest.raises(AssertionError) as raised:
            module.load_state_dict(module.state_dict())
        # Torch 2.8 lacks two spaces.
        return str(raised.value).replace(" ", "")

    kind, text = same(scenario)

    assert kind == "returned"
    assert "register_load_state_dict_post_hook``arenotexpected" in str(text)


@for_each("strict", [False, True])
@for_each("hooked", [False, True])
def test_the_error_has_missing_keys_unexpected_keys_and_the_others(
    hooked: bool, strict: bool
) -> None:
    """With strict=False the others alone; they raise after all post-hooks (rules 14 and 15)."""
    log: list[str] = []

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        if hooked:
            module.register_load_state_dict_post_hook(noting(log, "post"))
        state = {"c.w": torch.zeros(5), "x": torch.zeros(1), "c.y": torch.zeros(1)}
        return module.load_state_dict(state, strict=strict)

    kind, error, text = same(scenario)
    lines = [
        *(
            "Error(s) in loading state_dict for Parent:",
            'Missing key(s) in state_dict: "v", "c.b".',
        ),
        'Unexpected key(s) in state_dict: "x", "c.y".',
    ]

    assert (kind, error) == ("raised", "RuntimeError")
    assert [line.strip() for line in text.splitlines()[:-1]] == (lines if strict else lines[:1])
    assert text.splitlines()[-1].startswith("\tsize mismatch for c.w: ")
    assert log == ["post"] * 2 * hooked
