"""Models of four libraries are bitwise identical inside and outside `modkit.fast_inference`."""

from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import Tensor

import modkit
from tests.cases import for_each
from tests.helpers import freeze, seed_everything
from tests.integration.fast_inference.zoo import DECODERS, SEQUENCE_TO_SEQUENCE, ZOO, Entry, named
from tests.integration.networks import gradients
from tests.parity.module.module_cases import tensors_of


# Warnings of the libraries about their own code, inside and outside.
pytestmark = pytest.mark.filterwarnings("ignore")

GENERATING: Final = [entry for entry in ZOO if entry.model in {**DECODERS, **SEQUENCE_TO_SEQUENCE}]


class Same:
    """An object that equals itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


def members(model: torch.nn.Module) -> list[tuple[str, str, Same]]:
    """List the attributes of every module in order, and what its tables hold."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in module.__dict__.items():
            found.append((path, name, Same(value)))
            if isinstance(value, dict):
                found += [(path, f"{name}[{key!r}]", Same(item)) for key, item in value.items()]
    return found


def opened(value: Any) -> Any:
    """Replace caches of keys and values by what they hold, so that `freeze` sees the tensors."""
    if isinstance(value, dict):
        return {name: opened(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [opened(item) for item in value]
    if isinstance(value, (Tensor, torch.nn.Module, type)) or not hasattr(value, "__dict__"):
        return value
    return {name: opened(item) for name, item in vars(value).items()}


def bits(value: Any) -> Any:
    """Turn outputs of a model into plain data that compares bit by bit."""
    return freeze(opened(value))


class Ways(NamedTuple):
    """Comparison of results before, inside and after the scope, and of the modules."""

    inside_is_before: bool = True
    after_is_before: bool = True
    modules_are_unchanged: bool = True


def three_ways(model: torch.nn.Module, compute: Any) -> Ways:
    """Compute before, inside and after the scope, and compare.

    Some models replace an attribute at each call, such as the anchors of their boxes.
    """
    before = compute()
    attributes = members(model)
    with modkit.fast_inference(model) as entered:
        inside = compute()
    left = members(model)
    after = compute()
    names = [member[:2] for member in attributes]
    replaced = {old[:2] for old, new in zip(left, members(model), strict=True) if old != new}
    kept = [member for member in attributes if member[:2] not in replaced]
    unchanged = names == [member[:2] for member in left]
    unchanged &= kept == [member for member in left if member[:2] not in replaced]
    return Ways(before == inside, before == after, unchanged and entered is model)


def differentiate(entry: Entry, model: torch.nn.Module) -> Any:
    """Call the model and go back; return outputs and the gradients of inputs and parameters."""
    model.zero_grad()
    inputs = entry.inputs()
    for value in inputs.values():
        value.requires_grad_(value.is_floating_point())
    outputs = entry.call(model, inputs)
    floating = [tensor for tensor in tensors_of(outputs) if tensor.is_floating_point()]
    sum(tensor.square().mean() for tensor in floating).backward()
    return bits([outputs, {name: value.grad for name, value in inputs.items()}, gradients(model)])


def infer(entry: Entry, model: torch.nn.Module) -> Any:
    """Call the model without gradients."""
    with torch.inference_mode():
        outputs = entry.call(model)
    assert all(tensor.isfinite().all() for tensor in tensors_of(outputs))
    assert any(tensor.numel() for tensor in tensors_of(outputs))
    return bits(outputs)


def infer_in_bfloat16(entry: Entry, model: torch.nn.Module) -> Any:
    """Call the model under autocast."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return bits(entry.call(model))


def infer_with_channels_last(entry: Entry, model: torch.nn.Module) -> Any:
    """Call the model with channels last; return outputs and strides."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    inputs = {
        name: value.to(memory_format=torch.channels_last) if value.ndim == 4 else value
        for name, value in entry.inputs().items()
    }
    with torch.inference_mode():
        outputs = entry.call(model, inputs)
    return bits(outputs), [tensor.stride() for tensor in tensors_of(outputs)]


@for_each("compute", [infer, infer_in_bfloat16, infer_with_channels_last, differentiate])
@for_each("entry", ZOO, ids=str)
def test_outputs_and_gradients(entry: Entry, compute: Any) -> None:
    """They are bitwise those of the plain model, which the scope leaves as it was."""
    model = entry.build()
    compute(entry, model)

    assert three_ways(model, lambda: compute(entry, model)) == Ways()


@pytest.mark.parametrize("entry", named("timm-vit_tiny_patch16_224", "timm-resnet18"), ids=str)
def test_gradients_in_training_mode(entry: Entry) -> None:
    """In training mode, dropout masks and statistics are bitwise identical."""
    model, twin = entry.build().train(), entry.build().train()
    expected = [differentiate(entry, twin) for _ in range(2)]
    with modkit.fast_inference(model):
        inside = [differentiate(entry, model) for _ in range(2)]

    assert expected == inside
    assert freeze(twin.state_dict()) == freeze(model.state_dict())


@for_each("entry", GENERATING, ids=str)
def test_generation(entry: Entry) -> None:
    """Tokens are generated with a cache of keys and values, and have the plain model's scores."""
    model = entry.build()
    inputs = {name: x for name, x in entry.inputs().items() if "decoder" not in name}

    def compute() -> Any:
        seed_everything(3)
        generated = model.generate(
            **inputs,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return bits([generated["sequences"], *generated["scores"]])

    compute()
    ways = three_ways(model, compute)

    assert ways == Ways()
