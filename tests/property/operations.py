"""Public operations on a module tree, as plain data that runs on either implementation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.property import choices
from tests.property.observation import distinct_modules, positions
from tests.property.trees import (
    Builder,
    all_names,
    layers,
    modules,
    plain_values,
    tensors,
    valid_names,
)


class Skipped(Exception):
    """Raised if an operation would meet a listed difference."""


@dataclass(frozen=True)
class Operation:
    """One operation on the module with the number `target`, with its drawn arguments."""

    kind: str
    target: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of operation: its function, and the choices of its arguments."""

    function: Callable[..., Any]
    arguments: tuple[choices.Choice[Any], ...]

    def run(self, side: Any, operation: Operation) -> Any:
        """Run the operation on the side's module with the number."""
        return self.function(side, side.target(operation.target), *operation.arguments)


OPERATIONS: dict[str, Kind] = {}


def operation(*arguments: choices.Choice[Any]) -> Callable[..., Any]:
    """Enter the function into the table of operations, with the strategies of its arguments."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[function.__name__] = Kind(function, arguments)
        return function

    return enter


# Calls, hooks and loads cover more code than the other kinds, so they are drawn more often.
FAVOURED = ["call", "call", "add_hooks", "add_hooks", "load_state_dict", "state_dict", "walk"]


def of_kind(kind: str, table: dict[str, Kind] = OPERATIONS) -> choices.Choice[Operation]:
    return choices.builds(
        Operation,
        choices.just(kind),
        choices.just(0) | choices.integers(0, 9),
        choices.tuples(*table[kind].arguments),
    )


def drawn(kinds: list[str] | None = None) -> choices.Choice[Operation]:
    """Draw an operation of one of the kinds, by default of any."""
    return choices.one_of(*map(of_kind, kinds or [*sorted(OPERATIONS), *FAVOURED]))


def sequences(kinds: choices.Choice[Operation], least: int, most: int) -> Any:
    """Return the strategy of Hypothesis for a sequence of operations."""
    return choices.lists(kinds, min_size=least, max_size=most).strategy()


def is_tied(side: Any) -> bool:
    """Return True if a parameter is in more than one place of the tree."""
    found = [
        id(parameter)
        for _, module in positions(side.model)
        for parameter in module._parameters.values()
        if parameter is not None
    ]
    return len(found) != len(set(found))


def refuse_tied_buffers(side: Any) -> None:
    """Skip a conversion for which torch unties buffers."""
    found = [
        id(buffer)
        for module in distinct_modules(side.model)
        for buffer in module._buffers.values()
        if buffer is not None
    ]
    if len(found) != len(set(found)):
        raise Skipped


def is_shared(side: Any) -> bool:
    """Return True if a module is in more than one place of the tree."""
    found = [id(module) for _, module in positions(side.model)]
    return len(found) != len(set(found))


@operation(all_names, choices.none() | tensors)
def register_parameter(side: Any, module: Any, name: str, spec: Any) -> None:
    module.register_parameter(name, Builder(side.impl).parameter(spec))


@operation(all_names, choices.none() | tensors, choices.booleans())
def register_buffer(side: Any, module: Any, name: str, spec: Any, persistent: bool) -> None:
    module.register_buffer(name, None if spec is None else spec.build(), persistent=persistent)


@operation(all_names, choices.none() | layers | modules(1), choices.booleans())
def add_module(side: Any, module: Any, name: str, spec: Any, alias: bool) -> None:
    """Register a child, or reserve its name."""
    (module.register_module if alias else module.add_module)(name, Builder(side.impl).module(spec))


@operation(
    choices.sampled_from(["register_parameter", "register_buffer", "add_module"]),
    choices.sampled_from(["a", 5, None]),
    choices.sampled_from(["text", 5, [1], torch.float32]),
)
def register_wrong_thing(side: Any, module: Any, method: str, name: Any, value: Any) -> None:
    """Register an invalid object, perhaps under an invalid name."""
    getattr(module, method)(name, value)


@operation(all_names, tensors)
def assign_parameter(side: Any, module: Any, name: str, spec: Any) -> None:
    setattr(module, name, Builder(side.impl).parameter(spec))


@operation(all_names, tensors, choices.booleans())
def assign_buffer(side: Any, module: Any, name: str, spec: Any, persistent: bool) -> None:
    setattr(module, name, side.impl.nn.Buffer(spec.build(), persistent=persistent))


@operation(all_names, tensors)
def assign_tensor(side: Any, module: Any, name: str, spec: Any) -> None:
    """Assign a tensor, which is a plain attribute unless the name is a buffer's."""
    setattr(module, name, spec.build())


@operation(all_names, layers | modules(1))
def assign_module(side: Any, module: Any, name: str, spec: Any) -> None:
    """Assign a new child."""
    setattr(module, name, Builder(side.impl).module(spec))


@operation(all_names, plain_values)
def assign_plain(side: Any, module: Any, name: str, value: Any) -> None:
    """Assign a plain value, which members refuse unless it is None."""
    setattr(module, name, value)


@operation(all_names, choices.integers(0, 9))
def tie(side: Any, module: Any, name: str, number: int) -> None:
    """Assign a parameter that exists already."""
    existing = [p for _, place in positions(side.model) for p in place._parameters.values()]
    if existing:
        setattr(module, name, existing[number % len(existing)])


@operation(all_names, choices.integers(0, 9))
def share(side: Any, module: Any, name: str, number: int) -> None:
    """Assign a module of the tree as another module's child, unless that makes a cycle."""
    existing = side.target(number)
    if any(place._modules is module._modules for _, place in positions(existing)):
        raise Skipped
    setattr(module, name, existing)


@operation(all_names)
def delete(side: Any, module: Any, name: str) -> None:
    """Delete a member or an attribute, which may fail."""
    delattr(module, name)


@operation(choices.integers(0, 9))
def delete_existing(side: Any, module: Any, number: int) -> str | None:
    names = [*module._parameters, *module._buffers, *module._modules]
    if not names:
        return None
    name = names[number % len(names)]
    delattr(module, name)
    return name


@operation(all_names)
def read(side: Any, module: Any, name: str) -> Any:
    """Read an attribute; bound methods and modules compare by their class."""
    value = getattr(module, name)
    return type(value).__name__ if isinstance(value, torch.nn.Module) or callable(value) else value


def is_taken(module: Any, table: str, name: str) -> bool:
    """Return True if a property or another table has the name, which no method of a module allows.

    Modkit loads a tensor into the table that it is in, and torch assigns the name.
    """
    others = {"_parameters", "_buffers", "_modules"} - {table}
    return hasattr(type(module), name) or any(name in getattr(module, other) for other in others)


@operation(
    choices.sampled_from(["_parameters", "_buffers", "_modules"]),
    valid_names,
    tensors,
    choices.booleans(),
)
def write_table(side: Any, module: Any, table: str, name: str, spec: Any, remove: bool) -> None:
    """Write into a table of members directly, as functional_call and FSDP do."""
    members = getattr(module, table)
    if remove:
        members.pop(name, None)
    elif is_taken(module, table, name):
        raise Skipped
    elif table == "_modules":
        members[name] = side.impl.nn.Tanh()
    else:
        members[name] = (
            Builder(side.impl).parameter(spec) if table == "_parameters" else spec.build()
        )


@operation(choices.sampled_from(["_parameters", "_buffers", "_modules"]))
def replace_table(side: Any, module: Any, table: str) -> None:
    """Assign a whole table, as DataParallel and accelerate do."""
    setattr(module, table, dict(getattr(module, table)))
