"""One small instance of every layer class of torch.nn, and torch's own table of cases."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modkit.nn._layers import REBASED, rebase, rebase_children
from modkit.nn.modules._newer import layer_class
from tests.helpers import MODKIT, TORCH, Implementation, outcome


with warnings.catch_warnings():
    # What torch's test utilities import warns of its own deprecations.
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import ModuleInfo, module_db

MODULE_DB: list[ModuleInfo] = module_db

# Layer classes that the table leaves out: constructor arguments and forward arguments.
_EXTRA: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = {
    "AdaptiveLogSoftmaxWithLoss": (
        (32, 10),
        {"cutoffs": [3, 6]},
        (torch.ones(4, 32), torch.tensor([0, 4, 7, 9])),
    ),
    "AlphaDropout": ((), {}, (torch.ones(2, 3),)),
    "ChannelShuffle": ((2,), {}, (torch.ones(1, 4, 2, 2),)),
    "CosineSimilarity": ((), {}, (torch.ones(2, 3), torch.ones(2, 3))),
    "CrossMapLRN2d": ((2,), {}, (torch.ones(1, 4, 2, 2),)),
    "Dropout": ((), {}, (torch.ones(2, 3),)),
    "Dropout1d": ((), {}, (torch.ones(2, 3, 4),)),
    "Dropout2d": ((), {}, (torch.ones(2, 3, 4, 4),)),
    "Dropout3d": ((), {}, (torch.ones(2, 3, 4, 4, 4),)),
    "EmbeddingBag": ((5, 3), {}, (torch.tensor([[0, 1], [2, 4]]),)),
    "FeatureAlphaDropout": ((), {}, (torch.ones(2, 3),)),
    "Flatten": ((), {}, (torch.ones(2, 3, 4),)),
    "Fold": (((4, 4), (2, 2)), {}, (torch.ones(1, 8, 9),)),
    # The table gives these two samples of another dtype than the input.
    "FractionalMaxPool2d": ((2,), {"output_ratio": 0.5}, (torch.ones(1, 2, 8, 8),)),
    "FractionalMaxPool3d": ((2,), {"output_ratio": 0.5}, (torch.ones(1, 2, 8, 8, 8),)),
    "Hardsigmoid": ((), {}, (torch.ones(2, 3),)),
    "Identity": ((), {}, (torch.ones(2, 3),)),
    "LazyBatchNorm1d": ((), {}, (torch.ones(2, 3),)),
    "LazyBatchNorm2d": ((), {}, (torch.ones(2, 3, 4, 4),)),
    "LazyBatchNorm3d": ((), {}, (torch.ones(2, 3, 4, 4, 4),)),
    "LazyInstanceNorm1d": ((), {"affine": True}, (torch.ones(2, 3, 4),)),
    "LazyInstanceNorm2d": ((), {"affine": True}, (torch.ones(2, 3, 4, 4),)),
    "LazyInstanceNorm3d": ((), {"affine": True}, (torch.ones(2, 3, 4, 4, 4),)),
    "LazyLinear": ((2,), {}, (torch.ones(2, 3),)),
    "MaxUnpool1d": ((2,), {}, (torch.ones(1, 1, 2), torch.tensor([[[1, 3]]]))),
    "MaxUnpool2d": ((2,), {}, (torch.ones(1, 1, 1, 2), torch.tensor([[[[0, 3]]]]))),
    "MaxUnpool3d": ((2,), {}, (torch.ones(1, 1, 1, 1, 2), torch.tensor([[[[[0, 3]]]]]))),
    "ModuleDict": (({"a": nn.Linear(2, 3), "b": nn.ReLU()},), {}, ()),
    "ModuleList": (([nn.Linear(2, 3), nn.ReLU()],), {}, ()),
    "PairwiseDistance": ((), {}, (torch.ones(2, 3), torch.zeros(2, 3))),
    "ParameterDict": (({"a": torch.ones(2), "b": torch.zeros(3)},), {}, ()),
    "ParameterList": (([torch.ones(2), torch.zeros(3)],), {}, ()),
    "PixelShuffle": ((2,), {}, (torch.ones(1, 4, 2, 2),)),
    "PixelUnshuffle": ((2,), {}, (torch.ones(1, 1, 4, 4),)),
    "RNNBase": (("LSTM", 3, 4), {}, ()),
    "RNNCellBase": ((3, 4, True, 2), {}, ()),
    "RReLU": ((), {}, (-torch.ones(2, 3),)),
    "Sequential": ((nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), {}, (torch.ones(2, 3),)),
    "SyncBatchNorm": ((3,), {}, ()),
    # The table's cases of these two warn that nested tensors cannot be used.
    "Transformer": (
        (4, 2, 1, 1, 8, 0.0),
        {"batch_first": True},
        (torch.ones(1, 3, 4), torch.ones(1, 2, 4)),
    ),
    "TransformerEncoder": (
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2),
        {},
        (torch.ones(1, 3, 4),),
    ),
    "TransformerDecoder": (
        (nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0), 2),
        {},
        (torch.ones(3, 1, 4), torch.ones(2, 1, 4)),
    ),
    "TripletMarginLoss": ((), {}, (torch.ones(2, 3), torch.zeros(2, 3), -torch.ones(2, 3))),
    "TripletMarginWithDistanceLoss": (
        (),
        {},
        (torch.ones(2, 3), torch.zeros(2, 3), -torch.ones(2, 3)),
    ),
    "Unflatten": ((1, (2, 2)), {}, (torch.ones(2, 4),)),
    "Unfold": (((2, 2),), {}, (torch.ones(1, 2, 4, 4),)),
    "Upsample": ((), {"scale_factor": 2}, (torch.ones(1, 2, 3),)),
    "UpsamplingBilinear2d": ((), {"scale_factor": 2}, (torch.ones(1, 2, 3, 3),)),
    "UpsamplingNearest2d": ((), {"scale_factor": 2}, (torch.ones(1, 2, 3, 3),)),
}

# Deprecated, abstract, or in need of a process group or several devices: tested on their own.
_APART = {"Container", "NLLLoss2d", "Module", "DataParallel"}


def seed(number: int = 0) -> None:
    """Reset the random state of the CPU. ``torch.manual_seed`` formats a stack trace each time."""
    torch.default_generator.manual_seed(number)


def public_layers() -> dict[str, type[nn.Module]]:
    """Return every public module class of the installed ``torch.nn`` by its name."""
    return {
        name: value
        for name, value in vars(nn).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and not name.startswith("_")
    }


def with_bases(layer: type[nn.Module]) -> Iterator[type[nn.Module]]:
    """Yield a layer class and those of its bases that are module classes, without ``Module``."""
    yield from (c for c in layer.__mro__ if issubclass(c, nn.Module) and c is not nn.Module)


def adapt(impl: Implementation, value: Any) -> Any:
    """Copy a constructor argument; modules in it are turned into those of ``impl``."""
    if isinstance(value, (list, tuple)):
        return type(value)(adapt(impl, item) for item in value)
    if isinstance(value, dict):
        return {key: adapt(impl, item) for key, item in value.items()}
    value = copy.deepcopy(value)
    if impl is MODKIT and isinstance(value, nn.Module):
        rebase_children(value)
        return rebase(value)
    return value


@dataclass(frozen=True)
class Sample:
    """How to build one layer, and what to call it with."""

    layer: type[nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[Any, ...] = ()
    input_kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self, impl: Implementation, start: int = 0) -> Any:
        """Build the layer in one of the implementations, from the random state ``start``."""
        args, kwargs = adapt(impl, self.args), adapt(impl, self.kwargs)
        layer: Any = layer_class(self.layer) if impl is MODKIT else self.layer
        seed(start)
        return layer(*args, **kwargs)


@functools.cache
def samples() -> dict[str, Sample]:
    """Return one sample for every public layer class, by its name."""
    found = {
        name: Sample(getattr(nn, name), args, kwargs, inputs)
        for name, (args, kwargs, inputs) in _EXTRA.items()
    }
    for info in MODULE_DB:
        name = info.module_cls.__name__
        if name not in found and info.module_cls.__module__.startswith("torch.nn."):
            seed()
            case = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
            )[0]
            made, called = case.constructor_input, case.forward_input
            found[name] = Sample(
                info.module_cls, made.args, made.kwargs, called.args, called.kwargs
            )
    missing = set(public_layers()) - set(found) - _APART
    if missing:
        raise LookupError(f"no sample for {sorted(missing)}")
    return dict(sorted(found.items()))


def torch_names(text: object) -> str:
    """Write modkit's class paths in a text as torch's, so that the two can be compared."""
    return str(text).replace("modkit.nn.", "torch.nn.")


def both(scenario: Callable[[Implementation], Any]) -> tuple[str, str]:
    """Return the outcomes on torch and on modkit, with class paths in texts made equal."""
    return torch_names(outcome(scenario, TORCH)), torch_names(outcome(scenario, MODKIT))


def modkit_of(torch_class: type) -> type:
    """Return the modkit class that stands for a class of torch; other classes stand for themselves."""
    if torch_class is nn.Module:
        return MODKIT.nn.Module
    return REBASED.get(torch_class, torch_class)
