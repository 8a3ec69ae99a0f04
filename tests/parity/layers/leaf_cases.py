"""The layers whose ``forward`` is modkit's own, with inputs that reach each of its ways."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """How to build one layer, and how to call it."""

    layer: str
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def build(self, nn: Any) -> torch.nn.Module:
        """Build the layer of the namespace ``nn``."""
        return getattr(nn, self.layer)(*self.args, **self.options)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return inputs that are the same in each call."""
        generator = torch.Generator().manual_seed(3)
        if self.layer.startswith("Embedding"):
            return (torch.randint(0, self.args[0], self.shape, generator=generator),)
        count = 2 if self.layer == "Bilinear" else 1
        return tuple(torch.randn(self.shape, generator=generator) for _ in range(count))


LEAVES = {
    "Linear": Leaf("Linear", (3, 4), (2, 3)),
    "Linear-no-bias": Leaf("Linear", (3, 4), (2, 3), {"bias": False}),
    "Bilinear": Leaf("Bilinear", (3, 3, 4), (2, 3)),
    "Bilinear-no-bias": Leaf("Bilinear", (3, 3, 4), (2, 3), {"bias": False}),
    "Conv1d": Leaf("Conv1d", (2, 4, 3), (2, 2, 6)),
    "Conv1d-same": Leaf("Conv1d", (2, 4, 3), (2, 2, 6), {"padding": "same", "bias": False}),
    "Conv2d": Leaf("Conv2d", (2, 4, 3), (2, 2, 6, 6), {"stride": 2, "groups": 2}),
    "Conv2d-circular": Leaf(
        "Conv2d", (2, 4, 3), (2, 2, 6, 6), {"padding": 1, "padding_mode": "circular"}
    ),
    "Conv3d": Leaf("Conv3d", (2, 4, 2), (1, 2, 3, 3, 3), {"dilation": 2}),
    "Conv3d-reflect": Leaf(
        "Conv3d", (2, 4, 2), (1, 2, 3, 3, 3), {"padding": 1, "padding_mode": "reflect"}
    ),
    "ConvTranspose1d": Leaf("ConvTranspose1d", (2, 4, 3), (2, 2, 6)),
    "ConvTranspose1d-size": Leaf(
        "ConvTranspose1d", (2, 4, 3), (2, 2, 6), {"stride": 2}, {"output_size": [14]}
    ),
    "ConvTranspose2d": Leaf(
        "ConvTranspose2d", (2, 4, 3), (2, 2, 4, 4), {"stride": 2, "output_padding": 1}
    ),
    "ConvTranspose2d-bad-size": Leaf(
        "ConvTranspose2d", (2, 4, 3), (2, 2, 4, 4), call={"output_size": [90, 90]}
    ),
    "ConvTranspose3d": Leaf("ConvTranspose3d", (2, 4, 2), (1, 2, 3, 3, 3), {"bias": False}),
    "BatchNorm1d": Leaf("BatchNorm1d", (3,), (4, 3)),
    "BatchNorm1d-cumulative": Leaf("BatchNorm1d", (3,), (4, 3), {"momentum": None}),
    "BatchNorm1d-one-value": Leaf("BatchNorm1d", (3,), (1, 3)),
    "BatchNorm2d": Leaf("BatchNorm2d", (3,), (2, 3, 4, 4), {"momentum": 0.3}),
    "BatchNorm2d-no-affine": Leaf("BatchNorm2d", (3,), (2, 3, 4, 4), {"affine": False}),
    "BatchNorm2d-not-tracked": Leaf(
        "BatchNorm2d", (3,), (2, 3, 4, 4), {"track_running_stats": False}
    ),
    "BatchNorm2d-wrong-input": Leaf("BatchNorm2d", (3,), (2, 3, 4)),
    "BatchNorm3d": Leaf("BatchNorm3d", (3,), (2, 3, 2, 2, 2)),
    "LayerNorm": Leaf("LayerNorm", (3,), (2, 3)),
    "LayerNorm-no-affine": Leaf("LayerNorm", (3,), (2, 3), {"elementwise_affine": False}),
    "RMSNorm": Leaf("RMSNorm", (3,), (2, 3)),
    "GroupNorm": Leaf("GroupNorm", (2, 4), (2, 4, 3)),
    "Embedding": Leaf("Embedding", (5, 3), (2, 4), {"padding_idx": 1}),
    "Embedding-max-norm": Leaf("Embedding", (5, 3), (2, 4), {"max_norm": 0.5}),
    "Embedding-sparse": Leaf("Embedding", (5, 3), (2, 4), {"sparse": True}),
    "EmbeddingBag": Leaf("EmbeddingBag", (5, 3), (2, 4)),
    "EmbeddingBag-offsets": Leaf(
        "EmbeddingBag",
        (5, 3),
        (6,),
        {"mode": "sum", "include_last_offset": True},
        {"offsets": torch.tensor([0, 2, 6]), "per_sample_weights": torch.arange(6.0)},
    ),
    "PReLU": Leaf("PReLU", (3,), (2, 3)),
}

# One case of each layer, for what does not depend on options.
PLAIN = [name for name in LEAVES if "-" not in name]
