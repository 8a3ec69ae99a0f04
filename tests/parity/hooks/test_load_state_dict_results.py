import pytest
import torch
from torch.nn.modules.module import _IncompatibleKeys

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import network, parent_and_child
from tests.parity.hooks.tools import noting, returning


def test_post_hook_gets_the_module_and_the_two_lists(impl: Implementation) -> None:
    """A post-hook is called with (module, incompatible_keys), torch's named tuple (rule 38)."""
    calls: list[tuple[object, ...]] = []
    module = parent_and_child(impl)
    module.c.register_load_state_dict_post_hook(lambda *received: calls.append(received))
    module.load_state_dict({"v": torch.zeros(1), "c.x": torch.zeros(1)}, strict=False)

    assert len(calls) == 1
    assert calls[0][0] is module.c
    assert type(calls[0][1]) is _IncompatibleKeys
    assert calls[0][1] == (["c.w", "c.b"], ["c.x"])


def test_post_hooks_of_all_modules_see_the_same_lists(impl: Implementation) -> None:
    """The lists are shared: each post-hook sees what is known so far of all modules (rule 38)."""
    seen: list[tuple[list[str], list[str]]] = []
    module = impl.own.Sequential(parent_and_child(impl), parent_and_child(impl))
    lists: list[object] = []
    for target in (module[0], module[1], module):
        target.register_load_state_dict_post_hook(
            lambda _, keys: seen.append((list(keys.missing_keys), list(keys.unexpected_keys)))
        )
        target.register_load_state_dict_post_hook(lambda _, keys: lists.append(keys.missing_keys))
    state = module.state_dict()
    for key in ("0.v", "1.v"):
        del state[key]
    state["0.x"] = torch.zeros(1)
    result = module.load_state_dict(state, strict=False)

    assert seen == [
        (["0.v"], ["0.x"]),
        (["0.v", "1.v"], ["0.x"]),
        (["0.v", "1.v"], ["0.x"]),
    ]
    assert all(entry is result.missing_keys for entry in lists)


def test_post_hook_may_clear_the_lists(impl: Implementation) -> None:
    """With both lists empty nothing is raised, strict or not (rule 38)."""
    module = parent_and_child(impl)

    def forgive(_module, keys: _IncompatibleKeys) -> None:
        keys.missing_keys.clear()
        keys.unexpected_keys.clear()

    module.register_load_state_dict_post_hook(forgive)

    assert module.load_state_dict({"other": torch.zeros(1)}) == ([], [])


@pytest.mark.parametrize("field", ["missing_keys", "unexpected_keys"])
def test_keys_that_a_post_hook_adds_raise_if_strict(field: str) -> None:
    """Post-hooks run before the strict check: their additions count (rule 38)."""

    def scenario(impl: Implementation, *, strict: bool) -> object:
        module = parent_and_child(impl)
        module.c.register_load_state_dict_post_hook(
            lambda _, keys: getattr(keys, field).append("added")
        )
        return module.load_state_dict(module.state_dict(), strict=strict)

    kind, error, text = same(lambda impl: scenario(impl, strict=True))

    assert (kind, error) == ("raised", "RuntimeError")
    assert '"added"' in text
    assert same(lambda impl: scenario(impl, strict=False))[0] == "returned"


@for_each("value", [0, False, (), "text"], ids=repr)
def test_post_hook_must_return_none(value: object) -> None:
    """Any value from a load post-hook is an AssertionError (rule 38)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        module.register_load_state_dict_post_hook(returning(value))
        return module.load_state_dict(module.state_dict())

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "AssertionError")
    assert "register_load_state_dict_post_hook" in text


def test_post_hooks_run_although_an_error_will_be_raised(impl: Implementation) -> None:
    """A shape that does not fit raises only after all post-hooks ran (rule 38)."""
    log: list[str] = []
    module = parent_and_child(impl)
    module.register_load_state_dict_post_hook(noting(log, "parent"))
    module.c.register_load_state_dict_post_hook(noting(log, "child"))
    state = {**module.state_dict(), "c.w": torch.zeros(5)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict(state)

    assert log == ["child", "parent"]


def test_missing_keys_come_before_unexpected_ones_in_the_error() -> None:
    """The strict error has the Missing line, the Unexpected line, then the others (rule 39)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        return module.load_state_dict(
            {"c.w": torch.zeros(5), "x": torch.zeros(1), "c.y": torch.zeros(1)}
        )

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert [line.strip() for line in text.splitlines()[:3]] == [
        "Error(s) in loading state_dict for Parent:",
        'Missing key(s) in state_dict: "v", "c.b".',
        'Unexpected key(s) in state_dict: "x", "c.y".',
    ]
    assert text.splitlines()[3].startswith("\tsize mismatch for c.w: ")


@pytest.mark.parametrize("strict", [False, True])
def test_errors_other_than_keys_raise_in_both_modes(strict: bool) -> None:
    """strict=False forgives keys only: a wrong shape or type still raises (rule 39)."""

    def scenario(impl: Implementation) -> object:
        module = parent_and_child(impl)
        return module.load_state_dict(
            {"v": "text", "c.w": torch.zeros(3), "c.b": torch.zeros(1)}, strict=strict
        )

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert text.count("\n\t") == 2


def test_result_names_missing_and_unexpected_keys(impl: Implementation) -> None:
    """strict=False returns both lists as torch's named tuple (rule 39)."""
    module = parent_and_child(impl)
    result = module.load_state_dict({"v": torch.zeros(1), "x": torch.zeros(1)}, strict=False)

    assert type(result) is _IncompatibleKeys
    assert result == (["c.w", "c.b"], ["x"])
    assert repr(result) == ("_IncompatibleKeys(missing_keys=['c.w', 'c.b'], unexpected_keys=['x'])")


@pytest.mark.parametrize("strict", [False, True])
def test_full_match_says_so(impl: Implementation, strict: bool) -> None:
    """Without missing and unexpected keys the result's text is one sentence (rule 39)."""
    module = parent_and_child(impl)
    result = module.load_state_dict(module.state_dict(), strict=strict)

    assert type(result) is _IncompatibleKeys
    assert repr(result) == str(result) == "<All keys matched successfully>"


def different_state(impl: Implementation) -> dict[str, torch.Tensor]:
    """Make a complete state for a network, with other values than a new network has."""
    return {name: torch.full_like(t, 3) for name, t in network(impl).state_dict().items()}


def test_post_hook_modifies_the_keys_in_place(impl: Implementation) -> None:
    """Changes of the lists by a post hook are visible in the result."""
    model = network(impl)

    def hook(_module: object, keys) -> None:
        keys.missing_keys.append("invented")
        keys.unexpected_keys.clear()

    model.block.register_load_state_dict_post_hook(hook)
    result = model.load_state_dict(
        {**different_state(impl), "block.extra": torch.ones(1)}, strict=False
    )

    assert result == (["invented"], [])
