"""The networks of EfficientZero, and the blocks and heads that they are built from."""

import functools
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
    """Check the normalization, and return the activation.

    Args:
        norm_type: The argument of a network.
        activation: The argument of a network; a new ReLU takes the place of ``DEFAULT_ACTIVATION``.

    Returns:
        The activation of the network, or None for none.

    Raises:
        AssertionError: If ``norm_type`` is neither "BN" nor "LN", in LightZero's words.
    """
    if norm_type not in NORM_TYPES:
        raise AssertionError(f"norm_type must in {NORM_TYPES}")
    # In place as in LightZero, although full backward hooks refuse that: another argument helps.
    return nn.ReLU(inplace=True) if activation is DEFAULT_ACTIVATION else activation


def renamed(owner: str, default: object, /, **names: Any) -> Any:
    """Return the value of an argument that has an older and a newer name.

    Args:
        owner: The class, with which the error begins.
        default: Default of the older name; the newer one has None.
        **names: The older name with its value, then the newer one.

    Raises:
        TypeError: If the argument is given under both names.
    """
    # Keyword arguments keep their order, so the older name is first.
    (old, value), (new, alias) = names.items()
    if alias is None:
        return value
    if value is not default:
        raise TypeError(f"{owner}: {new}={alias!r} is {old}={value!r} by its newer name; give one")
    return alias


def reduction(owner: nn.Module, observation_shape: Sequence[int]) -> int:
    """Return how many times smaller downsampling makes an observation.

    Args:
        owner: The network, whose class the error names.
        observation_shape: Channels, height and width of an observation.

    Raises:
        NotImplementedError: If there is no downsampling for observations of this height.
    """
    height = observation_shape[1]
    if height not in REDUCTIONS:
        raise NotImplementedError(
            f"{type(owner).__name__}: observation_shape={observation_shape!r} cannot be "
            f"downsampled; the height has to be one of {list(REDUCTIONS)}"
        )
    return REDUCTIONS[height]


def _norm_of_planes(
    norm_type: str | None, channels: int, shape: Sequence[int], downsample: bool = False
) -> nn.Module:
    """Make the norm of planes; as in LightZero, ``downsample`` makes them 16 times smaller."""
    if norm_type == "BN":
        return nn.BatchNorm2d(channels)
    factor = 16 if downsample else 1
    # Rounded up, as by four halvings with kernel 3, stride 2 and padding 1.
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
    """Two convolutions beside a shortcut, which is a convolution if ``stride=2``.

    Args:
        channels: Channels of the input.
        out_channels: Channels of the output; those of the input if ``stride=1``.
        activation: Module after the first convolution, and after the sum.
        norm_type: "BN", or "LN" for a GroupNorm with one group.
        stride: Stride of the first convolution and of the shortcut.
    """

    # TorchScript takes a Final attribute for a constant, and so compiles only the branch in use.
    _downsamples: Final[bool]

    def __init__(
        self, channels: int, out_channels: int, activation: Any, norm_type: Any, stride: int = 1
    ) -> None:
        super().__init__()
        self._downsamples = stride > 1
        # Annotated, since type checkers take each attribute of a module for a Tensor or a Module.
        self.act: Any = activation
        self.conv1: nn.Sequential = _convolution(
            channels, out_channels, norm_type, activation, stride=stride
        )
        self.conv2: nn.Sequential = _convolution(out_channels, out_channels, norm_type)

        # The shortcut has no norm, and is in a container of its own, as its keys in LightZero say.
        if stride > 1:
            conv = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
            self.conv3: nn.Sequential = nn.Sequential(conv)

    def forward(self, x: Tensor) -> Tensor:
        """Map planes (batch, channels, height, width) to (batch, out_channels, ...)."""
        shortcut = self.conv3(x) if self._downsamples else x
        x = self.act(self.conv2(self.conv1(x)) + shortcut)
        return x  # noqa: RET504 - typed, without a cast that TorchScript would refuse


def _blocks(number: int, channels: int, *options: Any) -> nn.ModuleList:
    return nn.ModuleList([ResBlock(channels, channels, *options) for _ in range(number)])


def _head(
    widths: Sequence[int],
    features: int,
    logits: int,
    *,
    activation: nn.Module | None,
    norm_type: str | None,
    zero: bool,
) -> nn.Sequential:
    """Make the layers that turn the features of a sample into logits.

    Args:
        widths: Hidden layers. As in LightZero, all are as wide as the first.
        features: Number of features of a sample.
        logits: Number of logits.
        activation: Module after the norm of each hidden layer.
        norm_type: "BN" or "LN".
        zero: Whether the logits are zero at first. The same random numbers are drawn in either
            case.

    Returns:
        Layers that map shape ``(batch, features)`` to ``(batch, logits)``.

    Raises:
        IndexError: If there is no hidden layer.
    """
    width = widths[0]
    layers: list[nn.Module] = []
    # The inputs of the layers: the features, and then the layer before.
    for in_features in [features, *[width] * (len(widths) - 1)]:
        norm = nn.BatchNorm1d(width) if norm_type == "BN" else nn.LayerNorm(width)
        layers += [nn.Linear(in_features, width), norm]
        if activation is not None:
            layers.append(activation)

    last = nn.Linear(width, logits)
    if zero:
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def _check_features(owner: nn.Module, kind: str, features: object) -> None:
    """Check that each sample has as many features as a head takes.

    LightZero reshapes the batch to rows of that size instead, which may mix samples.

    Args:
        owner: The network of the head.
        kind: The kind of the head, such as ``"value"``.
        features: Planes of shape ``(batch, channels, height, width)``.

    Raises:
        RuntimeError: If the number of features differs.
    """
    # While fx or torch.jit.trace records, the layer itself raises.
    if not isinstance(features, Tensor) or get_tracing_state():
        return

    # The name of the argument to correct, which is an attribute as well.
    name = f"flatten_output_size_for_{kind}_head"
    size = getattr(owner, name)
    planes = features.shape[1:]
    if planes.numel() != size:
        shape = "x".join(map(str, planes))
        raise RuntimeError(
            f"{type(owner).__name__}: the head gets {shape} = {planes.numel()} features a sample, "
            f"but {name}={size}"
        )


class DownSample(nn.Module):
    """Make observations 16 times smaller, or 8 times if they are 64 pixels high.

    Args:
        observation_shape: Channels, height and width; the height is 64, 84 or 96.
        out_channels: Channels of the result.
        activation: Activation of all layers; by default a new ReLU.
        norm_type: "BN" or "LN".

    Raises:
        AssertionError: If ``norm_type`` is invalid.
        NotImplementedError: If observations of this height cannot be downsampled.

    Example:
        >>> import torch
        >>> from modkit.models import DownSample
        >>> DownSample((4, 96, 96), 16)(torch.randn(2, 4, 96, 96)).shape
        torch.Size([2, 16, 6, 6])

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

        # Two strides and a pooling make planes 8 times smaller, and the second pooling 16 times.
        half = out_channels // 2
        self.conv1: nn.Conv2d = nn.Conv2d(
            observation_shape[0], half, 3, stride=2, padding=1, bias=False
        )
        # Rounded down, and the convolution rounds up: with LayerNorm, the width must be even.
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
        """Map observations (batch, channels, height, width) to smaller planes.

        Args:
            x: The observations.

        Returns:
            Planes (batch, out_channels, height, width), with height and width divided by 16 or 8.
        """
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
    """Softmax within groups of neighbors in the last dimension.

    Args:
        group_size: Size of a group, which must divide the last dimension.
    """

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to one of the same shape whose groups each sum to 1."""
        # This raises for a width that the size of a group does not divide.
        groups: Tensor = x.unflatten(-1, (-1, self.group_size))
        return groups.softmax(-1).flatten(-2)

    def extra_repr(self) -> str:
        """Return the size of a group."""
        return f"group_size={self.group_size}"


class RepresentationNetwork(nn.Module):
    """Turn observations into latent states.

    Args:
        observation_shape: Channels, height and width of an observation.
        num_res_blocks: Number of residual blocks.
        num_channels: Channels of the latent state.
        downsample: If True, begin with :class:`DownSample`; otherwise height and width stay.
        activation: Activation of all layers; by default a new ReLU.
        norm_type: "BN" or "LN".
        embedding_dim: No effect, as in LightZero.
        group_size: Size of a group for ``use_sim_norm``, which must divide the width of the latent
            state.
        use_sim_norm: If True, end with a softmax within groups of neighbors.

    Raises:
        AssertionError: If ``norm_type`` is invalid.
        NotImplementedError: If observations of this height cannot be downsampled.

    Example:
        >>> import torch
        >>> from modkit.models import RepresentationNetwork
        >>> network = RepresentationNetwork((3, 6, 7), num_channels=16, downsample=False)
        >>> network(torch.randn(2, 3, 6, 7)).shape
        torch.Size([2, 16, 6, 7])

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
        """Map observations (batch, channels, height, width) to latent states.

        Args:
            x: The observations.

        Returns:
            Latent states (batch, num_channels, height, width), smaller if ``downsample``.
        """
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

    Args:
        observation_shape: Channels, height and width of an observation; used for LayerNorm only.
        action_space_size: Number of actions.
        num_res_blocks: Number of residual blocks.
        num_channels: Channels of the latent state.
        value_head_channels: Channels before the head of the value.
        policy_head_channels: Channels before the head of the policy.
        fc_value_layers: Hidden layers of the value: one for each element, all as wide as the first.
        fc_policy_layers: Hidden layers of the policy, in the same way.
        output_support_size: Number of logits of the value.
        flatten_output_size_for_value_head: ``value_head_channels`` * height * width of the latent
            state.
        flatten_output_size_for_policy_head: ``policy_head_channels`` * height * width of the latent
            state.
        downsample: If True, LayerNorm expects planes 16 times smaller than the observation.
        last_linear_layer_init_zero: If True, policy and value are zero at first.
        activation: Activation of all layers; by default a new ReLU.
        norm_type: "BN" or "LN".

    Raises:
        AssertionError: If ``norm_type`` is invalid.
        IndexError: If a head has no hidden layer.

    Example:
        >>> import torch
        >>> from modkit.models import PredictionNetwork
        >>> network = PredictionNetwork(
        ...     observation_shape=(3, 6, 7),
        ...     action_space_size=7,
        ...     num_res_blocks=1,
        ...     num_channels=16,
        ...     value_head_channels=2,
        ...     policy_head_channels=2,
        ...     fc_value_layers=[32],
        ...     fc_policy_layers=[32],
        ...     output_support_size=21,
        ...     flatten_output_size_for_value_head=2 * 6 * 7,
        ...     flatten_output_size_for_policy_head=2 * 6 * 7,
        ... )
        >>> policy, value = network(torch.randn(2, 16, 6, 7))
        >>> policy.shape, value.shape
        (torch.Size([2, 7]), torch.Size([2, 21]))

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
        act = checked(norm_type, activation)
        self.resblocks: nn.ModuleList = _blocks(num_res_blocks, num_channels, act, norm_type)
        # LightZero's order, which decides the random numbers; the result begins with the policy.
        self.conv1x1_value: nn.Conv2d = nn.Conv2d(num_channels, value_head_channels, 1)
        self.conv1x1_policy: nn.Conv2d = nn.Conv2d(num_channels, policy_head_channels, 1)
        norm = functools.partial(
            _norm_of_planes, norm_type, shape=observation_shape, downsample=downsample
        )
        self.norm_value: nn.Module = norm(value_head_channels)
        self.norm_policy: nn.Module = norm(policy_head_channels)

        self.flatten_output_size_for_value_head = flatten_output_size_for_value_head
        self.flatten_output_size_for_policy_head = flatten_output_size_for_policy_head
        self.activation = act
        head = functools.partial(
            _head, activation=act, norm_type=norm_type, zero=last_linear_layer_init_zero
        )
        self.fc_value: nn.Sequential = head(
            fc_value_layers, flatten_output_size_for_value_head, output_support_size
        )
        self.fc_policy: nn.Sequential = head(
            fc_policy_layers, flatten_output_size_for_policy_head, action_space_size
        )

    def forward(self, latent_state: Tensor) -> tuple[Tensor, Tensor]:
        """Map latent states to the logits of the policy and of the value.

        Args:
            latent_state: Latent states, (batch, num_channels, height, width).

        Returns:
            Logits of the policy, (batch, action_space_size), and of the value, (batch,
            output_support_size).

        Raises:
            RuntimeError: If the size of the latent state is not that of the heads.
        """
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
        reward_head_hidden_channels: Name of ``fc_reward_layers`` in LightZero 0.2.
        flatten_input_size_for_reward_head: Name of ``flatten_output_size_for_reward_head`` in
            LightZero 0.2.

    Raises:
        AssertionError: If ``norm_type`` is invalid, or ``num_channels <= action_encoding_dim``.
        ValueError: If ``action_encoding_dim`` is less than 1.
        IndexError: If ``fc_reward_layers`` is empty.
        TypeError: If an argument is given under both of its names.

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
        act = checked(norm_type, activation)
        hidden: Sequence[int] = renamed(
            type(self).__name__,
            ONE_HIDDEN_LAYER,
            fc_reward_layers=fc_reward_layers,
            reward_head_hidden_channels=reward_head_hidden_channels,
        )
        features: int = renamed(
            type(self).__name__,
            64,
            flatten_output_size_for_reward_head=flatten_output_size_for_reward_head,
            flatten_input_size_for_reward_head=flatten_input_size_for_reward_head,
        )
        channels = self._latent_channels(num_channels, action_encoding_dim)

        self.action_encoding_dim: int = action_encoding_dim
        self.num_channels = num_channels
        self.flatten_output_size_for_reward_head = features
        self.lstm_hidden_size = lstm_hidden_size

        # The order decides the random numbers of the weights, and the keys in a checkpoint.
        self.activation = act
        self.conv: nn.Conv2d = nn.Conv2d(num_channels, channels, 3, padding=1, bias=False)
        norm = functools.partial(
            _norm_of_planes, norm_type, shape=observation_shape, downsample=downsample
        )
        self.norm_common: nn.Module = norm(channels)
        # BatchNorm whatever norm_type is, as in LightZero.
        self.resblocks: nn.ModuleList = _blocks(num_res_blocks, channels, act, "BN")
        self.conv1x1_reward: nn.Conv2d = nn.Conv2d(channels, reward_head_channels, 1)
        self.norm_reward: nn.Module = norm(reward_head_channels)
        self.lstm: nn.LSTM = nn.LSTM(features, lstm_hidden_size)
        self.norm_value_prefix: nn.BatchNorm1d = nn.BatchNorm1d(lstm_hidden_size)
        self.fc_reward_head: nn.Sequential = _head(
            hidden,
            lstm_hidden_size,
            output_support_size,
            activation=act,
            norm_type=norm_type,
            zero=last_linear_layer_init_zero,
        )

    def _latent_channels(self, num_channels: int, action_encoding_dim: int) -> int:
        """Return the channels of the latent state; raise unless it and the action have some."""
        if num_channels <= action_encoding_dim:
            # In LightZero's words.
            raise AssertionError(
                f"num_channels:{num_channels} <= action_encoding_dim:{action_encoding_dim}"
            )

        if action_encoding_dim < 1:
            raise ValueError(
                f"{type(self).__name__}: action_encoding_dim={action_encoding_dim} is less than 1"
            )
        return num_channels - action_encoding_dim

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
        # TorchScript cannot compile the check, which reads an attribute by its name.
        if not is_scripting():
            _check_features(self, "reward", x)
        # A sequence of one step, since a search takes its steps one at a time.
        prefix, next_hidden_state = self.lstm(x.flatten(1).unsqueeze(0), reward_hidden_state)
        prefix = self.activation(self.norm_value_prefix(prefix.squeeze(0)))
        return next_latent_state, next_hidden_state, self.fc_reward_head(prefix)

    @only_migrates
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Blocks that early versions of LightZero created and never called.
        unused = prefix + "reward_resblocks."
        for key in [key for key in state_dict if key.startswith(unused)]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def get_dynamic_mean(self) -> float:
        """Return the mean absolute weight of the first convolution and the residual blocks.

        A parameter of the activation counts in each block, as in LightZero: the blocks share it.

        Returns:
            The mean over all elements, computed in double precision.
        """
        # As in LightZero, the norms inside the blocks count, and norm_common does not.
        tensors = [self.conv.weight]
        for block in self.resblocks:
            tensors += block.parameters()
        total = sum(tensor.detach().abs().sum(dtype=torch.float64).item() for tensor in tensors)
        return float(total) / sum(tensor.numel() for tensor in tensors)

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
