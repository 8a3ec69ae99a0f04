"""Running one scenario plainly and inside `fast_inference`, and comparing all that can be seen."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import modkit
from tests.helpers import Implementation, freeze
from tests.parity.module.module_cases import fresh, seed, tensors_of


Scope = Callable[..., AbstractContextManager[Any]]
Scenario = Callable[[Scope], Any]


@contextlib.contextmanager
def plain(model: nn.Module, **_options: object) -> Iterator[nn.Module]:
    """Stand in for the scope: torch as it is."""
    yield model


def fast(model: nn.Module, **options: Any) -> AbstractContextManager[nn.Module]:
    """Enter the scope under test."""
    scope: AbstractContextManager[nn.Module] = modkit.fast_inference(model, **options)
    return scope


_PLAIN = {torch.Tensor, nn.Parameter}
_NUMPY = {torch.float32, torch.float64, torch.int64}


def _plain_bits(value: torch.Tensor) -> Any:
    """Freeze an ordinary tensor, of which there are many."""
    node = None if value.grad_fn is None else value.grad_fn.name()
    data = value.device.type if value.is_meta else value.detach().numpy().tobytes()
    layout = value.shape, value.stride(), value.dtype
    return type(value), layout, value.requires_grad, value.is_inference(), node, data


def bits(value: Any) -> Any:
    """Freeze a value with its strides and the names of its autograd nodes."""
    if type(value) in _PLAIN and value.dtype in _NUMPY and value.layout is torch.strided:
        return _plain_bits(value)
    if is_lazy(value):
        return type(value).__name__
    layouts = [
        (
            type(tensor).__name__,
            tensor.stride() if tensor.layout is torch.strided else tensor.layout,
            None if tensor.grad_fn is None else tensor.grad_fn.name(),
            tensor.is_inference(),
        )
        for tensor in tensors_of(value)
    ]
    return freeze(value), layouts


# Torch gives a warning of its C++ code once a process, and scripts functions when they are imported.
_ONCE = ("Triggered internally", "`torch.jit.", "Guards may run slower on Python 3.13.0")


def outcome(function: Callable[[], Any]) -> tuple[Any, ...]:
    """Return what the function returns or raises, with the warnings it gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: tuple[Any, ...] = ("returned", bits(function()))
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            result = ("raised", type(error).__name__, str(error), list(notes))
    texts = [(w.category.__name__, str(w.message)) for w in caught]
    return (*result, [text for text in texts if not any(word in text[1] for word in _ONCE)])


def random_state() -> bytes:
    """Return the state of the CPU's random generator."""
    return torch.default_generator.get_state().numpy().tobytes()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


def differentiate(output: Any) -> None:
    """Sum what requires gradients, and run backward."""
    losses = [part.abs().sum() for part in tensors_of(output) if part.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()


def called(module: Any, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module in a gradient mode; return the outcome, the gradients and the random state."""
    args, kwargs = fresh(args), fresh(kwargs)
    given = list(tensors_of((args, kwargs)))
    seed()

    def call() -> Any:
        with MODES[mode]():
            output = module(*args, **kwargs)
            same_object = [any(part is item for item in given) for part in tensors_of(output)]
            differentiate(output)
        return output, same_object

    result = outcome(call)
    grads = [bits(part.grad) for part in given if part.is_leaf]
    return result, grads, [bits(part) for part in given], random_state()


def left_behind(module: nn.Module) -> list[Any]:
    """Return what a user finds in a module and its submodules, private tables included."""
    return [
        (
            name,
            type(each).__name__,
            list(vars(each)),
            {key: type(value).__name__ for key, value in vars(each).items()},
            {key: bits(value) for key, value in each._parameters.items()},
            {key: bits(value) for key, value in each._buffers.items()},
            {k: None if p is None else bits(p.grad) for k, p in each._parameters.items()},
            list(each._modules),
        )
        for name, each in module.named_modules(remove_duplicate=False)
    ]


def compare(scenario: Scenario) -> tuple[Any, Any]:
    """Run the scenario plainly and inside the scope, from the same random state."""
    results = []
    for scope in (plain, fast):
        seed()
        results.append(outcome(lambda scope=scope: scenario(scope)))
    return results[0], results[1]


def same_inside(scenario: Scenario) -> tuple[Any, ...]:
    """Assert that the scenario has the same outcome inside the scope, and return it."""
    expected, actual = compare(scenario)
    assert expected == actual
    return expected


def differing_keys(scenario: Callable[[Scope], dict[str, Any]]) -> list[Any]:
    """Run a scenario that returns labelled results, and name the labels that differ."""
    results = []
    for scope in (plain, fast):
        seed()
        results.append(scenario(scope))
    expected, actual = results
    return [key for key in expected | actual if expected.get(key) != actual.get(key)]


def holder_of(impl: Implementation, inner: nn.Module) -> nn.Module:
    """Hold a module as an attribute of a user's module."""

    class Holder(impl.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    return Holder()
