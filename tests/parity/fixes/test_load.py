from typing import Any

import pytest
import torch

from tests.helpers import Implementation


class Subclass(torch.Tensor):
    pass


def network(impl):
    """Build a network of two branches with parameters and buffers."""
    return impl.own.Sequential(
        impl.own.Sequential(impl.own.Linear(2, 3), impl.own.BatchNorm1d(3)),
        impl.own.Linear(3, 1),
    )


def values(module):
    """Copy all tensors of a module."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def unchanged(module, before):
    """Return True if all tensors of a module are unchanged."""
    return all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def other_values(module):
    """Make a state dict for ``module`` whose values differ from it in each entry."""
    return {name: tensor + 1 for name, tensor in module.state_dict().items()}


# Changed entries, `...` for one that is left out; options of the load; a part of the error.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, bool], str]] = {
    "shape": ({"1.weight": torch.zeros(5, 5)}, {}, r"size mismatch for 1\.weight"),
    "text": ({"1.bias": "text"}, {}, r'parameter named "1\.bias"'),
    "none": ({"1.bias": None}, {}, r'parameter named "1\.bias"'),
    "extra": ({"stray": torch.zeros(1)}, {}, "Unexpected key.*stray"),
    "extra below": ({"0.0.stray": torch.zeros(1)}, {}, "Unexpected key.*stray"),
    "extra below a parameter": ({"0.0.weight.stray": torch.zeros(1)}, {}, "Unexpected key.*stray"),
    "missing": ({"1.bias": ...}, {}, "Missing key"),
    "not strict": (
        {"1.weight": torch.zeros(5, 5)},
        {"strict": False},
        r"size mismatch for 1\.weight",
    ),
    "assigned": ({"1.weight": torch.zeros(5, 5)}, {"assign": True}, r"size mismatch for 1\.weight"),
    # The layer brings an old checkpoint up to date without writing.
    "old": (
        {"0.1.num_batches_tracked": ..., "1.bias": torch.zeros(7)},
        {},
        r"size mismatch for 1\.bias",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_load_changes_nothing(impl: Implementation, case: str) -> None:
    """A load with an entry that does not fit leaves all tensors, and their values, as they were."""
    change, options, text = REFUSED[case]
    model = network(impl)
    before = values(model)
    parameters = list(model.parameters())
    state = {**other_values(model), **change}
    state = {name: value for name, value in state.items() if value is not ...}
    with pytest.raises(RuntimeError, match=f"(?s)loading state_dict for Sequential.*{text}"):
        model.load_state_dict(state, **options)

    assert unchanged(model, before)
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["meta", "integers", "inference"])
def test_a_tensor_that_cannot_be_copied_changes_nothing(impl: Implementation, kind: str) -> None:
    """Values of the right shape that cannot be written are found before the first write."""
    model = network(impl)
    before = values(model)
    with torch.inference_mode(kind == "inference"):
        dtype = torch.int64 if kind == "integers" else torch.float32
        tensor = torch.ones(1, dtype=dtype, device="meta" if kind == "meta" else "cpu")
        odd = torch.nn.Parameter(tensor, requires_grad=False)
    state = {**other_values(model), "1.bias": odd}
    with pytest.raises(RuntimeError, match=r'parameter named "1\.bias"'):
        model.load_state_dict(state, assign=kind != "meta")

    assert unchanged(model, before)


@pytest.mark.parametrize("cast", [False, True])
def test_a_model_made_in_inference_mode_keeps_its_values(impl: Implementation, cast: bool) -> None:
    """Outside of the mode its tensors refuse to be written, also after a cast; none has changed."""
    with torch.inference_mode():
        model = network(impl)
    if cast:
        model.double()
    before = values(model)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        model.load_state_dict(other_values(model))

    assert unchanged(model, before)


def test_a_hook_that_takes_part_gets_torchs_order(impl: Implementation) -> None:
    """With a hook in the tree, modules load one after the other, and see those before loaded."""
    model = network(impl)
    seen = []
    model[1].register_load_state_dict_pre_hook(
        lambda *_: seen.append(model[0][0].weight.detach().clone())
    )
    state = other_values(model)
    model.load_state_dict(state)

    assert torch.equal(seen[0], state["0.0.weight"])


def test_keys_below_a_child_that_is_none_are_unexpected(impl: Implementation) -> None:
    """Keys below a child that is None are unexpected."""
    model = impl.Module()
    model.register_module("child", None)
    state = {"child.weight": torch.zeros(1)}

    assert model.load_state_dict(state, strict=False).unexpected_keys == ["child.weight"]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*child\.weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("hooked", [False, True], ids=["planned", "in order"])
def test_assign_keeps_tied_parameters_tied(impl: Implementation, hooked: bool, device: str) -> None:
    """A parameter under two names, perhaps without memory, is one after an assigning load."""

    def tied():
        model = impl.own.Sequential(impl.own.Linear(2, 2), impl.own.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    with torch.device(device):
        model = tied()
    if hooked:
        model[0].register_load_state_dict_post_hook(lambda *_: None)
    state = tied().state_dict()
    model.load_state_dict(state, assign=True)

    assert model[1].weight is model[0].weight
    assert model[0].weight.data_ptr() == state["0.weight"].data_ptr()


@pytest.mark.parametrize("make", [torch.Tensor, Subclass], ids=["plain", "subclass"])
def test_assign_does_not_tie_what_was_not_tied(impl: Implementation, make: Any) -> None:
    """Two parameters stay two if filled from one tensor, and two values make two of a tied one."""

    def two_pairs():
        model = impl.own.Sequential(*(impl.own.Linear(2, 2, bias=False) for _ in range(4)))
        model[1].weight = model[0].weight
        model[3].weight = model[2].weight
        return model

    model = two_pairs()
    weight = torch.zeros(2, 2).as_subclass(make)
    model.load_state_dict(dict.fromkeys(model.state_dict(), weight), assign=True)
    untied = two_pairs()
    state = {f"{i}.weight": torch.full((2, 2), i * 1.0).as_subclass(make) for i in range(4)}
    untied.load_state_dict(state, assign=True)

    assert model[0].weight is not model[2].weight
    assert [layer.weight[0, 0].item() for layer in untied] == [0, 1, 2, 3]


@pytest.mark.parametrize("hooked", [False, True])
def test_assign_leaves_nothing_behind_in_the_state_dict(impl: Implementation, hooked: bool) -> None:
    """After a load with ``assign=True`` the same state dict loads by copying again."""
    state = impl.own.Linear(2, 2).state_dict()
    before = {name: dict(entry) for name, entry in state._metadata.items()}
    assigned = impl.own.Linear(2, 2)
    if hooked:
        assigned.register_load_state_dict_pre_hook(lambda *_: None)
    assigned.load_state_dict(state, assign=True)
    copied_into = impl.own.Linear(2, 2)
    weight = copied_into.weight
    copied_into.load_state_dict(state)

    assert state._metadata == before
    assert copied_into.weight is weight
    assert torch.equal(weight, state["weight"])


@pytest.mark.parametrize("hooked", [False, True])
def test_a_flag_that_torch_left_in_a_state_dict_does_not_count(
    impl: Implementation, hooked: bool
) -> None:
    """A state dict that torch has loaded with ``assign=True``, and then was saved, is copied."""
    state = torch.nn.Linear(2, 2).state_dict()
    torch.nn.Linear(2, 2).load_state_dict(state, assign=True)
    model = impl.own.Linear(2, 2)
    if hooked:
        model.register_load_state_dict_pre_hook(lambda *_: None)
    weight = model.weight
    model.load_state_dict(state)

    assert model.weight is weight
    assert torch.equal(weight, state["weight"])


def test_a_load_that_takes_nothing_warns(impl: Implementation) -> None:
    """With ``strict=False``, names that have a prefix too much would pass unnoticed."""
    model = network(impl)
    state = {f"module.{name}": tensor for name, tensor in other_values(model).items()}

    with pytest.warns(UserWarning, match="loaded none of the"):
        model.load_state_dict(state, strict=False)
