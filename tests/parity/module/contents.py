"""A record of everything that a module holds, and calls that must fail as in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers import TORCH, Implementation, freeze, outcome


if TYPE_CHECKING:
    from collections.abc import Callable

REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Contents:
    """Contents of a module, in order; equal only if all objects and tensor values are equal."""

    entries: list[tuple[str, str, object, Any]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Contents) or len(self.entries) != len(other.entries):
            return False
        return all(
            mine[:2] == theirs[:2] and mine[2] is theirs[2] and mine[3] == theirs[3]
            for mine, theirs in zip(self.entries, other.entries, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def contents(module: torch.nn.Module, prefix: str = "") -> Contents:
    """Record the instance ``__dict__`` and all registries of a module and of its children."""
    entries: list[tuple[str, str, object, Any]] = []
    for name, value in vars(module).items():
        if isinstance(value, set):
            entries.append((prefix + name, "", None, sorted(value)))
        elif isinstance(value, dict):
            entries.append((prefix + name, "", value, None))
            entries += [(prefix + name, repr(key), value[key], frozen(value[key])) for key in value]
        else:
            entries.append((prefix + name, "", value, frozen(value)))
    for name, child in vars(module).get("_modules", {}).items():
        if child is not None:
            entries += contents(child, f"{prefix}{name}.").entries
    return Contents(entries)


def state(module: torch.nn.Module) -> list[object]:
    """Describe all members, gradients, and whether the parameters are leaves."""
    found: list[object] = [module.plain if hasattr(module, "plain") else None]
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.append((name, type(parameter).__name__, parameter, parameter.is_leaf))
        found.append((parameter.grad, None if parameter.grad is None else parameter.grad.is_leaf))
    for name, buffer in module.named_buffers(remove_duplicate=False):
        found.append((name, type(buffer).__name__, buffer, buffer.is_leaf))
    return found


def frozen(value: object) -> object:
    """Freeze a tensor's value; other objects are compared by identity alone."""
    return freeze(value) if isinstance(value, torch.Tensor) else None


def where(module: torch.nn.Module, name: str) -> list[object]:
    """Tell in which registries a name stands, what it is there, and the order of all names."""
    found: list[object] = []
    for registry in REGISTRIES:
        members = vars(module)[registry]
        found.append([*members])
        if name in members:
            found.append((registry, freeze(members[name])))
    if name in vars(module):
        found.append(("__dict__", freeze(vars(module)[name])))
    found.append(sorted(module._non_persistent_buffers_set))
    return found


def non_leaf() -> torch.Tensor:
    """Build a tensor that has a history, and yet says that it is a parameter."""
    tensor = torch.nn.Parameter(torch.ones(1)) * 2
    tensor.__class__ = torch.nn.Parameter
    return tensor


def run(call: str, module: Any) -> object:
    """Evaluate a call that is written as text, so that it also serves as the case's name."""
    names = {
        "torch": torch,
        "ones": torch.ones,
        "Parameter": torch.nn.Parameter,
        "Buffer": torch.nn.Buffer,
        "Identity": torch.nn.Identity,
        "non_leaf": non_leaf,
        "m": module,
    }
    return eval(call, names)


def raises_like_torch(
    impl: Implementation,
    build: Callable[[Implementation], Any],
    attempt: str | Callable[[Any], object],
) -> tuple[Contents, Contents]:
    """Assert torch's exception type and text; return the contents before and after the attempt."""

    def act(module: Any) -> object:
        return run(attempt, module) if isinstance(attempt, str) else attempt(module)

    expected = outcome(lambda reference: act(build(reference)), TORCH)
    module = build(impl)
    before = contents(module)
    actual = outcome(lambda _: act(module), impl)
    assert expected[0] == "raised"
    assert actual == expected
    return before, contents(module)
