import collections

import pytest
import torch

from tests.helpers import Implementation
from tests.parity.module.nets import raises_like_torch, tree


LOADS = {
    "None": None,
    "list": [],
    "pairs": [("weight", torch.ones(1))],
    "str": "weight",
    "int": 3,
    "tensor": torch.ones(1),
    "module": torch.nn.Identity(),
    "set": {"weight"},
    "generator": (pair for pair in ()),
    "type": dict,
    "namedtuple": collections.namedtuple("Pair", "missing_keys unexpected_keys")([], []),
}


@pytest.mark.parametrize("case", LOADS)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_loading_what_is_no_mapping(impl, case, strict, assign):
    """Only a mapping is loaded; anything else is refused and nothing is changed."""
    before, after = raises_like_torch(
        impl, tree, lambda m: m.load_state_dict(LOADS[case], strict, assign)
    )

    assert before == after


def altered(module, **changes):
    """Return the module's own checkpoint with some keys set anew, or removed for ``...``."""
    checkpoint = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for key, value in changes.items():
        name = key.replace("__", ".")
        checkpoint.pop(name, None) if value is ... else checkpoint.update({name: value})
    return checkpoint


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"gain": torch.ones(3)},
        {"gain": torch.ones(1, 2)},
        {"gain": torch.tensor(1.0)},
        {"right__mean": torch.ones(4), "left__inner__weight": torch.ones(3, 2)},
        {"left__scale": torch.ones(2)},
        {"gain": "text"},
        {"gain": None},
        {"gain": [1.0, 2.0]},
        {"gain": torch.ones(2).numpy()},
        {"left__inner__mean": 3, "right__weight": torch.ones(0)},
        {"gain": torch.ones(3), "bogus": torch.ones(1), "right__mean": ...},
    ],
)
def test_loading_a_value_that_does_not_fit(impl, changes, strict):
    """Wrong shapes and wrong types are all listed in one error, strict or not."""
    before, after = raises_like_torch(
        impl, tree, lambda m: m.load_state_dict(altered(m, **changes), strict=strict)
    )

    assert before == after


@pytest.mark.parametrize(
    "changes",
    [
        {"gain": ...},
        {"right__weight": ..., "again__weight": ...},
        {"bogus": torch.ones(1)},
        {"bogus": "no tensor"},
        {"left__bogus": torch.ones(1), "left__inner__bogus": torch.ones(1)},
        {"left__inner__weight__deeper": torch.ones(1)},
        {"missing__child__weight": torch.ones(1)},
        {"right__bias": torch.ones(1)},
        {"right__unset": torch.ones(1)},
        {"right__scratch": torch.ones(1)},
        {"": torch.ones(1)},
        {"left": torch.ones(1)},
        {"left__": torch.ones(1)},
        {"_extra_state": {"a": 1}, "left___extra_state": 3},
        {"gain": ..., "bogus": torch.ones(1), "left__scale": torch.ones(5), "right__mean": ...},
    ],
)
def test_strict_loading_of_keys_that_do_not_match(impl, changes):
    """Missing and unexpected keys are listed in torch's order and words."""
    before, after = raises_like_torch(
        impl, tree, lambda m: m.load_state_dict(altered(m, **changes))
    )

    assert before == after


def test_loading_keys_that_are_no_strings(impl: Implementation) -> None:
    """A key that is not a string fails in the way it does in torch."""
    before, after = raises_like_torch(
        impl, tree, lambda m: m.load_state_dict({**altered(m), 3: torch.ones(1)})
    )

    assert before == after
