"""Random trees of layers that compute, for sequences inside `modkit.fast_inference`."""

import importlib
from dataclasses import dataclass
from typing import Any, Final

import torch

from tests.property import choices
from tests.property.trees import Builder, Member, ModuleSpec, TensorSpec


# Layers that keep the shape of their input: the class and its arguments, by a short name.
ANY_SHAPE: Final[dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    "relu": ("ReLU", (), {}),
    "relu in place": ("ReLU", (True,), {}),
    "gelu": ("GELU", (), {}),
    "silu": ("SiLU", (), {"inplace": True}),
    "softmax": ("Softmax", (1,), {}),
    "dropout": ("Dropout", (0.5,), {}),
    "identity": ("Identity", (), {}),
    "sigmoid": ("Sigmoid", (), {}),
    "leaky": ("LeakyReLU", (0.1,), {}),
    "hardswish": ("Hardswish", (), {}),
    "prelu": ("PReLU", (), {}),
}
VECTORS: Final[dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    **ANY_SHAPE,
    "linear": ("Linear", (3, 3), {}),
    "linear without bias": ("Linear", (3, 3), {"bias": False}),
    "batch norm 1d": ("BatchNorm1d", (3,), {}),
    "layer norm": ("LayerNorm", (3,), {}),
    "rms norm": ("RMSNorm", (3,), {}),
    "group norm": ("GroupNorm", (1, 3), {}),
    "conv 1d": ("Conv1d", (2, 2, 3), {"padding": 1}),
    "transposed 1d": ("ConvTranspose1d", (2, 2, 1), {}),
    "encoder layer": ("TransformerEncoderLayer", (3, 1, 4), {"batch_first": True}),
}
IMAGES: Final[dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    **ANY_SHAPE,
    "conv 2d": ("Conv2d", (3, 3, 3), {"padding": 1}),
    "conv 2d same": ("Conv2d", (3, 3, 3), {"padding": "same", "bias": False}),
    "conv 2d reflect": ("Conv2d", (3, 3, 3), {"padding": 1, "padding_mode": "reflect"}),
    "depthwise": ("Conv2d", (3, 3, 1), {"groups": 3}),
    "transposed 2d": ("ConvTranspose2d", (3, 3, 1), {}),
    "batch norm 2d": ("BatchNorm2d", (3,), {}),
    "batch norm 2d of the batch": ("BatchNorm2d", (3,), {"track_running_stats": False}),
    "instance norm": ("InstanceNorm2d", (3,), {"affine": True}),
    "group norm 2d": ("GroupNorm", (3, 3), {}),
    "layer norm 2d": ("LayerNorm", (4,), {}),
    "pool": ("AvgPool2d", (3, 1, 1), {}),
    "max pool": ("MaxPool2d", (3, 1, 1), {}),
    "dropout 2d": ("Dropout2d", (0.5,), {}),
    "upsample": ("Upsample", (), {"scale_factor": 1}),
}
LAYERS: Final = {**VECTORS, **IMAGES}
NODES: Final = ("Reader", "Forwarding")

vectors = choices.builds(ModuleSpec, choices.sampled_from(sorted(VECTORS)))
images = choices.builds(ModuleSpec, choices.sampled_from(sorted(IMAGES)))


@dataclass(frozen=True)
class Tree:
    """A tree, and the shape of the input that its layers take."""

    spec: ModuleSpec
    shape: tuple[int, ...]

    @property
    def layers(self) -> choices.Choice[ModuleSpec]:
        """Draw a layer that fits into the tree."""
        return vectors if self.shape == (2, 3) else images


class ScopedBuilder(Builder):
    """Builds the layers and nodes of this file as well as those of `trees`."""

    def _bare(self, spec: ModuleSpec) -> Any:
        if spec.kind in LAYERS:
            name, arguments, options = LAYERS[spec.kind]
            return getattr(self.impl.nn, name)(*arguments, **options)
        if spec.kind in NODES:
            home = importlib.import_module(f"tests.property.nodes_{self.impl.name}")
            return getattr(home, spec.kind)()
        return super()._bare(spec)


@choices.composite
def modules(draw: choices.Draw, layers: choices.Choice[ModuleSpec], depth: int) -> ModuleSpec:
    """Draw a layer, a container of layers, or a user's module around some."""
    kinds = ["layer", "Sequential", "Sequential", "Reader", "Forwarding", "Node"]
    kind = draw(choices.sampled_from(kinds)) if depth else "layer"
    if kind == "layer":
        return draw(layers)
    below = modules(layers, depth - 1)
    if kind == "Sequential":
        return ModuleSpec(kind, children=tuple(draw(choices.lists(below, min_size=1, max_size=4))))
    scale = Member(
        "parameter", "scale", TensorSpec((), torch.float32, draw(choices.integers(4, 12)))
    )
    if kind == "Forwarding":
        scales = draw(choices.sampled_from([(), (scale,), (scale,), (scale,)]))
        return ModuleSpec(kind, members=(*scales, Member("child", "inner", draw(below))))
    if kind == "Node":
        children = draw(choices.lists(below, min_size=1, max_size=2))
        named = [Member("child", f"m{number}", child) for number, child in enumerate(children)]
        return ModuleSpec(kind, members=(*named, scale))
    more = ModuleSpec("ModuleList", children=tuple(draw(choices.lists(below, max_size=2))))
    members = (
        Member("child", "inner", draw(below)),
        Member("child", "act", draw(layers)),
        Member("child", "more", more),
        scale,
        Member("buffer", "shift", TensorSpec((), torch.float32, draw(choices.integers(-4, 4)))),
    )
    return ModuleSpec(kind, members=members)


@choices.composite
def trees(draw: choices.Draw) -> Tree:
    """Draw a tree of layers for vectors or for images."""
    shape, layers = draw(choices.sampled_from([((2, 3), vectors), ((2, 3, 4, 4), images)]))
    return Tree(draw(modules(layers, 3)), shape)
