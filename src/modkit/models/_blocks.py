"""What the networks of EfficientZero are built from: residual blocks, heads, and their checks."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from modkit import nn
from modkit._messages import add_note
from modkit._upstream import get_tracing_state


NORM_TYPES: Final = ["BN", "LN"]

# The defaults that LightZero's signatures show. The networks never change the list, and put a module
# of their own in the place of this one: LightZero's is shared by all networks of a process, so a
# hook on the activation of one of them runs in the others.
ONE_HIDDEN_LAYER: Final[Sequence[int]] = [32]
DEFAULT_ACTIVATION: Final[nn.Module] = nn.ReLU(inplace=True)


def own_activation(activation: nn.Module | None) -> Any:
    """Return the given activation, or a fresh one where the default was left as it is."""
    return nn.ReLU(inplace=True) if activation is DEFAULT_ACTIVATION else activation


def check_norm_type(owner: nn.Module, norm_type: str | None) -> None:
    """Raise LightZero's error unless the normalization is one of the two there are."""
    if norm_type not in NORM_TYPES:
        error = AssertionError(f"norm_type must in {NORM_TYPES}")
        add_note(error, f"{type(owner).__name__} was given norm_type={norm_type!r}")
        raise error


def renamed(
    owner: str, old: str, value: object, default: object, new: str, alias: object | None
) -> object:
    """Return what was given under the new name of an argument, or else under the old one.

    Raises:
        TypeError: Both were given.
    """
    if alias is None:
        return value
    if value is not default:
        raise TypeError(f"{owner}: {new}={alias!r} is {old}={value!r} by its newer name; give one")
    return alias


def latent_size(observation_shape: Sequence[int], *, downsample: bool) -> list[int]:
    """Return the height and width that LayerNorm expects in heads, for a given observation.

    A downsampled observation counts as 16 times smaller, whatever its size, as in LightZero.
    """
    height, width = observation_shape[-2], observation_shape[-1]
    return [-(-height // 16), -(-width // 16)] if downsample else [height, width]


def norm_of_planes(
    norm_type: str | None, channels: int, observation_shape: Sequence[int], *, downsample: bool
) -> nn.Module:
    """Make the normalization of feature planes; only LayerNorm has to know how large they are."""
    if norm_type == "BN":
        return nn.BatchNorm2d(channels)
    return nn.LayerNorm([channels, *latent_size(observation_shape, downsample=downsample)])


def convolution(
    in_channels: int,
    out_channels: int,
    norm_type: str | None,
    activation: nn.Module | None = None,
    stride: int = 1,
) -> nn.Sequential:
    """Make a 3x3 convolution with its normalization, and the activation if there is one.

    In residual blocks "LN" is a GroupNorm with one group, which needs no size of the planes.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels) if norm_type == "BN" else nn.GroupNorm(1, out_channels),
    ]
    return nn.Sequential(*layers if activation is None else (*layers, activation))


class ResBlock(nn.Module):
    """Two convolutions beside a shortcut, with the activation after their sum."""

    def __init__(
        self, channels: int, activation: nn.Module | None, norm_type: str | None = "BN"
    ) -> None:
        super().__init__()
        self.act: Any = activation
        self.conv1 = convolution(channels, channels, norm_type, activation)
        self.conv2 = convolution(channels, channels, norm_type)

    def forward(self, x: Tensor) -> Tensor:
        """Map planes (batch, channels, height, width) to as many of the same size."""
        x = self.act(self.conv2(self.conv1(x)) + x)
        return x  # noqa: RET504 - typed, without a cast that TorchScript would refuse


class DownsampleBlock(nn.Module):
    """A residual block that halves height and width; its shortcut is a convolution without norm."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        activation: nn.Module | None,
        norm_type: str | None = "BN",
    ) -> None:
        super().__init__()
        self.act: Any = activation
        self.conv1 = convolution(in_channels, out_channels, norm_type, activation, stride=2)
        self.conv2 = convolution(out_channels, out_channels, norm_type)
        self.conv3 = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map planes (batch, in, height, width) to (batch, out, height / 2, width / 2)."""
        x = self.act(self.conv2(self.conv1(x)) + self.conv3(x))
        return x  # noqa: RET504 - as above


def head(
    owner: nn.Module,
    in_features: int,
    hidden: tuple[str, Sequence[int]],
    out_features: int,
    activation: nn.Module | None,
    norm_type: str | None,
    *,
    zero_last_layer: bool,
) -> nn.Sequential:
    """Make the layers that turn the features of a sample into the logits of a distribution.

    Args:
        owner: The network, for errors.
        in_features: How many features a sample has.
        hidden: The argument's name and value. As in LightZero, its length is the number of hidden
            layers, and its first element the width of all of them.
        out_features: The number of logits.
        activation: What follows the normalization of each hidden layer.
        norm_type: "BN" or "LN".
        zero_last_layer: Whether the logits are to be zero at first. Random numbers are drawn alike.

    Raises:
        IndexError: There is no hidden layer.
    """
    name, widths = hidden
    if len(widths) == 0:
        raise IndexError(f"{type(owner).__name__}: {name}={widths!r} needs at least one width")
    width = widths[0]
    layers: list[nn.Module] = []
    for features in [in_features, *[width] * (len(widths) - 1)]:
        norm = nn.BatchNorm1d(width) if norm_type == "BN" else nn.LayerNorm(width)
        layers += [nn.Linear(features, width), norm]
        if activation is not None:
            layers.append(activation)
    last = nn.Linear(width, out_features)
    if zero_last_layer:
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def check_features(owner: nn.Module, name: str, size: int, features: object) -> None:
    """Raise unless each sample has as many features as the layer after them takes.

    LightZero reshapes to rows of ``size`` instead, which may mix the samples of a batch. Without a
    tensor to look at, while fx or ``torch.jit.trace`` record, the layer itself does the check.
    """
    if not isinstance(features, Tensor) or get_tracing_state():
        return
    planes = features.shape[1:]
    if planes.numel() != size:
        shape = "x".join(str(length) for length in planes)
        message = (
            f"{type(owner).__name__}: the head gets {shape} = {planes.numel()} features a sample, "
            f"but {name}={size}"
        )
        raise RuntimeError(message)


def mean_of_absolutes(tensors: Sequence[Tensor]) -> float:
    """Return the mean of the absolute values of all elements."""
    total = sum(tensor.detach().abs().sum(dtype=torch.float64).item() for tensor in tensors)
    return float(total) / sum(tensor.numel() for tensor in tensors)
