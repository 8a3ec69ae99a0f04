import collections
import collections.abc

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import parent_and_child
from tests.parity.hooks.tools import PARENTS_BEFORE_CHILDREN_AFTER, capturing, noting, returning


KEYS = ["v", "c.w", "c.b"]


@for_each("value", [None, 5, "text", [("v", 1)], set()], ids=repr)
def test_what_is_no_mapping_cannot_be_loaded(value: object) -> None:
    """Anything but a Mapping is a TypeError that names its type (rule 34)."""
    kind, error, text = same(lambda impl: parent_and_child(impl).load_state_dict(value))

    assert (kind, error) == ("raised", "TypeError")
    assert text == f"Expected state_dict to be dict-like, got {type(value)}."


def test_any_mapping_can_be_loaded(impl: Implementation) -> None:
    """A Mapping that is not a dict is loaded like one (rule 34)."""

    class Lookup(collections.abc.Mapping):
        def __getitem__(self, key):
            return torch.full((2,) if key == "c.w" else (1,), 3.0)

        def __iter__(self):
            return iter(KEYS)

        def __len__(self):
            return len(KEYS)

    module = parent_and_child(impl)

    assert repr(module.load_state_dict(Lookup())) == "<All keys matched successfully>"
    assert module.c.w.tolist() == [3.0, 3.0]


def test_callers_mapping_is_not_the_one_that_hooks_edit(impl: Implementation) -> None:
    """The input is copied: what hooks remove and add stays inside the load (rule 34)."""
    types: list[type] = []
    module = parent_and_child(impl)
    state = module.state_dict()
    kept = dict(state)

    def edit(_module, state_dict, *_: object) -> None:
        types.append(type(state_dict))
        state_dict.pop("v")
        state_dict["other"] = torch.ones(1)

    module.register_load_state_dict_pre_hook(edit)
    result = module.load_state_dict(state, strict=False)

    assert result.missing_keys == ["v"]
    assert result.unexpected_keys == ["other"]
    assert list(state) == list(kept)
    assert types == [collections.OrderedDict]


def test_hooks_see_the_metadata_of_the_saved_state(impl: Implementation) -> None:
    """local_metadata is what was saved for this module's prefix, else empty (rules 34 and 35)."""
    seen: list[object] = []
    module = parent_and_child(impl)
    state = module.state_dict()
    state._metadata["c"]["version"] = 3
    state._metadata["c"]["note"] = "kept"
    for target in (module, module.c):
        target.register_load_state_dict_pre_hook(
            lambda _, state_dict, prefix, metadata, *__: seen.append((prefix, dict(metadata)))
        )
    module.load_state_dict(state)
    module.load_state_dict(dict(state))

    assert seen == [
        ("", {"version": 1}),
        ("c.", {"version": 3, "note": "kept"}),
        ("", {}),
        ("c.", {}),
    ]


@pytest.mark.parametrize("assign", [False, True])
def test_assign_is_announced_in_the_metadata(impl: Implementation, assign: bool) -> None:
    """With assign=True every module's local_metadata says so; else the key is absent (rule 35)."""
    seen: list[object] = []
    module = parent_and_child(impl)
    for target in (module, module.c):
        target.register_load_state_dict_pre_hook(
            lambda _, state_dict, prefix, metadata, *__: seen.append(
                metadata.get("assign_to_params_buffers")
            )
        )
    module.load_state_dict(module.state_dict(), assign=assign)

    assert seen == [True if assign else None] * 2


def test_order_is_parent_pre_child_pre_child_post_parent_post(impl: Implementation) -> None:
    """Load pre-hooks run parent first, post-hooks children first, in table order (rule 35)."""
    log: list[str] = []
    module = parent_and_child(impl)
    for name, target in {"parent": module, "child": module.c}.items():
        target.register_load_state_dict_pre_hook(noting(log, f"{name} pre 1"))
        target._register_load_state_dict_pre_hook(noting(log, f"{name} pre 2"))
        target.register_load_state_dict_post_hook(noting(log, f"{name} post 1"))
        target.register_load_state_dict_post_hook(noting(log, f"{name} post 2"))
    module.load_state_dict(module.state_dict())

    assert log == PARENTS_BEFORE_CHILDREN_AFTER


def test_each_module_is_loaded_by_its_own_method_with_seven_positionals(
    impl: Implementation,
) -> None:
    """`_load_from_state_dict` gets dict, prefix, metadata, strict and three lists (rule 35)."""
    calls: list[tuple[object, ...]] = []

    class Child(impl.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.zeros(1))

        def _load_from_state_dict(self, *args, **kwargs):
            calls.append((args, kwargs))
            super()._load_from_state_dict(*args, **kwargs)

    module = impl.Module()
    module.c = Child()
    result = module.load_state_dict(module.state_dict())
    (arguments, keywords) = calls[0]

    assert keywords == {}
    assert (list(arguments[0]), *arguments[1:]) == (
        ["c.b"],
        "c.",
        {"version": 1},
        True,
        [],
        [],
        [],
    )
    assert arguments[4] is result.missing_keys
    assert arguments[5] is result.unexpected_keys


def test_child_gets_exactly_its_own_keys_with_full_names(impl: Implementation) -> None:
    """A child's mapping holds the keys under its prefix, full names, in order (rule 35)."""
    seen: dict[str, list[str]] = {}
    module = impl.Module()
    for name in ("a", "ab", "b"):
        module.add_module(name, parent_and_child(impl))
    for name, target in module.named_modules():
        target.register_load_state_dict_pre_hook(
            lambda _, state_dict, prefix, *__, name=name: seen.update({name: list(state_dict)})
        )
    keys = [f"{name}.{key}" for key in KEYS for name in ("b", "a", "ab")]
    state = module.state_dict()
    module.load_state_dict({key: state[key] for key in keys})

    assert seen[""] == keys
    for name in ("a", "ab", "b", "a.c", "ab.c", "b.c"):
        assert seen[name] == [key for key in keys if key.startswith(f"{name}.")]


def test_pre_hook_gets_the_module_and_all_containers(impl: Implementation) -> None:
    """A public pre-hook has eight arguments, the private one seven (rule 36)."""
    calls: list[tuple[object, ...]] = []
    module = parent_and_child(impl)
    module.register_load_state_dict_pre_hook(lambda *received: calls.append(received))
    module._register_load_state_dict_pre_hook(lambda *received: calls.append(received))
    module._register_load_state_dict_pre_hook(
        lambda *received: calls.append(received), with_module=True
    )
    module.load_state_dict(module.state_dict())

    assert [len(call) for call in calls] == [8, 7, 8]
    assert calls[0][0] is module
    assert calls[2][0] is module
    assert calls[0][1:] == calls[1] == calls[2][1:]
    assert (list(calls[1][0]), *calls[1][1:]) == (KEYS, "", {"version": 1}, True, [], [], [])


def test_value_of_a_pre_hook_is_ignored(impl: Implementation) -> None:
    """The return value of a load pre-hook is ignored (rule 36)."""
    module = parent_and_child(impl)
    module.register_load_state_dict_pre_hook(returning({"other": 1}))

    assert module.load_state_dict(module.state_dict()).unexpected_keys == []


def test_pre_hooks_belong_to_the_modules_own_load_method(impl: Implementation) -> None:
    """An override of `_load_from_state_dict` without super() skips the pre-hooks (rule 36)."""
    log: list[str] = []

    class Skips(impl.Module):
        def _load_from_state_dict(self, *args):
            log.append("own load")

    module = Skips()
    module.register_load_state_dict_pre_hook(noting(log, "pre"))
    module.register_load_state_dict_post_hook(noting(log, "post"))
    module.load_state_dict({})

    assert log == ["own load", "post"]


def test_pre_hook_runs_before_the_members_are_looked_up(impl: Implementation) -> None:
    """A parameter that a pre-hook registers is loaded in the same pass (rule 36)."""
    module = impl.Module()
    module.register_load_state_dict_pre_hook(
        lambda module, *_: module.register_buffer("late", torch.zeros(1))
    )
    module.load_state_dict({"late": torch.ones(1)})

    assert module.late.item() == 1.0


def test_edits_to_the_state_dict_reach_the_module_and_its_descendants(
    impl: Implementation,
) -> None:
    """Children load the entries that a parent's pre-hook puts into the mapping (rule 36)."""
    module = parent_and_child(impl)

    def rename(_module, state_dict, prefix, *_: object) -> None:
        state_dict[f"{prefix}c.w"] = state_dict.pop(f"{prefix}c.old")
        state_dict[f"{prefix}v"] = torch.full((1,), 9.0)

    module.register_load_state_dict_pre_hook(rename)
    module.load_state_dict(
        {"v": torch.zeros(1), "c.old": torch.full((2,), 5.0), "c.b": torch.zeros(1)}
    )

    assert module.v.item() == 9.0
    assert module.c.w.tolist() == [5.0, 5.0]


def test_edits_of_a_child_reach_neither_siblings_nor_parents(impl: Implementation) -> None:
    """Changes by a child's pre-hook stay in its own mapping (rule 36)."""
    seen: list[list[str]] = []
    module = impl.own.Sequential(parent_and_child(impl), parent_and_child(impl))

    def edit(_module, state_dict, *_: object) -> None:
        state_dict["1.v"] = torch.full((1,), 9.0)
        state_dict["new"] = torch.zeros(1)
        del state_dict["0.v"]

    module[0].register_load_state_dict_pre_hook(edit)
    module.register_load_state_dict_pre_hook(lambda _, state_dict, *__: seen.append(state_dict))
    result = module.load_state_dict(module.state_dict(), strict=False)

    assert module[1].v.item() == 0.0
    assert "0.v" in seen[0]
    assert "new" not in seen[0]
    assert (result.missing_keys, result.unexpected_keys) == (["0.v"], [])


def test_edits_of_the_metadata_reach_the_modules_own_load(impl: Implementation) -> None:
    """A pre-hook may change the version that its module's load goes by (rule 36)."""
    versions: list[object] = []

    class Versioned(impl.Module):
        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
            versions.append(local_metadata["version"])

    module = Versioned()
    module.register_load_state_dict_pre_hook(
        lambda _, state_dict, prefix, metadata, *__: metadata.update(version=99)
    )
    module.load_state_dict(module.state_dict())

    assert versions == [99]


@pytest.mark.parametrize("position", [5, 6], ids=["missing_keys", "unexpected_keys"])
def test_keys_that_a_pre_hook_adds_are_reported(impl: Implementation, position: int) -> None:
    """A pre-hook may write into the lists of missing and unexpected keys (rule 36)."""
    module = parent_and_child(impl)
    module.c.register_load_state_dict_pre_hook(lambda *args: args[position].append("added"))
    result = module.load_state_dict(module.state_dict(), strict=False)

    assert list(result)[position - 5] == ["added"]
    assert list(result)[6 - position] == []

    with pytest.raises(RuntimeError, match="added"):
        module.load_state_dict(module.state_dict())


@pytest.mark.parametrize("strict", [False, True])
def test_messages_that_a_pre_hook_adds_raise(strict: bool) -> None:
    """An entry in error_msgs raises even with strict=False, with its text (rule 36)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        module.c.register_load_state_dict_pre_hook(lambda *args: args[7].append("custom text"))
        return module.load_state_dict(module.state_dict(), strict=strict)

    assert same(scenario) == (
        "raised",
        "RuntimeError",
        "Error(s) in loading state_dict for Parent:\n\tcustom text",
    )


@for_each(
    ("key", "reported"),
    [
        ("other", True),
        ("v.deeper", True),
        ("other.deeper", True),
        ("c", True),
        ("c.other", True),
        ("c.w.deeper", True),
        ("cc.w", True),
        (".v", True),
        ("", True),
        ("c.", True),
        ("c..w", True),
        ("none", True),
        ("volatile", True),
        ("none.deeper", True),
    ],
)
def test_which_keys_are_unexpected(key: str, reported: bool) -> None:
    """A key is unexpected if no local name or child takes its next component (rule 37)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        module.register_parameter("none", None)
        module.register_buffer("volatile", torch.zeros(1), persistent=False)
        state = module.state_dict()
        state[key] = torch.zeros(1)
        return module.load_state_dict(state, strict=False).unexpected_keys

    assert same(scenario) == same(lambda impl: [key] if reported else [])


def test_parent_leaves_the_keys_of_a_child_to_the_child(impl: Implementation) -> None:
    """A child's pre-hook can repair keys before they are reported (rule 37)."""
    module = parent_and_child(impl)

    def repair(_module, state_dict, prefix, *_: object) -> None:
        state_dict[f"{prefix}w"] = state_dict.pop(f"{prefix}old")

    module.c.register_load_state_dict_pre_hook(repair)
    state = module.state_dict()
    state["c.old"] = state.pop("c.w") + 4

    assert repr(module.load_state_dict(state)) == "<All keys matched successfully>"
    assert module.c.w.tolist() == [4.0, 4.0]


def test_unexpected_keys_are_listed_module_by_module(impl: Implementation) -> None:
    """The root's come first, then each child's, in the mapping's order (rule 37)."""
    module = parent_and_child(impl)
    state = {"c.y": 0, "z": 0, "c.x": 0, "a": 0, **module.state_dict()}

    assert module.load_state_dict(state, strict=False).unexpected_keys == ["z", "a", "c.y", "c.x"]


def test_hooks_of_a_shared_child_run_once_per_path(impl: Implementation) -> None:
    """A module in two places is loaded, with its hooks, in both (rule 35)."""
    seen: list[tuple[object, ...]] = []
    child = parent_and_child(impl)
    module = impl.own.Sequential(child, child)
    child.register_load_state_dict_pre_hook(capturing(seen))
    module.load_state_dict(module.state_dict())

    assert [prefix for _, prefix, *_ in seen] == ["0.", "1."]
