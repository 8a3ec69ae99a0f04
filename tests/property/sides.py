"""One implementation's half of a lockstep run, and the run itself."""

import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.modules.module as torch_module

from tests.helpers import MODKIT, TORCH, Implementation, freeze, seed_everything
from tests.property.nodes import LOG
from tests.property.observation import distinct_modules, observe
from tests.property.operations import OPERATIONS, Kind, Operation, Skipped
from tests.property.trees import Builder, ModuleSpec


@dataclass
class Side:
    """A tree on one implementation, with the handles of the hooks registered so far."""

    operations: ClassVar[dict[str, Kind]] = OPERATIONS
    impl: Implementation
    spec: ModuleSpec
    model: Any = field(init=False)
    handles: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed_everything()
        self.model = Builder(self.impl).module(self.spec)

    def target(self, number: int) -> Any:
        """Return the module with the number, counted round the tree's modules."""
        found = distinct_modules(self.model)
        return found[number % len(found)]

    def run(self, operation: Operation) -> tuple[Any, ...]:
        """Run one operation; return its outcome, its warnings and what the hooks logged."""
        seed_everything()
        LOG.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value = self.operations[operation.kind].run(self, operation)
                result: tuple[Any, ...] = ("returned", freeze(value))
            except Skipped:
                result = ("skipped",)
            except Exception as error:
                result = ("raised", type(error).__name__, plain_text(error))
        return result, [(w.category.__name__, plain_text(w.message)) for w in caught], list(LOG)


def plain_text(message: object) -> str:
    """Return the text of an error, with modkit's homes named like torch's."""
    return str(message).replace("nodes_modkit", "nodes_torch").replace("modkit.nn.", "torch.nn.")


def lockstep(spec: ModuleSpec, operations: list[Operation]) -> None:
    """Run the operations on both implementations and compare all that can be seen each time."""
    torch_always_warns = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        sides = [Side(TORCH, spec), Side(MODKIT, spec)]
        compare("build", [observe(side.model) for side in sides])
        for operation in operations:
            compare(operation, [side.run(operation) for side in sides])
            compare(operation, [observe(side.model) for side in sides])
    finally:
        torch.set_warn_always(torch_always_warns)
        torch_module._global_is_full_backward_hook = None


def compare(step: object, pair: list[Any]) -> None:
    """Assert that both sides are alike, naming the step after which they are not."""
    assert pair[0] == pair[1], f"torch and modkit differ after {step}"
