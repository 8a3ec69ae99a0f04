"""Torch's table of module cases, each layer as a user's class on one of the implementations."""

import copy
import importlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.helpers import Implementation, freeze


def module_db() -> list[Any]:
    """Return torch's table. Its import takes seconds, so it waits until a test runs."""
    return list(common_modules().module_db)


def common_modules() -> ModuleType:
    """Import the module that has the table; what it imports warns of its own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("torch.testing._internal.common_modules")


def seed(number: int = 0) -> None:
    """Reset the random state of the CPU. ``torch.manual_seed`` formats a stack trace each time."""
    torch.default_generator.manual_seed(number)


@dataclass(frozen=True)
class Sample:
    """How to build one layer, and what to call it with."""

    layer: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Any, ...]
    input_kwargs: dict[str, Any]

    def build(self, impl: Implementation, start: int = 0) -> Any:
        """Build the layer on one of the implementations, from the random state ``start``."""
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        layer: Any = impl.own.derive(self.layer)
        seed(start)
        return layer(*args, **kwargs)


def cases(
    info: Any, dtypes: Sequence[torch.dtype] | None = None
) -> Iterator[tuple[str, Sample, torch.dtype, bool]]:
    """Yield every case of one table entry, or of some dtypes: label, sample, dtype and mode."""
    modes = (True, False) if info.train_and_eval_differ else (True,)
    for dtype in info.dtypes if dtypes is None else dtypes:
        for training in modes:
            seed()
            with warnings.catch_warnings():
                # The table builds tensors of dtypes that torch calls experimental.
                warnings.simplefilter("ignore")
                inputs = info.module_inputs_func(
                    info, device="cpu", dtype=dtype, requires_grad=True, training=training
                )
            for number, case in enumerate(inputs):
                made, called = case.constructor_input, case.forward_input
                sample = Sample(info.module_cls, made.args, made.kwargs, called.args, called.kwargs)
                mode = "train" if training else "eval"
                yield f"{dtype}, {mode}, case {number}: {made}", sample, dtype, training


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Return everything that a state_dict says, its metadata included."""
    state = module.state_dict()
    return [(key, freeze(value)) for key, value in state.items()], list(state._metadata.items())


def ready(sample: Sample, impl: Implementation, dtype: torch.dtype, training: bool) -> Any:
    """Build a module, and bring it to the dtype and the mode of the case."""
    return sample.build(impl).to(dtype).train(training)


def observe(
    sample: Sample, impl: Implementation, dtype: torch.dtype, training: bool
) -> dict[str, Any]:
    """Build, call and differentiate a module; return all that can be seen, or the exception."""
    seen: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module = ready(sample, impl, dtype, training)
            seen |= {"before": state_of(module), "repr": repr(module)}
            seen |= _call(module, sample)
            seen |= {"after": state_of(module), "repr after": repr(module)}
        except Exception as error:
            # Cases that torch cannot run fail in modkit for the same reason.
            seen["raised"] = (type(error).__name__, str(error))
    # A warning that torch gives once a process goes to whichever implementation comes first.
    texts = {str(warning.message) for warning in caught}
    seen["warnings"] = {text for text in texts if "Triggered internally" not in text}
    return seen


def _call(module: nn.Module, sample: Sample) -> dict[str, Any]:
    args, kwargs = fresh(sample.inputs), fresh(sample.input_kwargs)
    seed()
    output = module(*args, **kwargs)
    losses = [
        part.abs().sum() for part in tensors_of(output) if part.requires_grad and part.numel()
    ]
    if losses:
        torch.stack(losses).sum().backward()
    inputs = [part.grad for part in tensors_of((args, kwargs)) if part.is_leaf]
    parameters = {name: freeze(p.grad) for name, p in module.named_parameters()}
    return {"output": freeze(output), "inputs": freeze(inputs), "parameters": parameters}


def fresh(value: Any) -> Any:
    """Copy inputs, so that each call has leaves of its own to collect gradients in."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(fresh(item) for item in value)
    return copy.deepcopy(value)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item)


def copies(module: nn.Module) -> list[Any]:
    """Return what pickle and deepcopy make of a module, or the exception that stops them."""
    return [
        _copy(module, make)
        for make in (lambda given: pickle.loads(pickle.dumps(given)), copy.deepcopy)
    ]


def _copy(module: nn.Module, make: Callable[[nn.Module], nn.Module]) -> tuple[Any, ...]:
    try:
        made = make(module)
    except Exception as error:
        return (type(error).__name__, str(error))
    pairs = zip(made.modules(), module.modules(), strict=True)
    is_same_class = all(type(mine) is type(given) for mine, given in pairs)
    return (repr(made), state_of(made), is_same_class, made.training)
