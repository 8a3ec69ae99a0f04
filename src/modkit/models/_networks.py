"""The networks of EfficientZero, and the blocks and heads that they are built from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from modkit import nn


if TYPE_CHECKING:
    import numpy as np

    from modkit.models.efficientzero import EfficientZeroConfig

# LightZero's activation is shared by all networks of a process, so a hook on one activation runs in
# every network. Each model replaces this one by an activation of its own.
DEFAULT_ACTIVATION: Final[nn.Module] = nn.ReLU(inplace=True)
# The height of an observation, and how many times smaller downsampling makes it.
REDUCTIONS: Final = {64: 8, 84: 16, 96: 16}
# LightZero's default.
ONE_HIDDEN_LAYER: Final[Sequence[int]] = [32]


def own_activation(activation: nn.Module | None) -> Any:
    """Return the activation of a network: a new ReLU in the place of ``DEFAULT_ACTIVATION``."""
    # In place as in LightZero, although full backward hooks refuse that: another argument helps.
    return nn.ReLU(inplace=True) if activation is DEFAULT_ACTIVATION else activation


def reduction(observation_shape: Sequence[int]) -> int:
    """Return how many times smaller downsampling makes an observation."""
    height = observation_shape[1]
    if height not in REDUCTIONS:
        raise NotImplementedError(
            f"observation_shape={observation_shape!r} cannot be downsampled; the height has to be "
            f"one of {list(REDUCTIONS)}"
        )
    return REDUCTIONS[height]


def mean_magnitude(tensors: Sequence[Tensor]) -> float:
    """Return the mean absolute value of all elements, computed in double precision."""
    total = sum(tensor.detach().abs().sum(dtype=torch.float64).item() for tensor in tensors)
    return float(total) / sum(tensor.numel() for tensor in tensors)


class Layers:
    """Makes the layers of a network, which share an activation and the kind of their norms."""

    def __init__(
        self, norm_type: str | None, activation: nn.Module | None, shape: Sequence[int]
    ) -> None:
        if norm_type not in ("BN", "LN"):
            # In LightZero's words.
            raise AssertionError("norm_type must in ['BN', 'LN']")
        self.norm_type = norm_type
        self.activation: Any = own_activation(activation)
        self.shape = shape

    def norm(self, channels: int, factor: int = 1) -> nn.Module:
        """Make the norm of planes that are smaller than ``shape`` by a factor."""
        if self.norm_type == "BN":
            return nn.BatchNorm2d(channels)
        # Rounded up, as by halvings with kernel 3, stride 2 and padding 1.
        height, width = -(-self.shape[-2] // factor), -(-self.shape[-1] // factor)
        return nn.LayerNorm([channels, height, width])

    def convolution(self, in_channels: int, out_channels: int, stride: int = 1) -> list[nn.Module]:
        """Make a 3x3 convolution of a residual block, where "LN" is a GroupNorm with one group."""
        conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        is_batch_norm = self.norm_type == "BN"
        norm = nn.BatchNorm2d(out_channels) if is_batch_norm else nn.GroupNorm(1, out_channels)
        return [conv, norm]

    def blocks(self, number: int, channels: int) -> nn.ModuleList:
        """Make residual blocks."""
        return nn.ModuleList([ResBlock(self, channels, channels) for _ in range(number)])

    def head(self, widths: Sequence[int], features: int, logits: int, zero: bool) -> nn.Sequential:
        """Make the layers from features to logits, which are zero at first if ``zero``."""
        # As in LightZero, all hidden layers are as wide as the first.
        width = widths[0]
        layers: list[nn.Module] = []
        for in_features in [features, *[width] * (len(widths) - 1)]:
            norm = nn.BatchNorm1d(width) if self.norm_type == "BN" else nn.LayerNorm(width)
            layers += [nn.Linear(in_features, width), norm, self.activation]

        # The same random numbers are drawn in either case.
        last = nn.Linear(width, logits)
        if zero:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        return nn.Sequential(*layers, last)


class ResBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution if ``stride=2``."""

    # TorchScript takes a Final attribute for a constant, and so compiles only the branch in use.
    _downsamples: Final[bool]

    def __init__(self, layers: Layers, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self._downsamples = stride > 1
        # Annotated, since type checkers take each attribute of a module for a Tensor or a Module.
        self.act: Any = layers.activation
        first = layers.convolution(channels, out_channels, stride)
        self.conv1: nn.Sequential = nn.Sequential(*first, layers.activation)
        self.conv2: nn.Sequential = nn.Sequential(*layers.convolution(out_channels, out_channels))

        # The shortcut has no norm, and is in a container of its own, as its keys in LightZero say.
        if stride > 1:
            conv = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
            self.conv3: nn.Sequential = nn.Sequential(conv)

    def forward(self, x: Tensor) -> Tensor:
        """Map planes (batch, channels, height, width) to (batch, out_channels, ...)."""
        shortcut = self.conv3(x) if self._downsamples else x
        x = self.act(self.conv2(self.conv1(x)) + shortcut)
        return x  # noqa: RET504 - typed, without a cast that TorchScript would refuse


class DownSample(nn.Module):
    """Make observations 16 times smaller, or 8 times if they are 64 pixels high."""

    _pools_twice: Final[bool]

    def __init__(self, config: "EfficientZeroConfig") -> None:
        super().__init__()
        self.observation_shape: Any = config.image_shape
        self._pools_twice = reduction(config.image_shape) == 16
        in_channels, height, width = config.image_shape
        channels = config.num_channels
        half = channels // 2
        # Rounded down, and the convolution rounds up: with LayerNorm, the width must be even.
        layers = Layers(config.norm_type, config.activation, [height // 2, width // 2])

        # Two strides and a pooling make planes 8 times smaller, and the second pooling 16 times.
        self.conv1: nn.Conv2d = nn.Conv2d(in_channels, half, 3, stride=2, padding=1, bias=False)
        self.norm1: nn.Module = layers.norm(half)
        self.resblocks1: nn.ModuleList = layers.blocks(1, half)
        self.downsample_block: ResBlock = ResBlock(layers, half, channels, stride=2)
        self.resblocks2: nn.ModuleList = layers.blocks(1, channels)
        self.pooling1: nn.AvgPool2d = nn.AvgPool2d(3, stride=2, padding=1)
        self.resblocks3: nn.ModuleList = layers.blocks(1, channels)
        self.pooling2: nn.AvgPool2d = nn.AvgPool2d(3, stride=2, padding=1)
        self.activation: Any = layers.activation

    def forward(self, x: Tensor) -> Tensor:
        """Map observations (batch, channels, height, width) to smaller planes."""
        x = self.activation(self.norm1(self.conv1(x)))
        for block in self.resblocks1:
            x = block(x)

        x = self.downsample_block(x)
        for block in self.resblocks2:
            x = block(x)

        x = self.pooling1(x)
        for block in self.resblocks3:
            x = block(x)
        if self._pools_twice:
            x = self.pooling2(x)
        return x


class RepresentationNetwork(nn.Module):
    """Turn observations into latent states."""

    downsample: Final[bool]

    def __init__(self, config: "EfficientZeroConfig") -> None:
        super().__init__()
        layers = Layers(config.norm_type, config.activation, config.image_shape)
        channels = config.num_channels
        self.downsample = config.downsample
        if config.downsample:
            self.downsample_net: DownSample = DownSample(config)
        else:
            in_channels = config.image_shape[0]
            self.conv: nn.Conv2d = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
            self.norm: nn.Module = layers.norm(channels)

        self.resblocks: nn.ModuleList = layers.blocks(config.num_res_blocks, channels)
        self.activation: Any = layers.activation

    def forward(self, x: Tensor) -> Tensor:
        """Map observations to latent states, both (batch, channels, height, width)."""
        if self.downsample:  # noqa: SIM108 - TorchScript compiles only the branch that is taken
            x = self.downsample_net(x)
        else:
            x = self.activation(self.norm(self.conv(x)))

        for block in self.resblocks:
            x = block(x)
        return x


class PredictionNetwork(nn.Module):
    """Predict the policy and the value of a latent state."""

    def __init__(self, config: "EfficientZeroConfig") -> None:
        super().__init__()
        channels, height, width = config.latent_shape
        layers = Layers(config.norm_type, config.activation, config.latent_shape)
        self.resblocks: nn.ModuleList = layers.blocks(config.num_res_blocks, channels)
        # LightZero's order, which decides the random numbers; the result begins with the policy.
        self.conv1x1_value: nn.Conv2d = nn.Conv2d(channels, config.value_head_channels, 1)
        self.conv1x1_policy: nn.Conv2d = nn.Conv2d(channels, config.policy_head_channels, 1)
        self.norm_value: nn.Module = layers.norm(config.value_head_channels)
        self.norm_policy: nn.Module = layers.norm(config.policy_head_channels)

        value_features = config.value_head_channels * height * width
        policy_features = config.policy_head_channels * height * width
        self.flatten_output_size_for_value_head = value_features
        self.flatten_output_size_for_policy_head = policy_features
        self.activation: Any = layers.activation
        logits = config.logits(config.value_support_size)
        zero = config.last_linear_layer_init_zero
        self.fc_value: nn.Sequential = layers.head(
            config.fc_value_layers, value_features, logits, zero
        )
        self.fc_policy: nn.Sequential = layers.head(
            config.fc_policy_layers, policy_features, config.action_space_size, zero
        )

    def forward(self, latent_state: Tensor) -> tuple[Tensor, Tensor]:
        """Map latent states to the logits of the policy and of the value."""
        x = latent_state
        for block in self.resblocks:
            x = block(x)

        value = self.activation(self.norm_value(self.conv1x1_value(x)))
        policy = self.activation(self.norm_policy(self.conv1x1_policy(x)))
        # Flattened by sample: LightZero reshapes to rows of the head's size, which can mix samples.
        return self.fc_policy(policy.flatten(1)), self.fc_value(value.flatten(1))


class DynamicsNetwork(nn.Module):
    """Predict the next latent state and the value prefix from a latent state and an action.

    Args:
        observation_shape: Channels, height and width of an observation; used for LayerNorm only.
        action_encoding_dim: Number of input channels that hold the action; they come last.
        num_res_blocks: Number of residual blocks.
        num_channels: Channels of the input: those of the latent state and those of the action.
        reward_head_channels: Channels before the head of the value prefix.
        fc_reward_layers: Hidden layers of that head: one for each element, all as wide as the
            first.
        output_support_size: Number of logits of the value prefix.
        flatten_output_size_for_reward_head: ``reward_head_channels`` * height * width of the
            planes.
        downsample: If True, LayerNorm expects planes 16 times smaller than the observation.
        lstm_hidden_size: Size of the hidden states.
        last_linear_layer_init_zero: If True, the value prefix is zero at first.
        activation: Activation of all layers; by default a new ReLU.
        norm_type: "BN" or "LN". Residual blocks have BatchNorm in either case.
        reward_head_hidden_channels: In place of ``fc_reward_layers``: its name in LightZero 0.2.
        flatten_input_size_for_reward_head: In place of ``flatten_output_size_for_reward_head``, in
            the same way.

    Raises:
        AssertionError: If ``norm_type`` is invalid, or ``num_channels <= action_encoding_dim``.
        ValueError: If ``action_encoding_dim`` is less than 1.
        IndexError: If ``fc_reward_layers`` is empty.

    Example:
        >>> import torch
        >>> from modkit.models import DynamicsNetwork
        >>> network = DynamicsNetwork((3, 4, 4), flatten_output_size_for_reward_head=64 * 4 * 4)
        >>> latent, (h, c), value_prefix = network(torch.randn(3, 64, 4, 4), None)
        >>> latent.shape, h.shape, value_prefix.shape
        (torch.Size([3, 62, 4, 4]), torch.Size([1, 3, 512]), torch.Size([3, 601]))

    Same as ``lzero.model.efficientzero_model.DynamicsNetwork``; ``docs/models.md`` lists the
    differences.
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        action_encoding_dim: int = 2,
        num_res_blocks: int = 1,
        num_channels: int = 64,
        reward_head_channels: int = 64,
        fc_reward_layers: Sequence[int] = ONE_HIDDEN_LAYER,
        output_support_size: int = 601,
        flatten_output_size_for_reward_head: int = 64,
        downsample: bool = False,
        lstm_hidden_size: int = 512,
        last_linear_layer_init_zero: bool = True,
        activation: nn.Module | None = DEFAULT_ACTIVATION,
        norm_type: str | None = "BN",
        *,
        reward_head_hidden_channels: Sequence[int] | None = None,
        flatten_input_size_for_reward_head: int | None = None,
    ) -> None:
        super().__init__()
        if num_channels <= action_encoding_dim:
            # In LightZero's words.
            raise AssertionError(
                f"num_channels:{num_channels} <= action_encoding_dim:{action_encoding_dim}"
            )
        if action_encoding_dim < 1:
            raise ValueError(
                f"DynamicsNetwork: action_encoding_dim={action_encoding_dim} is less than 1"
            )
        layers = Layers(norm_type, activation, observation_shape)
        # As in LightZero, whatever the height of the observation is.
        factor = 16 if downsample else 1
        latent_channels = num_channels - action_encoding_dim
        if flatten_input_size_for_reward_head is not None:
            flatten_output_size_for_reward_head = flatten_input_size_for_reward_head
        if reward_head_hidden_channels is not None:
            fc_reward_layers = reward_head_hidden_channels

        self.action_encoding_dim: int = action_encoding_dim
        self.num_channels = num_channels
        # Both names of LightZero.
        self.flatten_input_size_for_reward_head = flatten_output_size_for_reward_head
        self.flatten_output_size_for_reward_head = flatten_output_size_for_reward_head
        self.lstm_hidden_size = lstm_hidden_size

        # The order decides the random numbers of the weights, and the keys in a checkpoint.
        self.activation: Any = layers.activation
        self.conv: nn.Conv2d = nn.Conv2d(num_channels, latent_channels, 3, padding=1, bias=False)
        self.norm_common: nn.Module = layers.norm(latent_channels, factor)
        # BatchNorm whatever norm_type is, as in LightZero.
        batch_norm_layers = Layers("BN", layers.activation, observation_shape)
        self.resblocks: nn.ModuleList = batch_norm_layers.blocks(num_res_blocks, latent_channels)
        self.conv1x1_reward: nn.Conv2d = nn.Conv2d(latent_channels, reward_head_channels, 1)
        self.norm_reward: nn.Module = layers.norm(reward_head_channels, factor)
        self.lstm: nn.LSTM = nn.LSTM(flatten_output_size_for_reward_head, lstm_hidden_size)
        self.norm_value_prefix: nn.BatchNorm1d = nn.BatchNorm1d(lstm_hidden_size)
        self.fc_reward_head: nn.Sequential = layers.head(
            fc_reward_layers, lstm_hidden_size, output_support_size, last_linear_layer_init_zero
        )

    def forward(
        self, state_action_encoding: Tensor, reward_hidden_state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Predict what an action leads to.

        Args:
            state_action_encoding: Latent states and planes of actions, (batch, channels, height,
                width).
            reward_hidden_state: h and c, each (1, batch, lstm_hidden_size); None for zeros.

        Returns:
            The next latent states, (batch, num_channels - action_encoding_dim, height, width); the
            next h and c; and the logits of the value prefix, (batch, output_support_size).

        Raises:
            RuntimeError: If a shape does not fit.
            ValueError: If the network is in training mode and the batch is a single sample.
        """
        state_encoding = state_action_encoding[:, : -self.action_encoding_dim, :, :]
        # A shortcut around the first convolution, for the latent state without the action.
        x = self.activation(self.norm_common(self.conv(state_action_encoding)) + state_encoding)
        for block in self.resblocks:
            x = block(x)
        next_latent_state = x

        x = self.activation(self.norm_reward(self.conv1x1_reward(x)))
        # A sequence of one step, since a search takes its steps one at a time. Flattened by sample:
        # LightZero reshapes to rows of the LSTM's size, which can mix samples.
        prefix, next_hidden_state = self.lstm(x.flatten(1).unsqueeze(0), reward_hidden_state)
        prefix = self.activation(self.norm_value_prefix(prefix.squeeze(0)))
        return next_latent_state, next_hidden_state, self.fc_reward_head(prefix)

    def get_dynamic_mean(self) -> float:
        """Return the mean absolute weight of the first convolution and the residual blocks.

        A parameter of the activation counts in each block, as in LightZero: the blocks share it.

        Returns:
            The mean over all elements, computed in double precision.
        """
        # As in LightZero, the norms inside the blocks count, and norm_common does not.
        tensors: list[Tensor] = [self.conv.weight]
        for block in self.resblocks:
            tensors += block.parameters()
        return mean_magnitude(tensors)

    def get_reward_mean(self) -> "tuple[np.ndarray[Any, Any], float]":
        """Return the weights of the reward head as one vector, and the mean of their absolutes.

        The LSTM is not part of it. LightZero's method raises AttributeError.

        Returns:
            The weights of the 1x1 convolution and all parameters of the head, one-dimensional, in
            host memory; and the mean of their absolute values.
        """
        tensors = [self.conv1x1_reward.weight, *self.fc_reward_head.parameters()]
        weights = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return weights.cpu().numpy(), float(weights.abs().mean())
