import collections

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, same
from tests.models import tree
from tests.parity.module.contents import raises_like_torch


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


@for_each("case", LOADS)
@for_each("strict", [True, False])
@for_each("assign", [True, False])
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


MISFITS = [
    {"gain": torch.ones(3)},
    {"gain": torch.ones(1, 2)},
    {"gain": torch.tensor(1.0)},
    {"right__mean": torch.ones(4), "left__inner__weight": torch.ones(3, 2)},
    {"left__scale": torch.ones(1, 2)},
    {"gain": "text"},
    {"gain": None},
    {"gain": [1.0, 2.0]},
    {"gain": torch.ones(2).numpy()},
    {"left__inner__mean": 3, "right__weight": torch.ones(0)},
    {"gain": torch.ones(3), "bogus": torch.ones(1), "right__mean": ...},
]
# Refused by a strict load alone.
STRANGERS = [
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
    {"gain": ..., "bogus": torch.ones(1), "left__scale": torch.ones(1, 5), "right__mean": ...},
]


@for_each(
    ("changes", "strict"),
    [
        *((changes, strict) for changes in MISFITS for strict in (True, False)),
        *((changes, True) for changes in STRANGERS),
    ],
)
def test_loading_entries_that_do_not_fit(impl, changes, strict):
    """Wrong shapes, types and keys are all listed in one error, in torch's order and words."""
    before, after = raises_like_torch(
        impl, tree, lambda m: m.load_state_dict(altered(m, **changes), strict=strict)
    )

    assert before == after


def test_loading_keys_that_are_no_strings(impl: Implementation) -> None:
    """A key that is not a string fails in the way it does in torch."""
    before, after = raises_like_torch(
        impl, tree, lambda m: m.load_state_dict({**altered(m), 3: torch.ones(1)})
    )

    assert before == after


ODD_VALUES = {
    "sparse": lambda: torch.ones(2).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    "integer": lambda: torch.ones(2, dtype=torch.int64),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@for_each("value", ODD_VALUES)
@for_each("assign", [False, True])
@for_each("missing", [False, True])
def test_a_refused_load_names_what_cannot_be_copied(
    value: str, assign: bool, missing: bool
) -> None:
    """Beside missing keys the error has each tensor that copying would have failed for."""

    def scenario(impl):
        module = impl.Module()
        module.a = torch.nn.Parameter(torch.zeros(2))
        module.register_buffer("b", torch.zeros(2))
        module.c = torch.nn.Parameter(torch.zeros(2))
        state = {"a": ODD_VALUES[value](), "b": ODD_VALUES[value](), "c": torch.ones(2)}
        if missing:
            del state["c"]
        return repr(module.load_state_dict(state, assign=assign))

    kind, *_ = same(scenario)

    assert kind == "raised" if missing else kind in {"raised", "returned"}


class Subclass(torch.Tensor):
    pass


def test_a_refused_load_names_targets_that_cannot_be_written() -> None:
    """The error names tensors of the model that cannot be written, as in torch."""

    def scenario(impl):
        module = impl.Module()
        with torch.inference_mode():
            module.a = torch.nn.Parameter(torch.zeros(2))
        module.b = torch.nn.Parameter(torch.zeros(1).expand(2))
        module.c = torch.nn.Parameter(torch.zeros(2))
        module.d = torch.nn.Parameter(torch.zeros(1).as_subclass(Subclass).expand(2))
        with torch.inference_mode():
            module.e = torch.nn.Parameter(torch.zeros(2))
        module.e.data = torch.zeros(2)
        return module.load_state_dict(dict.fromkeys("abde", torch.ones(2)))

    kind, _, text = same(scenario)

    assert kind == "raised"
    assert 'Missing key(s) in state_dict: "c"' in text
    assert text.count("While copying the parameter named") == 4


@for_each("tied", [False, True])
def test_an_error_of_one_copy_names_its_entry(tied: bool) -> None:
    """Where one tensor cannot be copied, the error names it, and the other tensors are loaded."""

    def scenario(impl):
        module = impl.Module()
        memory = torch.arange(4.0)
        module.a = torch.nn.Parameter(torch.zeros(2))
        # The value is in a part of the memory that is written to.
        module.b = torch.nn.Parameter(memory[:3])
        module.c = torch.nn.Parameter(torch.zeros(2))
        module.d = module.c if tied else None
        state = {"a": torch.ones(2), "b": memory[1:], "c": torch.ones(2), "d": torch.ones(2)}
        if not tied:
            del state["d"]
        try:
            result = repr(module.load_state_dict(state))
        except RuntimeError as error:
            result = str(error)
        return result, dict(module.state_dict())

    _, (_, ((_, text), _)) = same(scenario)

    assert 'While copying the parameter named "b"' in text
