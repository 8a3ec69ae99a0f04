"""A layer for each function of `torch.nn.functional` that torch's layers call."""

from typing import Any

import torch
from torch import nn


X1 = (2, 4, 6)
X2 = (2, 4, 6, 6)
X3 = (1, 2, 4, 4, 4)
ROW = (3, 6)

# The function: what makes a layer that calls it, and the shape of an input.
FUNCTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), ROW),
    "conv1d": (lambda: nn.Conv1d(4, 3, 2), X1),
    "conv2d": (lambda: nn.Conv2d(4, 3, 2), X2),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), X3),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 3, 2), X1),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 3, 2), X2),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), X3),
    "pad": (lambda: nn.Conv2d(4, 3, 2, padding=1, padding_mode="circular"), X2),
    "batch_norm": (lambda: nn.BatchNorm2d(4), X2),
    "instance_norm": (lambda: nn.InstanceNorm2d(4), X2),
    "layer_norm": (lambda: nn.LayerNorm(6), ROW),
    "rms_norm": (lambda: nn.RMSNorm(6), ROW),
    "group_norm": (lambda: nn.GroupNorm(2, 4), X2),
    "local_response_norm": (lambda: nn.LocalResponseNorm(2), X2),
    "dropout": (lambda: nn.Dropout(0.3), ROW),
    "dropout1d": (lambda: nn.Dropout1d(0.3), X1),
    "dropout2d": (lambda: nn.Dropout2d(0.3), X2),
    "dropout3d": (lambda: nn.Dropout3d(0.3), X3),
    "alpha_dropout": (lambda: nn.AlphaDropout(0.3), ROW),
    "feature_alpha_dropout": (lambda: nn.FeatureAlphaDropout(0.3), X2),
    "relu": (nn.ReLU, ROW),
    "relu6": (nn.ReLU6, ROW),
    "hardtanh": (nn.Hardtanh, ROW),
    "hardswish": (nn.Hardswish, ROW),
    "hardsigmoid": (nn.Hardsigmoid, ROW),
    "hardshrink": (nn.Hardshrink, ROW),
    "elu": (nn.ELU, ROW),
    "selu": (nn.SELU, ROW),
    "celu": (nn.CELU, ROW),
    "gelu": (nn.GELU, ROW),
    "glu": (nn.GLU, ROW),
    "silu": (nn.SiLU, ROW),
    "mish": (nn.Mish, ROW),
    "leaky_relu": (nn.LeakyReLU, ROW),
    "rrelu": (nn.RReLU, ROW),
    "prelu": (nn.PReLU, ROW),
    "softplus": (nn.Softplus, ROW),
    "softshrink": (nn.Softshrink, ROW),
    "softsign": (nn.Softsign, ROW),
    "softmax": (lambda: nn.Softmax(-1), ROW),
    "softmin": (lambda: nn.Softmin(-1), ROW),
    "log_softmax": (lambda: nn.LogSoftmax(-1), ROW),
    "logsigmoid": (nn.LogSigmoid, ROW),
    "tanhshrink": (nn.Tanhshrink, ROW),
    "threshold": (lambda: nn.Threshold(0.1, 2.0), ROW),
    "max_pool1d": (lambda: nn.MaxPool1d(2), X1),
    "max_pool2d": (lambda: nn.MaxPool2d(2), X2),
    "max_pool3d": (lambda: nn.MaxPool3d(2), X3),
    "avg_pool1d": (lambda: nn.AvgPool1d(2), X1),
    "avg_pool2d": (lambda: nn.AvgPool2d(2), X2),
    "avg_pool3d": (lambda: nn.AvgPool3d(2), X3),
    "lp_pool1d": (lambda: nn.LPPool1d(2, 2), X1),
    "lp_pool2d": (lambda: nn.LPPool2d(2, 2), X2),
    "adaptive_avg_pool1d": (lambda: nn.AdaptiveAvgPool1d(2), X1),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d(2), X2),
    "adaptive_max_pool1d": (lambda: nn.AdaptiveMaxPool1d(2), X1),
    "adaptive_max_pool2d": (lambda: nn.AdaptiveMaxPool2d(2), X2),
    "interpolate": (lambda: nn.Upsample(scale_factor=2), X2),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), X2),
    "pixel_unshuffle": (lambda: nn.PixelUnshuffle(2), X2),
    "channel_shuffle": (lambda: nn.ChannelShuffle(2), X2),
    "unfold": (lambda: nn.Unfold(2), X2),
    "fold": (lambda: nn.Fold((3, 3), (2, 2)), (1, 4, 4)),
}

# Layers that call a tensor's method, or a function of `torch` itself.
OTHERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "Identity": (nn.Identity, ROW),
    "Flatten": (nn.Flatten, X2),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), X2),
    "Tanh": (nn.Tanh, ROW),
    "Sigmoid": (nn.Sigmoid, ROW),
    "Softmax2d": (nn.Softmax2d, X2),
    "UpsamplingBilinear2d": (lambda: nn.UpsamplingBilinear2d(scale_factor=2), X2),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), ROW),
    "BatchNorm1d, three": (lambda: nn.BatchNorm1d(4), X1),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), X3),
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
    "LayerNorm, no bias": (lambda: nn.LayerNorm(6, bias=False), ROW),
    "LayerNorm, two": (lambda: nn.LayerNorm((6, 6)), X2),
    "RMSNorm, eps": (lambda: nn.RMSNorm(6, eps=0.1), ROW),
    "Linear, no bias": (lambda: nn.Linear(6, 5, bias=False), ROW),
    "Conv2d, same": (lambda: nn.Conv2d(4, 4, 3, padding="same"), X2),
    "Conv2d, valid": (lambda: nn.Conv2d(4, 4, 3, padding="valid"), X2),
    "Conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), X2),
    "Conv2d, strided": (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2), X2),
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
    "SiLU, in place": (lambda: nn.SiLU(inplace=True), ROW),
    "Dropout, in place": (lambda: nn.Dropout(0.3, inplace=True), ROW),
    "Softmax, no dim": (nn.Softmax, ROW),
    "GELU, tanh": (lambda: nn.GELU(approximate="tanh"), ROW),
    "MaxPool2d, indices": (lambda: nn.MaxPool2d(2, return_indices=True), X2),
    "LSTM": (lambda: nn.LSTM(6, 3), X1),
    "GRU, two layers": (lambda: nn.GRU(6, 3, 2, bidirectional=True, batch_first=True), X1),
    "LSTMCell": (lambda: nn.LSTMCell(6, 3), ROW),
    "GRUCell": (lambda: nn.GRUCell(6, 3), ROW),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        X1,
    ),
    "CircularPad2d": (lambda: nn.CircularPad2d(1), X2),
    "ConstantPad2d": (lambda: nn.ConstantPad2d(1, 3.0), X2),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), X2),
    "Embedding": (lambda: nn.Embedding(9, 4), (2, 3)),
    "Embedding, padded": (lambda: nn.Embedding(9, 4, padding_idx=1), (2, 3)),
    "Embedding, renormalized": (lambda: nn.Embedding(9, 4, max_norm=0.5), (2, 3)),
    "Embedding, sparse": (lambda: nn.Embedding(9, 4, sparse=True), (2, 3)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, 4), (2, 3)),
}


def input_for(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Make an input of a shape: indices for embeddings."""
    generator = torch.Generator().manual_seed(11)
    if name.startswith("Embedding"):
        return torch.randint(0, 9, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)
