import collections
import copy
import io

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import tensors
from tests.parity.averaging.rules import RULES, training_states
from tests.parity.averaging_page.nets import averaged_of, build, every_subject


# --- state_dict ------------------------------------------------------------------------------------


@every_subject
def test_the_state_is_the_count_and_the_state_of_the_copy(
    impl: Implementation, subject: str
) -> None:
    """Keys are n_averaged and the persistent members of the model behind `module.`."""
    model, averaged = averaged_of(impl, subject)
    state = averaged.state_dict()

    assert isinstance(state, collections.OrderedDict)
    assert list(state) == ["n_averaged", *(f"module.{key}" for key in model.state_dict())]
    assert state["n_averaged"] == 2
    assert all("scratch" not in key and "unset" not in key for key in state)


@every_subject
def test_the_state_is_bitwise_identical(subject: str) -> None:
    """Keys, values and metadata are torch's."""

    def scenario(impl: Implementation) -> object:
        state = averaged_of(impl, subject)[1].state_dict()
        return dict(state), state._metadata

    assert same(scenario)[0] == "returned"


@every_subject
def test_the_state_is_a_shallow_copy(impl: Implementation, subject: str) -> None:
    """It refers to the tensors of the average: an update shows in it, and a write to it there."""
    model, averaged = averaged_of(impl, subject)
    state = averaged.state_dict()
    list(training_states(model, 1))
    averaged.update_parameters(model)
    followed = freeze(dict(state)) == freeze(dict(averaged.state_dict()))
    for tensor in state.values():
        tensor.zero_()

    assert followed
    assert all(not t.any() for t in averaged.parameters())
    assert averaged.n_averaged == 0


@every_subject
def test_prefix_destination_and_keep_vars(impl: Implementation, subject: str) -> None:
    """The prefix precedes all keys, the destination is returned, keep_vars keeps the Parameters."""
    _, averaged = averaged_of(impl, subject)
    given = {"before": 1}
    detached = averaged.state_dict(destination=given, prefix="swa.")
    kept = averaged.state_dict(keep_vars=True)

    assert detached is given
    assert list(detached) == ["before", *(f"swa.{key}" for key in averaged.state_dict())]
    assert all(not value.requires_grad for key, value in detached.items() if key != "before")
    for name, parameter in averaged.named_parameters():
        assert kept[name] is parameter


@every_subject
def test_positional_arguments_are_deprecated(subject: str) -> None:
    """destination, prefix and keep_vars by position work with torch's FutureWarning."""

    def scenario(impl: Implementation) -> object:
        averaged = averaged_of(impl, subject)[1]
        with pytest.warns(FutureWarning) as caught:
            state = averaged.state_dict({}, "x.", True)
        return [str(warning.message) for warning in caught], dict(state)

    assert same(scenario)[0] == "returned"


# --- load_state_dict -------------------------------------------------------------------------------


@every_subject
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("rule", ["default", "avg_fn ema", "multi_avg_fn swa"])
def test_an_average_goes_on_where_it_was_saved(
    impl: Implementation, subject: str, assign: bool, rule: str
) -> None:
    """A new average that loads the file, by copy or assignment, continues bitwise identically."""
    model, averaged = averaged_of(impl, subject, 3, **RULES[rule](impl))
    file = io.BytesIO()
    torch.save(averaged.state_dict(), file)
    file.seek(0)
    resumed = impl.AveragedModel(build(impl, subject), **RULES[rule](impl))
    keys = resumed.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    for _ in training_states(model, 3):
        averaged.update_parameters(model)
        resumed.update_parameters(model)

    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert resumed.n_averaged == 6
    assert freeze(resumed) == freeze(averaged)


@pytest.mark.filterwarnings("ignore:.*loaded none of the")
@every_subject
@pytest.mark.parametrize("change", ["missing", "unexpected", "without prefix", "shape"])
@pytest.mark.parametrize("strict", [True, False])
def test_keys_must_match_exactly_if_strict(subject: str, change: str, strict: bool) -> None:
    """Otherwise the result or the error, which names them, is torch's."""

    def scenario(impl: Implementation) -> object:
        model, averaged = averaged_of(impl, subject)
        state = dict(averaged.state_dict())
        if change == "missing":
            del state["n_averaged"]
        elif change == "unexpected":
            state["decay"] = torch.ones(1)
        elif change == "without prefix":
            state = dict(model.state_dict())
        else:
            name = next(name for name, _ in averaged.named_parameters())
            state[name] = torch.ones(7, 7)
        return tuple(averaged.load_state_dict(state, strict=strict))

    assert same(scenario)[0] == ("raised" if strict or change == "shape" else "returned")


@every_subject
def test_assign_preserves_the_properties_of_the_state(impl: Implementation, subject: str) -> None:
    """assign=True takes dtypes from the state; assign=False keeps those of the average."""
    _, averaged = averaged_of(impl, subject)
    state = copy.deepcopy(averaged).double().state_dict()
    other = copy.deepcopy(averaged)
    averaged.load_state_dict(state)
    other.load_state_dict(state, assign=True)

    assert {p.dtype for p in averaged.parameters()} == {torch.float32}
    assert {p.dtype for p in other.parameters()} == {torch.float64}
    assert other.n_averaged is not averaged.n_averaged
    assert other.n_averaged == 2


@every_subject
@pytest.mark.parametrize("flag", [True, False])
def test_requires_grad_is_that_of_the_module(
    impl: Implementation, subject: str, flag: bool
) -> None:
    """Also with assign=True, requires_grad is preserved from the average."""
    _, averaged = averaged_of(impl, subject)
    state = copy.deepcopy(averaged).requires_grad_(not flag).state_dict(keep_vars=True)
    averaged.requires_grad_(flag).load_state_dict(state, assign=True)

    assert {p.requires_grad for p in averaged.parameters()} == {flag}


@pytest.mark.parametrize("swap", [False, True])
def test_an_optimizer_is_created_after_assigning(impl: Implementation, swap: bool) -> None:
    """After assign=True an earlier optimizer misses the parameters, unless they were swapped."""
    _, averaged = averaged_of(impl, "layer")
    optimizer = torch.optim.SGD(averaged.parameters(), lr=0.1)
    state = copy.deepcopy(averaged).state_dict()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        averaged.load_state_dict(state, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    known = {id(p) for p in optimizer.param_groups[0]["params"]}

    assert all((id(p) in known) is swap for p in averaged.parameters())


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_key_of_a_member_that_is_none(kind: str) -> None:
    """The note: a RuntimeError follows if a member is None and its key is in the state."""

    def scenario(impl: Implementation) -> object:
        _, averaged = averaged_of(impl, "layer")
        getattr(averaged, f"register_{kind}")("unset", None)
        state = {**averaged.state_dict(), "unset": torch.ones(1)}
        return averaged.load_state_dict(state)

    assert same(scenario)[:2] == ("raised", "RuntimeError")


@every_subject
def test_a_refused_state_leaves_the_average_usable(impl: Implementation, subject: str) -> None:
    """After an error for an unexpected key, updates go on."""
    model, averaged = averaged_of(impl, subject)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        averaged.load_state_dict({**averaged.state_dict(), "decay": torch.ones(1)})
    averaged.update_parameters(model)

    assert averaged.n_averaged == 3


# --- extra state -----------------------------------------------------------------------------------


def with_extra_state(impl: Implementation, model, **arguments):
    """Return an average of a subclass that saves its decay."""

    class Decaying(impl.AveragedModel):
        decay = 0.5

        def get_extra_state(self):
            return {"decay": self.decay}

        def set_extra_state(self, state):
            self.decay = state["decay"]

    return Decaying(model, **arguments)


@every_subject
def test_extra_state_is_saved_and_loaded(impl: Implementation, subject: str) -> None:
    """A subclass may save more with its state: what get_extra_state returns comes back."""
    model = build(impl, subject)
    averaged, other = (with_extra_state(impl, model) for _ in range(2))
    averaged.decay = 0.25
    averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(averaged.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))

    assert averaged.state_dict()["_extra_state"] == {"decay": 0.25}
    assert other.decay == 0.25
    assert other.n_averaged == 1


def test_extra_state_of_the_model_is_part_of_the_state(impl: Implementation) -> None:
    """The copy saves the extra state that the model had when it was copied."""

    class Versioned(impl.nn.Module):
        version = 1

        def get_extra_state(self):
            return self.version

        def set_extra_state(self, state):
            self.version = state

    model = Versioned()
    model.weight = impl.nn.Parameter(torch.ones(1))
    model.version = 7
    averaged = impl.AveragedModel(model)
    state = averaged.state_dict()
    averaged.load_state_dict({**state, "module._extra_state": 8})

    assert state["module._extra_state"] == 7
    assert averaged.module.version == 8
    assert model.version == 7


@pytest.mark.parametrize("method", ["get_extra_state", "set_extra_state"])
def test_extra_state_is_for_subclasses(method: str) -> None:
    """AveragedModel itself does not implement the methods: torch's RuntimeError."""

    def scenario(impl: Implementation) -> object:
        averaged = averaged_of(impl, "layer")[1]
        return getattr(averaged, method)(*([{}] if method.startswith("set") else []))

    assert same(scenario)[:2] == ("raised", "RuntimeError")


# --- hooks of saving and loading -------------------------------------------------------------------


@every_subject
def test_hooks_of_state_dict(impl: Implementation, subject: str) -> None:
    """The pre-hook gets (module, prefix, keep_vars), the post-hook (module, state, prefix, metadata)."""
    _, averaged = averaged_of(impl, subject)
    calls = []

    def before(module, prefix, keep_vars):
        calls.append((module, prefix, keep_vars))
        module.n_averaged.fill_(9)

    def after(module, state_dict, prefix, local_metadata):
        calls.append((module, prefix, type(local_metadata)))
        state_dict[f"{prefix}decay"] = torch.tensor(0.5)

    averaged.register_state_dict_pre_hook(before)
    averaged.register_state_dict_post_hook(after)
    state = averaged.state_dict(prefix="swa.")

    assert calls == [(averaged, "swa.", False), (averaged, "swa.", dict)]
    assert state["swa.n_averaged"] == 9
    assert state["swa.decay"] == 0.5


@every_subject
def test_pre_hook_of_load_state_dict(impl: Implementation, subject: str) -> None:
    """It gets the documented arguments before loading, and may change the state: renames a key."""
    _, averaged = averaged_of(impl, subject)
    calls = []

    def rename(
        module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, errors
    ):
        calls.append((module, prefix, strict, missing_keys, unexpected_keys, errors))
        state_dict["n_averaged"] = state_dict.pop("num_averaged")

    averaged.register_load_state_dict_pre_hook(rename)
    state = dict(averaged.state_dict())
    state["num_averaged"] = state.pop("n_averaged") + 5
    averaged.load_state_dict(state)

    assert calls == [(averaged, "", True, [], [], [])]
    assert averaged.n_averaged == 7


@every_subject
def test_post_hook_of_load_state_dict(impl: Implementation, subject: str) -> None:
    """It gets the module and the incompatible keys; clearing them avoids the error."""
    _, averaged = averaged_of(impl, subject)
    calls = []

    def allow(module, incompatible_keys):
        calls.append((module, *map(list, incompatible_keys)))
        incompatible_keys.missing_keys.clear()
        incompatible_keys.unexpected_keys.clear()

    averaged.register_load_state_dict_post_hook(allow)
    state = dict(averaged.state_dict())
    state["decay"] = state.pop("n_averaged")
    averaged.load_state_dict(state)

    assert calls == [(averaged, ["n_averaged"], ["decay"])]
    assert averaged.n_averaged == 2


@every_subject
def test_added_keys_are_errors_if_strict(subject: str) -> None:
    """Keys that a post-hook adds make a strict load fail with torch's error."""

    def scenario(impl: Implementation) -> object:
        _, averaged = averaged_of(impl, subject)
        averaged.register_load_state_dict_post_hook(
            lambda module, keys: keys.missing_keys.append("decay")
        )
        return averaged.load_state_dict(averaged.state_dict())

    assert same(scenario)[:2] == ("raised", "RuntimeError")


HOOKS = {
    "register_state_dict_pre_hook": lambda averaged: averaged.state_dict(),
    "register_state_dict_post_hook": lambda averaged: averaged.state_dict(),
    "register_load_state_dict_pre_hook": lambda a: a.load_state_dict(a.state_dict()),
    "register_load_state_dict_post_hook": lambda a: a.load_state_dict(a.state_dict()),
}


@for_each("registrar", HOOKS)
def test_handles_remove_the_hooks(impl: Implementation, registrar: str) -> None:
    """Each registration returns a handle, and `handle.remove()` removes the hook."""
    _, averaged = averaged_of(impl, "user")
    calls = []

    def hook(*arguments):
        calls.append(arguments[0])

    handle = getattr(averaged, registrar)(hook)
    HOOKS[registrar](averaged)
    handle.remove()
    HOOKS[registrar](averaged)

    assert calls == [averaged]


@for_each("registrar", HOOKS)
def test_hooks_of_the_model_are_copied(impl: Implementation, registrar: str) -> None:
    """Hooks that the model has when it is averaged run on the copy, with the copy as module."""
    model = build(impl, "sequential")
    calls = []

    def hook(*arguments):
        calls.append(arguments[0])

    getattr(model, registrar)(hook)
    averaged = impl.AveragedModel(model)
    HOOKS[registrar](averaged)

    assert calls == [averaged.module]
    assert len(list(tensors(averaged))) == len(list(tensors(model))) + 1
