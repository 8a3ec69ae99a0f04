"""Operations that change the tree while it is walked, or a single instance's methods."""

import types
from typing import Any

import torch

from tests.property import choices
from tests.property.node_tools import LOG, summary
from tests.property.observation import Ordinals
from tests.property.operations import is_taken, operation
from tests.property.trees import valid_names


CHANGES = choices.sampled_from(
    ["add child", "add parameter", "add buffer", "delete", "replace child"]
)
WALKS = choices.sampled_from(
    ["modules", "children", "named_modules", "parameters", "named_parameters", "named_buffers"]
)


def change_structure(side: Any, module: Any, change: str, name: str) -> None:
    """Add, delete or replace a member by the plainest means."""
    tables = (module._modules, module._parameters, module._buffers)
    added = {"add child": "_modules", "add parameter": "_parameters", "add buffer": "_buffers"}
    if change in added and is_taken(module, added[change], name):
        return
    if change == "add child":
        module._modules[name] = side.impl.nn.Tanh()
    elif change == "add parameter":
        module._parameters[name] = side.impl.nn.Parameter(torch.ones(1))
    elif change == "add buffer":
        module._buffers[name] = torch.ones(1)
    elif change == "delete":
        for table in tables:
            if table:
                table.popitem()
    else:
        for key in module._modules:
            module._modules[key] = side.impl.nn.Tanh()


@operation(WALKS, choices.integers(0, 6), CHANGES, valid_names, choices.integers(0, 9))
def walk_while_changing(
    side: Any, module: Any, method: str, steps: int, change: str, name: str, number: int
) -> Any:
    """Change a module of the tree in the middle of a walk, and continue."""
    found = []
    changed = side.target(number)
    for taken, item in enumerate(getattr(module, method)(), start=1):
        found.append(item[0] if isinstance(item, tuple) else summary(item))
        if taken == steps:
            change_structure(side, changed, change, name)
        if taken > 200:
            break
    return found


@operation(CHANGES, valid_names, choices.booleans())
def apply_while_changing(side: Any, module: Any, change: str, name: str, inner: bool) -> list[str]:
    """Change modules from inside `apply`, those of one kind or all with children."""
    visited: list[str] = []

    def change_it(visit: Any) -> None:
        visited.append(f"{type(visit).__name__} {len(visit._modules)}")
        if bool(visit._modules) is inner:
            change_structure(side, visit, change, name)

    module.apply(change_it)
    return visited


@operation(
    choices.sampled_from(
        [
            "forward",
            "train",
            "_apply",
            "apply",
            "state_dict",
            "_load_from_state_dict",
            "named_modules",
            "children",
            "named_children",
            "parameters",
            "_named_members",
            "extra_repr",
            "register_parameter",
            "register_buffer",
            "_slow_forward",
        ]
    )
)
def override_on_instance(side: Any, module: Any, method: str) -> None:
    """Override a method on one instance; copies have their own override."""

    def logging(self: Any, *args: Any, **kwargs: Any) -> Any:
        keywords = [(name, summary(value)) for name, value in kwargs.items()]
        LOG.append((f"own {method}", [summary(value) for value in args], keywords))
        return getattr(type(self), method)(self, *args, **kwargs)

    setattr(module, method, types.MethodType(logging, module))


@operation(choices.sampled_from(["parameters", "modules", "named_parameters"]))
def walk_twice_at_once(side: Any, module: Any, method: str) -> list[Any]:
    """Two interleaved walks are independent."""
    ordinals = Ordinals()
    first, second = iter(getattr(module, method)()), iter(getattr(module, method)())
    turns = []
    for item in first:
        other = next(second, None)
        pair = [item[1] if isinstance(item, tuple) else item]
        pair.append(other[1] if isinstance(other, tuple) else other)
        turns.append([ordinals.of(entry) for entry in pair])
    return turns
