"""Operations that save and load the state of a tree."""

import collections
import copy
import warnings
from typing import Any

import torch

from tests.property import choices
from tests.property.node_tools import LOG
from tests.property.observation import positions
from tests.property.operations import Skipped, operation
from tests.property.trees import Builder, layers


@operation(
    choices.sampled_from(["", "p.", "p"]),
    choices.booleans(),
    choices.sampled_from([None, "dict", "same"]),
)
def state_dict(side: Any, module: Any, prefix: str, keep_vars: bool, kind: Any) -> Any:
    """Save the state under a prefix, perhaps into a mapping with other entries."""
    destination: Any = None
    if kind == "dict":
        destination = {"there": 1}
    elif kind == "same":
        destination = module.state_dict(prefix="first.")
    state = module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    return state, dict(getattr(state, "_metadata", {})), type(state).__name__, state is destination


EDITS = choices.lists(
    choices.tuples(
        choices.sampled_from(
            ["drop", "reshape", "unsqueeze", "cast", "text", "parameter", "deeper", "sibling"]
        ),
        choices.integers(0, 9),
    ),
    max_size=3,
)


def edited_state(side: Any, module: Any, edits: Any) -> dict[str, Any]:
    """Make a state of other values for the module, and edit some of its entries."""
    state = {
        key: value.detach().clone() * 2 if isinstance(value, torch.Tensor) else value
        for key, value in module.state_dict().items()
    }
    for edit, number in edits:
        keys = list(state)
        if not keys:
            break
        key = keys[number % len(keys)]
        value = state[key]
        if edit == "drop":
            del state[key]
        elif edit == "deeper":
            state[f"{key}.zz"] = torch.ones(1)
        elif edit == "sibling":
            state[".".join([*key.split(".")[:-1], "zz"])] = torch.ones(1)
        elif edit == "text":
            state[key] = "text"
        elif isinstance(value, torch.Tensor):
            state[key] = edited_tensor(side, edit, value)
    return state


def edited_tensor(side: Any, edit: str, value: torch.Tensor) -> torch.Tensor:
    """Change one tensor of a state so that it fits, or not."""
    if edit == "reshape":
        return torch.zeros((*value.shape, 2), dtype=value.dtype)
    if edit == "unsqueeze":
        return value.reshape(1, *value.shape)
    if edit == "cast":
        return value.double()
    return side.impl.nn.Parameter(value, requires_grad=value.is_floating_point())


# Calls made by assigning tensors. How far a failing load came is not compared.
ASSIGNMENTS = {
    *("__setattr__", "__getattr__", "register_parameter", "register_buffer"),
    *("own register_parameter", "own register_buffer", "new parameter", "new buffer"),
    *("Node.register_parameter", "Node.register_buffer", "Node.__setattr__"),
    *("Behind.__setattr__", "weight set"),
}


def is_assignment(entry: Any) -> bool:
    """Return True if an entry of the log is about the assignment of a tensor."""
    kind = entry if isinstance(entry, str) else entry[0]
    return (entry[1] if kind in {"late", "patched"} else kind) in ASSIGNMENTS


def refuse_keys_below_none(side: Any) -> None:
    """Skip a load with keys that may belong to a child that is None.

    Those of a child with a dot in its name may. Modkit alone reports them, a listed difference. Nor
    may a plain tensor stand among the parameters: a load that is refused anyway does not come to it.
    """
    tensors = [p for _, place in positions(side.model) for p in place._parameters.values()]
    if not all(p is None or isinstance(p, torch.nn.Parameter) for p in tensors):
        raise Skipped
    children = [item for _, place in positions(side.model) for item in place._modules.items()]
    if any("." in name for name, _ in children) and any(child is None for _, child in children):
        raise Skipped


def load_into_copy(side: Any, state: Any, **options: bool) -> Any:
    """Load into a copy of the tree, since a failing load leaves torch's tree partly loaded."""
    refuse_keys_below_none(side)
    model = copy.deepcopy(side.model)
    try:
        with warnings.catch_warnings():
            # A load in vain warns on modkit alone, a listed difference.
            warnings.filterwarnings("ignore", ".*loaded none of the")
            return model, model.load_state_dict(state, **options)
    except Exception:
        LOG[:] = [entry for entry in LOG if not is_assignment(entry)]
        raise


@operation(choices.booleans(), choices.booleans(), choices.booleans(), choices.booleans(), EDITS)
def load_state_dict(
    side: Any, module: Any, strict: bool, assign: bool, metadata: bool, backwards: bool, edits: Any
) -> Any:
    """Load an edited state into a copy of the tree, and continue with the copy if it succeeds."""
    state: Any = collections.OrderedDict(edited_state(side, side.model, edits))
    if backwards:
        state = collections.OrderedDict(reversed(state.items()))
    if metadata:
        state._metadata = copy.deepcopy(side.model.state_dict()._metadata)
    side.model, result = load_into_copy(side, state, strict=strict, assign=assign)
    return result.missing_keys, result.unexpected_keys, repr(result), list(state)


@operation(
    choices.sampled_from(
        [None, 5, "text", [], {"zz": 1}, {"a": torch.ones(1)}, {1: torch.ones(1)}, {"": 1}]
    ),
    choices.booleans(),
)
def load_something_else(side: Any, module: Any, value: Any, strict: bool) -> Any:
    """Load an object that is not a state of this module."""
    return list(load_into_copy(side, value, strict=strict)[1])


@operation(layers)
def load_from_another_tree(side: Any, module: Any, spec: Any) -> Any:
    """Load another module's state without strictness."""
    other = Builder(side.impl).module(spec)
    return list(load_into_copy(side, other.state_dict(), strict=False)[1])
