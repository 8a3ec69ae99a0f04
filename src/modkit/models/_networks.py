"""The networks of EfficientZero, and the blocks and heads that they are built from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from modkit import nn
from modkit._upstream import get_tracing_state, is_scripting
from modkit.nn._load_plan import only_migrates


if TYPE_CHECKING:
    import numpy as np

NORM_TYPES: Final = ["BN", "LN"]
# The height of an observation, and how many times smaller downsampling makes it.
REDUCTIONS: Final = {64: 8, 84: 16, 96: 16}

# LightZero's defaults. Each network replaces DEFAULT_ACTIVATION by a module of its own: LightZero's
# is shared by all networks of a process, so a hook on one activation runs in every network.
ONE_HIDDEN_LAYER: Final[Sequence[int]] = [32]
DEFAULT_ACTIVATION: Final[nn.Module] = nn.ReLU(inplace=True)


def checked(norm_type: str | None, activation: nn.Module | None) -> Any:
    """Check the normalization, and return the activation, or a new ReLU in place of the default."""
    if norm_type not in NORM_TYPES:
        raise AssertionError(f"norm_type must in {NORM_TYPES}")
    return nn.ReLU(inplace=True) if activation is DEFAULT_ACTIVATION else activation


def renamed(owner: str, default: object, /, **names: Any) -> Any:
    """Return the value of an argument that has an older and a newer name."""
    (old, value), (new, alias) = names.items()
    if alias is None:
        return value
    if value is not default:
        raise TypeError(f"{owner}: {new}={alias!r} is {old}={value!r} by its newer name; give one")
    return alias


def reduction(owner: nn.Module, observation_shape: Sequence[int]) -> int:
    """Return how many times smaller downsampling makes an observation."""
    height = observation_shape[1]
    if height not in REDUCTIONS:
        text = f"observation_shape={observation_shape!r} cannot be downsampled"
        heights = f"the height has to be one of {list(REDUCTIONS)}"
        raise NotImplementedError(f"{type(owner).__name__}: {text}; {heights}")
    return REDUCTIONS[height]


def _norm_of_planes(
    norm_type: str | None, channels: int, shape: Sequence[int], downsample: bool = False
) -> nn.Module:
    """Make the norm of planes; as in LightZero, ``downsample`` makes them 16 times smaller."""
    if norm_type == "BN":
        return nn.BatchNorm2d(channels)
    factor = 16 if downsample else 1
    return nn.LayerNorm([channels, -(-shape[-2] // factor), -(-shape[-1] // factor)])


def _convolution(
    in_channels: int, out_channels: int, norm_type: str | None, *activation: Any, stride: int = 1
) -> nn.Sequential:
    """Make a 3x3 convolution of a residual block, where "LN" is a GroupNorm with one group."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out_channels) if norm_type == "BN" else nn.GroupNorm(1, out_channels),
        *(layer for layer in activation if layer is not None),
    )


class ResBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution if ``stride=2``."""

    _downsamples: Final[bool]

    def __init__(
        self, channels: int, out_channels: int, activation: Any, norm_type: Any, stride: int = 1
    ) -> None:
        super().__init__()
        self._downsamples = stride > 1
        self.act: Any = activation
        self.conv1: nn.Sequential = _convolution(
            channels, out_channels, norm_type, activation, stride=stride
        )
        self.conv2: nn.Sequential = _convolution(out_channels, out_channels, norm_type)
        if stride > 1:
            conv = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
            self.conv3: nn.Sequential = nn.Sequential(conv)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.conv3(x) if self._downsamples else x
        x = self.act(self.conv2(self.conv1(x)) + shortcut)
        return x  # noqa: RET504 - typed, without a cast that TorchScript would refuse


def _blocks(number: int, channels: int, *options: Any) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(channels, channels, *options) for _ in range(number)])


def _head(
    widths: Sequence[int], sizes: tuple[int, int], activation: Any, norm_type: Any, zero: bool
) -> nn.Sequential:
    """Make the layers from features to logits; as in LightZero, all have the first of ``widths``."""
    width = widths[0]
    layers: list[nn.Module] = []
    for features in [sizes[0], *[width] * (len(widths) - 1)]:
        norm = nn.BatchNorm1d(width) if norm_type == "BN" else nn.LayerNorm(width)
        layers += [nn.Linear(features, width), norm, *([] if activation is None else [activation])]
    last = nn.Linear(width, sizes[1])
    if zero:
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def _check_features(owner: nn.Module, kind: str, features: object) -> None:
    """Raise unless each sample fits the head ``kind``; LightZero reshapes, which may mix samples."""
    # While fx or torch.jit.trace records, the layer itself raises.
    if not isinstance(features, Tensor) or get_tracing_state():
        return
    name = f"flatten_output_size_for_{kind}_head"
    size, planes = getattr(owner, name), features.shape[1:]
    if planes.numel() != size:
        shape = "x".join(map(str, planes))
        got = f"{shape} = {planes.numel()} features a sample, but {name}={size}"
        raise RuntimeError(f"{type(owner).__name__}: the head gets {got}")


class DownSample(nn.Module):
    """Make observations 16 times smaller, or 8 times if they are 64 pixels high.

    Args:
        observation_shape: Channels, height and width; the height is 64, 84 or 96.
        out_channels: Channels of the result.
        activation, norm_type: See :class:`EfficientZeroModel`.

    Same as ``lzero.model.common.DownSample``, where calls fail for a height of 84.
    """

    _pools_twice: Final[bool]

    def __init__(
        self,
        observation_shape: Sequence[int],
        out_channels: int,
        activation: nn.Module | None = DEFAULT_ACTIVATION,
        norm_type: str | None = "BN",
    ) -> None:
        super().__init__()
        act = checked(norm_type, activation)
        self._pools_twice = reduction(self, observation_shape) == 16
        self.observation_shape = observation_shape
        half = out_channels // 2
        self.conv1: nn.Conv2d = nn.Conv2d(
            observation_shape[0], half, 3, stride=2, padding=1, bias=False
        )
        halved = [length // 2 for length in observation_shape[-2:]]
        self.norm1: nn.Module = _norm_of_planes(norm_type, half, halved)
        self.resblocks1: nn.ModuleList = _blocks(1, half, act, norm_type)
        self.downsample_block: ResBlock = ResBlock(half, out_channels, act, norm_type, stride=2)
        self.resblocks2: nn.ModuleList = _blocks(1, out_channels, act, norm_type)
        self.pooling1: nn.AvgPool2d = nn.AvgPool2d(3, stride=2, padding=1)
        self.resblocks3: nn.ModuleList = _blocks(1, out_channels, act, norm_type)
        self.pooling2: nn.AvgPool2d = nn.AvgPool2d(3, stride=2, padding=1)
        self.activation = act

    def forward(self, x: Tensor) -> Tensor:
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


class SimNorm(nn.Module):
    """Softmax within groups of neighbors in the last dimension."""

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        groups: Tensor = x.unflatten(-1, (-1, self.group_size))
        return groups.softmax(-1).flatten(-2)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}"


class RepresentationNetwork(nn.Module):
    """Turn observations into latent states.

    Arguments as in :class:`EfficientZeroModel`. With ``use_sim_norm=True`` the network ends with a
    softmax within groups of ``group_size`` neighbors, which must divide the width of the latent
    state. ``embedding_dim`` has no effect, as in LightZero.

    Same as ``lzero.model.common.RepresentationNetwork``.
    """

    downsample: Final[bool]
    use_sim_norm: Final[bool]

    def __init__(
        self,
        observation_shape: Sequence[int] = (4, 96, 96),
        num_res_blocks: int = 1,
        num_channels: int = 64,
        downsample: bool = True,
        activation: nn.Module | None = DEFAULT_ACTIVATION,
        norm_type: str | None = "BN",
        embedding_dim: int = 256,
        group_size: int = 8,
        use_sim_norm: bool = False,
    ) -> None:
        super().__init__()
        act = checked(norm_type, activation)
        self.downsample = downsample
        if downsample:
            self.downsample_net: DownSample = DownSample(
                observation_shape, num_channels, act, norm_type
            )
        else:
            self.conv: nn.Conv2d = nn.Conv2d(
                observation_shape[0], num_channels, 3, padding=1, bias=False
            )
            self.norm: nn.Module = _norm_of_planes(norm_type, num_channels, observation_shape)
        self.resblocks: nn.ModuleList = _blocks(num_res_blocks, num_channels, act, norm_type)
        self.activation = act
        self.embedding_dim = embedding_dim
        self.use_sim_norm = use_sim_norm
        if use_sim_norm:
            self.sim_norm: SimNorm = SimNorm(group_size)

    def forward(self, x: Tensor) -> Tensor:
        if self.downsample:  # noqa: SIM108 - TorchScript compiles only the branch that is taken
            x = self.downsample_net(x)
        else:
            x = self.activation(self.norm(self.conv(x)))
        for block in self.resblocks:
            x = block(x)
        if self.use_sim_norm:
            x = self.sim_norm(x)
        return x


class PredictionNetwork(nn.Module):
    """Predict the policy and the value of a latent state.

    Arguments as in :class:`EfficientZeroModel`. ``flatten_output_size_for_value_head`` is
    ``value_head_channels`` times height times width of the latent state; likewise for the policy.
    Only LayerNorm reads ``observation_shape``, 16 times larger than the latent state if
    ``downsample``.

    Same as ``lzero.model.common.PredictionNetwork``, which does not support LayerNorm with
    downsampling.
    """

    def __init__(
        self,
        observation_shape: Sequence[int],
        action_space_size: int,
        num_res_blocks: int,
        num_channels: int,
        value_head_channels: int,
        policy_head_channels: int,
        fc_value_layers: Sequence[int],
        fc_policy_layers: Sequence[int],
        output_support_size: int,
        flatten_output_size_for_value_head: int,
        flatten_output_size_for_policy_head: int,
        downsample: bool = False,
        last_linear_layer_init_zero: bool = True,
        activation: nn.Module | None = DEFAULT_ACTIVATION,
        norm_type: str | None = "BN",
    ) -> None:
        super().__init__()
        act, shape = checked(norm_type, activation), observation_shape
        self.resblocks: nn.ModuleList = _blocks(num_res_blocks, num_channels, act, norm_type)
        self.conv1x1_value: nn.Conv2d = nn.Conv2d(num_channels, value_head_channels, 1)
        self.conv1x1_policy: nn.Conv2d = nn.Conv2d(num_channels, policy_head_channels, 1)
        self.norm_value: nn.Module = _norm_of_planes(
            norm_type, value_head_channels, shape, downsample
        )
        self.norm_policy: nn.Module = _norm_of_planes(
            norm_type, policy_head_channels, shape, downsample
        )
        self.flatten_output_size_for_value_head = flatten_output_size_for_value_head
        self.flatten_output_size_for_policy_head = flatten_output_size_for_policy_head
        self.activation = act
        options = act, norm_type, last_linear_layer_init_zero
        sizes = flatten_output_size_for_value_head, output_support_size
        self.fc_value: nn.Sequential = _head(fc_value_layers, sizes, *options)
        sizes = flatten_output_size_for_policy_head, action_space_size
        self.fc_policy: nn.Sequential = _head(fc_policy_layers, sizes, *options)

    def forward(self, latent_state: Tensor) -> tuple[Tensor, Tensor]:
        """Map latent states to the logits of the policy and of the value, in this order."""
        x = latent_state
        for block in self.resblocks:
            x = block(x)
        value = self.activation(self.norm_value(self.conv1x1_value(x)))
        policy = self.activation(self.norm_policy(self.conv1x1_policy(x)))
        if not is_scripting():
            _check_features(self, "value", value)
            _check_features(self, "policy", policy)
        return self.fc_policy(policy.flatten(1)), self.fc_value(value.flatten(1))


class DynamicsNetwork(nn.Module):
    """Predict the next latent state and the value prefix from a latent state and an action.

    Checkpoints of LightZero 0.0.2 to 0.0.4 load too: their unused ``reward_resblocks`` are dropped.

    Args:
        observation_shape: Channels, height and width of an observation; used for LayerNorm only.
        action_encoding_dim: Number of input channels that hold the action; they come last.
        num_channels: Channels of the input: those of the latent state and those of the action.
        output_support_size: Number of logits of the value prefix.
        flatten_output_size_for_reward_head: ``reward_head_channels`` * height * width of the
            planes.
        downsample: If True, LayerNorm expects planes 16 times smaller than the observation.
        norm_type: "BN" or "LN". Residual blocks have BatchNorm in either case.
        flatten_input_size_for_reward_head: Name of ``flatten_output_size_for_reward_head`` in
            LightZero 0.2.

    The other arguments are those of :class:`EfficientZeroModel`.

    Raises:
        AssertionError: ``norm_type`` is invalid, or ``num_channels <= action_encoding_dim``.
        ValueError: ``action_encoding_dim`` is less than 1.
        IndexError: ``fc_reward_layers`` is empty.
        TypeError: An argument is given under both of its names.

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
        act, name = checked(norm_type, activation), type(self).__name__
        hidden: Sequence[int] = renamed(
            *(name, ONE_HIDDEN_LAYER),
            fc_reward_layers=fc_reward_layers,
            reward_head_hidden_channels=reward_head_hidden_channels,
        )
        features: int = renamed(
            *(name, 64),
            flatten_output_size_for_reward_head=flatten_output_size_for_reward_head,
            flatten_input_size_for_reward_head=flatten_input_size_for_reward_head,
        )
        planes, channels = action_encoding_dim, num_channels - action_encoding_dim
        if channels <= 0:
            raise AssertionError(f"num_channels:{num_channels} <= action_encoding_dim:{planes}")
        if planes < 1:
            raise ValueError(f"{name}: action_encoding_dim={planes} is less than 1")
        shape = observation_shape
        self.action_encoding_dim: int = action_encoding_dim
        self.num_channels = num_channels
        self.flatten_output_size_for_reward_head = features
        self.lstm_hidden_size = lstm_hidden_size
        # The order decides the random numbers of the weights, and the keys in a checkpoint.
        self.activation = act
        self.conv: nn.Conv2d = nn.Conv2d(num_channels, channels, 3, padding=1, bias=False)
        self.norm_common: nn.Module = _norm_of_planes(norm_type, channels, shape, downsample)
        self.resblocks: nn.ModuleList = _blocks(num_res_blocks, channels, act, "BN")
        self.conv1x1_reward: nn.Conv2d = nn.Conv2d(channels, reward_head_channels, 1)
        self.norm_reward: nn.Module = _norm_of_planes(
            norm_type, reward_head_channels, shape, downsample
        )
        self.lstm: nn.LSTM = nn.LSTM(features, lstm_hidden_size)
        self.norm_value_prefix: nn.BatchNorm1d = nn.BatchNorm1d(lstm_hidden_size)
        sizes = lstm_hidden_size, output_support_size
        self.fc_reward_head: nn.Sequential = _head(
            hidden, sizes, act, norm_type, last_linear_layer_init_zero
        )

    def forward(
        self, state_action_encoding: Tensor, reward_hidden_state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return the next latent states, the next h and c, and the logits of the value prefix.

        Args:
            state_action_encoding: Latent states and planes of actions, (batch, channels, height,
                width).
            reward_hidden_state: h and c, each (1, batch, lstm_hidden_size); None for zeros.

        Raises:
            RuntimeError: A shape does not fit.
            ValueError: The network is in training mode and the batch is a single sample.
        """
        state_encoding = state_action_encoding[:, : -self.action_encoding_dim, :, :]
        x = self.activation(self.norm_common(self.conv(state_action_encoding)) + state_encoding)
        for block in self.resblocks:
            x = block(x)
        next_latent_state = x
        x = self.activation(self.norm_reward(self.conv1x1_reward(x)))
        if not is_scripting():
            _check_features(self, "reward", x)
        prefix, next_hidden_state = self.lstm(x.flatten(1).unsqueeze(0), reward_hidden_state)
        prefix = self.activation(self.norm_value_prefix(prefix.squeeze(0)))
        return next_latent_state, next_hidden_state, self.fc_reward_head(prefix)

    @only_migrates
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        unused = prefix + "reward_resblocks."
        for key in [key for key in state_dict if key.startswith(unused)]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def get_dynamic_mean(self) -> float:
        """Return the mean absolute weight of the first convolution and the residual blocks.

        A parameter of the activation counts in each block, as in LightZero: the blocks share it.
        """
        in_blocks = [tensor for block in self.resblocks for tensor in block.parameters()]
        tensors = [self.conv.weight, *in_blocks]
        total = sum(tensor.detach().abs().sum(dtype=torch.float64).item() for tensor in tensors)
        return float(total) / sum(tensor.numel() for tensor in tensors)

    def get_reward_mean(self) -> "tuple[np.ndarray[Any, Any], float]":
        """Return the weights of the reward head as one vector, and the mean of their absolutes.

        The LSTM is not part of it. LightZero's method raises AttributeError.
        """
        tensors = [self.conv1x1_reward.weight, *self.fc_reward_head.parameters()]
        weights = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return weights.cpu().numpy(), float(weights.abs().mean())
