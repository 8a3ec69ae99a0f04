"""A layer for each function of `torch.nn.functional` that torch's layers call."""

from typing import Any

import torch
from torch import nn


X1 = (2, 4, 6)
X2 = (2, 4, 6, 6)
ROW = (3, 6)

# The function: what makes a layer that calls it, and the shape of an input.
FUNCTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), ROW),
    "conv2d": (lambda: nn.Conv2d(4, 3, 2), X2),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 3, 2), X2),
    "pad": (lambda: nn.Conv2d(4, 3, 2, padding=1, padding_mode="circular"), X2),
    "batch_norm": (lambda: nn.BatchNorm2d(4), X2),
    "instance_norm": (lambda: nn.InstanceNorm2d(4), X2),
    "layer_norm": (lambda: nn.LayerNorm(6), ROW),
    "rms_norm": (lambda: nn.RMSNorm(6), ROW),
    "group_norm": (lambda: nn.GroupNorm(2, 4), X2),
    "dropout": (lambda: nn.Dropout(0.3), ROW),
    "alpha_dropout": (lambda: nn.AlphaDropout(0.3), ROW),
    "relu": (nn.ReLU, ROW),
    "hardtanh": (nn.Hardtanh, ROW),
    "gelu": (nn.GELU, ROW),
    "glu": (nn.GLU, ROW),
    "leaky_relu": (nn.LeakyReLU, ROW),
    "prelu": (nn.PReLU, ROW),
    "softplus": (nn.Softplus, ROW),
    "softmax": (lambda: nn.Softmax(-1), ROW),
    "log_softmax": (lambda: nn.LogSoftmax(-1), ROW),
    "max_pool2d": (lambda: nn.MaxPool2d(2), X2),
    "lp_pool2d": (lambda: nn.LPPool2d(2, 2), X2),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d(2), X2),
    "interpolate": (lambda: nn.Upsample(scale_factor=2), X2),
}

# Layers that call a tensor's method, or a function of `torch` itself.
OTHERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Identity": (nn.Identity, ROW),
    "Flatten": (nn.Flatten, X2),
    "Tanh": (nn.Tanh, ROW),
    "BatchNorm1d, three": (lambda: nn.BatchNorm1d(4), X1),
    "BatchNorm2d, plain": (lambda: nn.BatchNorm2d(4, affine=False), X2),
    "BatchNorm2d, no statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), X2),
    "BatchNorm2d, cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), X2),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), X2),
    "InstanceNorm2d, tracked": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        X2,
    ),
    "InstanceNorm2d, no batch": (lambda: nn.InstanceNorm2d(4), X2[1:]),
    "InstanceNorm2d, other channels": (lambda: nn.InstanceNorm2d(3), X2),
    "GroupNorm, one value": (lambda: nn.GroupNorm(2, 2), (1, 2)),
    "GroupNorm, no affine": (lambda: nn.GroupNorm(2, 4, affine=False), X2),
    "LayerNorm, two": (lambda: nn.LayerNorm((6, 6)), X2),
    "Linear, no bias": (lambda: nn.Linear(6, 5, bias=False), ROW),
    "Conv2d, same": (lambda: nn.Conv2d(4, 4, 3, padding="same"), X2),
    "Conv2d, reflect": (
        lambda: nn.Conv2d(4, 3, 2, padding=(1, 2), padding_mode="reflect"),
        X2,
    ),
    "Conv1d, no batch": (lambda: nn.Conv1d(4, 3, 2), X1[1:]),
    "ConvTranspose2d, strided": (
        lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
        X2,
    ),
    "ReLU, in place": (lambda: nn.ReLU(inplace=True), ROW),
    "Dropout, in place": (lambda: nn.Dropout(0.3, inplace=True), ROW),
    "Softmax, no dim": (nn.Softmax, ROW),
    "MaxPool2d, indices": (lambda: nn.MaxPool2d(2, return_indices=True), X2),
    "LSTM": (lambda: nn.LSTM(6, 3), X1),
    "GRU, two layers": (lambda: nn.GRU(6, 3, 2, bidirectional=True, batch_first=True), X1),
    "LSTMCell": (lambda: nn.LSTMCell(6, 3), ROW),
    "GRUCell": (lambda: nn.GRUCell(6, 3), ROW),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        X1,
    ),
    "Embedding": (lambda: nn.Embedding(9, 4), (2, 3)),
    "Embedding, padded": (lambda: nn.Embedding(9, 4, padding_idx=1), (2, 3)),
    "Embedding, renormalized": (lambda: nn.Embedding(9, 4, max_norm=0.5), (2, 3)),
}


def input_for(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Make an input of a shape: indices for embeddings."""
    generator = torch.Generator().manual_seed(11)
    if name.startswith("Embedding"):
        return torch.randint(0, 9, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)
