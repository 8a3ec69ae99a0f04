import collections
import types

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.parity.module_page.nets import network, scaling


def different_state(impl: Implementation) -> dict[str, torch.Tensor]:
    """Make a complete state for a network, with other values than a new network has."""
    return {name: torch.full_like(t, 3) for name, t in network(impl).state_dict().items()}


def test_state_is_copied_into_the_tree(impl: Implementation) -> None:
    """The values of parameters and buffers are copied into the module and its descendants."""
    model = network(impl)
    members = model.state_dict(keep_vars=True)
    storages = {name: t.data_ptr() for name, t in members.items()}
    state = different_state(impl)
    model.load_state_dict(state)

    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(t is members[name] for name, t in model.state_dict(keep_vars=True).items())
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == storages


def test_loaded_values_are_copies(impl: Implementation) -> None:
    """Later changes of the loaded tensors do not reach the module."""
    model = network(impl)
    state = different_state(impl)
    model.load_state_dict(state)
    state["scale"].zero_()

    assert torch.equal(model.scale, torch.full((3,), 3.0))


def test_loading_is_bitwise_identical() -> None:
    """A state loads bitwise identically on both, with and without `assign`."""

    def scenario(impl: Implementation) -> object:
        copied, assigned = network(impl), network(impl)
        state = {
            name: torch.randn(t.shape, dtype=torch.float64).to(t.dtype)
            for name, t in copied.state_dict().items()
        }
        results = copied.load_state_dict(state), assigned.load_state_dict(state, assign=True)
        return results, copied, assigned

    assert same(scenario)[0] == "returned"


STRICT = pytest.mark.parametrize(
    "options", [{}, {"strict": True}, {"assign": True}], ids=["default", "strict", "assign"]
)


@STRICT
@pytest.mark.parametrize(
    "changes",
    [
        {"scale": None},
        {"block.linear.weight": None, "head.1.bias": None},
        {"extra": torch.ones(1)},
        {"block.extra": torch.ones(1), "other.weight": torch.ones(1)},
        {"head.1.bias": None, "scratch": torch.ones(2)},
    ],
    ids=["missing", "missing in children", "unexpected", "unexpected in children", "both"],
)
def test_keys_must_match_exactly(changes: dict[str, object], options: dict[str, bool]) -> None:
    """Strict, the default, missing and unexpected keys are a RuntimeError that names them."""

    def scenario(impl: Implementation) -> object:
        state = {**different_state(impl), **changes}
        state = {name: value for name, value in state.items() if value is not None}
        return network(impl).load_state_dict(state, **options)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert all(f'"{name}"' in text for name in changes)


def test_other_keys_are_reported_without_strict(impl: Implementation) -> None:
    """With strict=False what matches is loaded, and the result lists the rest as lists of str."""
    model = network(impl)
    old = model.head[1].weight.detach().clone()
    state = different_state(impl)
    del state["head.1.weight"]
    state["head.2.weight"] = torch.ones(1)
    state["extra"] = torch.ones(1)
    result = model.load_state_dict(state, strict=False)

    assert result.missing_keys == ["head.1.weight"]
    assert sorted(result.unexpected_keys) == ["extra", "head.2.weight"]
    assert type(result.missing_keys) is type(result.unexpected_keys) is list
    assert torch.equal(model.head[1].weight, old)
    assert torch.equal(model.scale, torch.full((3,), 3.0))


def test_result_is_a_named_tuple(impl: Implementation) -> None:
    """The result is a named tuple of missing_keys and unexpected_keys."""
    result = network(impl).load_state_dict(different_state(impl))

    assert isinstance(result, tuple)
    assert result._fields == ("missing_keys", "unexpected_keys")
    assert result == ([], [])
    missing, unexpected = result
    assert missing is result.missing_keys
    assert unexpected is result.unexpected_keys


@for_each("kind", [dict, collections.OrderedDict, types.MappingProxyType, collections.UserDict])
def test_state_can_be_any_mapping(impl: Implementation, kind: type) -> None:
    """The state may be any mapping of names to tensors."""
    model = network(impl)
    result = model.load_state_dict(kind(different_state(impl)))

    assert result == ([], [])
    assert torch.equal(model.scale, torch.full((3,), 3.0))


@pytest.mark.parametrize(
    "state", [None, 5, [("factor", torch.ones(1))]], ids=["None", "int", "list"]
)
def test_state_must_be_a_mapping(state: object) -> None:
    """Anything else is a TypeError."""
    assert same(lambda impl: scaling(impl).load_state_dict(state))[:2] == ("raised", "TypeError")


def test_shapes_must_match() -> None:
    """A tensor of another shape is a RuntimeError that names the key, strict or not."""

    def scenario(strict: bool):
        return lambda impl: scaling(impl).load_state_dict({"factor": torch.ones(7)}, strict=strict)

    for strict in (True, False):
        kind, error, text = same(scenario(strict))

        assert (kind, error) == ("raised", "RuntimeError")
        assert "size mismatch for factor" in text


def test_properties_of_the_module_are_kept_by_default(impl: Implementation) -> None:
    """With assign=False, dtype and strides of the module's tensors stay as they are."""
    for options in ({}, {"assign": False}):
        model = impl.nn.Linear(2, 3)
        weight = model.weight
        model.load_state_dict(
            {
                "weight": torch.ones(2, 3, dtype=torch.float64).t(),
                "bias": torch.ones(3, dtype=torch.float16),
            },
            **options,
        )

        assert model.weight is weight
        assert model.weight.dtype == model.bias.dtype == torch.float32
        assert model.weight.is_contiguous()


def test_assign_takes_the_properties_of_the_state(impl: Implementation) -> None:
    """With assign=True, dtype, device, strides and storage are those of the state dict."""
    model = network(impl)
    state = {name: t.double() for name, t in different_state(impl).items()}
    state["block.linear.weight"] = state["block.linear.weight"].t()
    assert model.load_state_dict(state, assign=True) == ([], [])

    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float64
        assert tensor.data_ptr() == state[name].data_ptr()
        assert tensor.stride() == state[name].stride()


def test_assign_fills_a_module_without_storage(impl: Implementation) -> None:
    """With assign=True, a module on the meta device gets the tensors of the state dict."""
    model = network(impl).to("meta")
    model.load_state_dict(different_state(impl), assign=True)

    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
    assert isinstance(model.scale, torch.nn.Parameter)
    assert torch.equal(model.scale, torch.full((3,), 3.0))


@pytest.mark.parametrize("frozen", [False, True])
def test_assign_keeps_requires_grad_of_the_module(impl: Implementation, frozen: bool) -> None:
    """The page has no exception; torch 2.13 keeps the module's requires_grad with assign=True."""
    model = network(impl).requires_grad_(not frozen)
    state = different_state(impl)
    for name, _ in model.named_parameters():
        state[name] = impl.nn.Parameter(state[name], requires_grad=frozen)
    model.load_state_dict(state, assign=True)

    assert {p.requires_grad for p in model.parameters()} == {not frozen}


def test_optimizer_must_be_created_after_assigning(impl: Implementation) -> None:
    """With assign=True the parameters are new: an earlier optimizer does not update them."""
    model = scaling(impl, 1.0)
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    old = model.factor
    model.load_state_dict({"factor": torch.tensor([3.0])}, assign=True)
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1)).sum().backward()

    assert model.factor is not old

    early.step()

    assert model.factor.item() == 3.0

    late.step()

    assert model.factor.item() == 2.0


def test_optimizer_stays_valid_after_copying(impl: Implementation) -> None:
    """With assign=False an optimizer from before the load updates the module."""
    model = scaling(impl, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.load_state_dict({"factor": torch.tensor([3.0])})
    model(torch.ones(1)).sum().backward()
    optimizer.step()

    assert model.factor.item() == 2.0


def test_none_parameter_with_a_key_cannot_be_loaded() -> None:
    """A key for a layer's parameter that is registered as None is a RuntimeError."""

    def scenario(impl: Implementation) -> object:
        return impl.nn.Linear(2, 2, bias=False).load_state_dict(impl.nn.Linear(2, 2).state_dict())

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert 'Unexpected key(s) in state_dict: "bias"' in text


@pytest.mark.parametrize("name", ["shift", "unset"])
def test_none_member_with_a_key_cannot_be_loaded(name: str) -> None:
    """A key for a parameter or buffer of a user class that is None is a RuntimeError."""

    def scenario(impl: Implementation) -> object:
        return network(impl).load_state_dict({**different_state(impl), name: torch.ones(3)})

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "RuntimeError")
    assert f'Unexpected key(s) in state_dict: "{name}"' in text


def test_post_hook_runs_after_loading(impl: Implementation) -> None:
    """A post hook gets (module, incompatible_keys) when the module's state is loaded."""
    model = network(impl)
    calls: list[tuple[object, ...]] = []

    def hook(module, keys) -> None:
        calls.append((module, type(keys)._fields, list(keys.missing_keys), module.scale.tolist()))

    model.register_load_state_dict_post_hook(hook)
    state = different_state(impl)
    del state["mean"]
    model.load_state_dict(state, strict=False)

    assert calls == [(model, ("missing_keys", "unexpected_keys"), ["mean"], [3.0] * 3)]


@for_each("target", ["", "block", "head", "head.0.norm"])
def test_post_hook_gets_the_module_it_is_registered_on(impl: Implementation, target: str) -> None:
    """The first argument is the module with the hook, also below the module that is loaded."""
    model = network(impl)
    modules: list[object] = []
    model.get_submodule(target).register_load_state_dict_post_hook(lambda m, _: modules.append(m))
    model.load_state_dict(different_state(impl))

    assert modules == [model.get_submodule(target)]


@pytest.mark.filterwarnings("ignore:.*loaded none of the")
def test_post_hook_gets_two_lists_of_names(impl: Implementation) -> None:
    """missing_keys and unexpected_keys are lists of str."""
    model = scaling(impl)
    seen: list[object] = []
    model.register_load_state_dict_post_hook(lambda _, keys: seen.extend(keys))
    model.load_state_dict({"other": torch.ones(1)}, strict=False)

    assert seen == [["factor"], ["other"]]
    assert [type(keys) for keys in seen] == [list, list]


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


@pytest.mark.parametrize("kind", ["missing_keys", "unexpected_keys"])
def test_key_added_by_a_post_hook_is_an_error(kind: str) -> None:
    """With strict=True, a key that a post hook adds to either list is a RuntimeError."""

    def scenario(impl: Implementation) -> object:
        model = network(impl)
        model.register_load_state_dict_post_hook(
            lambda _, keys: getattr(keys, kind).append("invented")
        )
        return model.load_state_dict(different_state(impl))

    error = same(scenario)

    assert error[:2] == ("raised", "RuntimeError")
    assert '"invented"' in error[2]


def test_keys_cleared_by_a_post_hook_are_no_error(impl: Implementation) -> None:
    """With strict=True, clearing both lists in a post hook avoids the error."""
    model = network(impl)

    def clear(_module: object, keys) -> None:
        keys.missing_keys.clear()
        keys.unexpected_keys.clear()

    model.register_load_state_dict_post_hook(clear)
    state = different_state(impl)
    del state["mean"]

    assert model.load_state_dict({**state, "extra": torch.ones(1)}) == ([], [])
    assert torch.equal(model.scale, torch.full((3,), 3.0))


def test_post_hook_must_not_return_a_value() -> None:
    """A post hook that returns something is torch's AssertionError."""

    def scenario(impl: Implementation) -> object:
        model = scaling(impl)
        model.register_load_state_dict_post_hook(lambda *_: "value")
        return model.load_state_dict({"factor": torch.ones(1)})

    assert same(scenario)[:2] == ("raised", "AssertionError")
