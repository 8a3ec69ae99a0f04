"""The networks that look at a state: what it is like, and what to do in it."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from modkit import nn
from modkit._upstream import is_scripting
from modkit.models._blocks import (
    DEFAULT_ACTIVATION,
    DownsampleBlock,
    ResBlock,
    check_features,
    check_norm_type,
    head,
    norm_of_planes,
    own_activation,
)


# How many times smaller the latent state is than an observation of a given height.
REDUCTIONS: Final = {64: 8, 84: 16, 96: 16}


def reduction(owner: nn.Module, observation_shape: Sequence[int]) -> int:
    """Return how many times smaller downsampling makes an observation.

    Raises:
        NotImplementedError: There is no downsampling for an observation of that height.
    """
    height = observation_shape[1]
    if height not in REDUCTIONS:
        message = (
            f"{type(owner).__name__}: observation_shape={observation_shape!r} cannot be "
            f"downsampled; the height has to be one of {list(REDUCTIONS)}"
        )
        raise NotImplementedError(message)
    return REDUCTIONS[height]


class DownSample(nn.Module):
    """Make observations 16 times smaller, or 8 times if they are 64 pixels high.

    Args:
        observation_shape: Channels, height and width; the height is 64, 84 or 96.
        out_channels: Channels of the result.
        activation: Used in all places. The default stands for a ReLU of the network's own.
        norm_type: "BN" or "LN".

    Raises:
        AssertionError: ``norm_type`` is neither.
        NotImplementedError: The height is another one.

    Example:
        >>> import torch
        >>> from modkit.models import DownSample
        >>> DownSample((4, 96, 96), 16)(torch.randn(2, 4, 96, 96)).shape
        torch.Size([2, 16, 6, 6])

    Same as ``lzero.model.common.DownSample``, which fails in its call for a height of 84;
    see https://opendilab.github.io/LightZero/.
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
        check_norm_type(self, norm_type)
        self._pools_twice = reduction(self, observation_shape) == 16
        act = own_activation(activation)
        self.observation_shape = observation_shape
        half = out_channels // 2
        self.conv1 = nn.Conv2d(observation_shape[0], half, 3, stride=2, padding=1, bias=False)
        halved = [length // 2 for length in observation_shape[-2:]]
        self.norm1 = norm_of_planes(norm_type, half, halved, downsample=False)
        self.resblocks1 = nn.ModuleList([ResBlock(half, act, norm_type)])
        self.downsample_block = DownsampleBlock(half, out_channels, act, norm_type)
        self.resblocks2 = nn.ModuleList([ResBlock(out_channels, act, norm_type)])
        self.pooling1 = nn.AvgPool2d(3, stride=2, padding=1)
        self.resblocks3 = nn.ModuleList([ResBlock(out_channels, act, norm_type)])
        self.pooling2 = nn.AvgPool2d(3, stride=2, padding=1)
        self.activation = act

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


class SimNorm(nn.Module):
    """Softmax within groups of neighbours in the last dimension."""

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor to one of the same shape whose groups each sum to 1."""
        groups: Tensor = x.unflatten(-1, (-1, self.group_size))
        return groups.softmax(-1).flatten(-2)

    def extra_repr(self) -> str:
        """Tell the size of a group."""
        return f"group_size={self.group_size}"


class RepresentationNetwork(nn.Module):
    """Turn observations into latent states.

    Args:
        observation_shape: Channels, height and width of an observation.
        num_res_blocks: How many residual blocks there are at the end.
        num_channels: Channels of the latent state.
        downsample: Whether to begin with :class:`DownSample`; otherwise the size stays as it is.
        activation: Used in all places. The default stands for a ReLU of the network's own.
        norm_type: "BN" or "LN".
        embedding_dim: Not used, as in LightZero.
        group_size: The size of a group if ``use_sim_norm`` is set; it has to divide the width of the
            latent state.
        use_sim_norm: Whether to end with a softmax within groups.

    Raises:
        AssertionError: ``norm_type`` is neither.
        NotImplementedError: There is no downsampling for the height of the observation.

    Example:
        >>> import torch
        >>> from modkit.models import RepresentationNetwork
        >>> network = RepresentationNetwork((3, 6, 7), num_channels=16, downsample=False)
        >>> network(torch.randn(2, 3, 6, 7)).shape
        torch.Size([2, 16, 6, 7])

    Same as ``lzero.model.common.RepresentationNetwork``; see https://opendilab.github.io/LightZero/.
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
        check_norm_type(self, norm_type)
        act = own_activation(activation)
        self.downsample = downsample
        if downsample:
            self.downsample_net = DownSample(observation_shape, num_channels, act, norm_type)
        else:
            self.conv = nn.Conv2d(observation_shape[0], num_channels, 3, padding=1, bias=False)
            self.norm = norm_of_planes(norm_type, num_channels, observation_shape, downsample=False)
        self.resblocks = nn.ModuleList(
            [ResBlock(num_channels, act, norm_type) for _ in range(num_res_blocks)]
        )
        self.activation = act
        self.embedding_dim = embedding_dim
        self.use_sim_norm = use_sim_norm
        if use_sim_norm:
            self.sim_norm = SimNorm(group_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map observations (batch, channels, height, width) to latent states."""
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
        observation_shape: Channels, height and width of an observation. Read with ``norm_type="LN"``
            only, which needs the height and width of the latent state.
        action_space_size: Number of actions.
        num_res_blocks: How many residual blocks come first.
        num_channels: Channels of the latent state.
        value_head_channels: Channels that it is reduced to for the value.
        policy_head_channels: Channels that it is reduced to for the policy.
        fc_value_layers: Hidden layers of the value: as many as there are elements, all as wide as the
            first one says.
        fc_policy_layers: Hidden layers of the policy, likewise.
        output_support_size: Number of logits of the value.
        flatten_output_size_for_value_head: ``value_head_channels`` times height times width of the
            latent state.
        flatten_output_size_for_policy_head: ``policy_head_channels`` times height times width.
        downsample: With ``norm_type="LN"``: the latent state is 16 times smaller than an observation.
        last_linear_layer_init_zero: Whether both outputs are zero at first.
        activation: Used in all places. The default stands for a ReLU of the network's own.
        norm_type: "BN" or "LN".

    Raises:
        AssertionError: ``norm_type`` is neither.
        IndexError: ``fc_value_layers`` or ``fc_policy_layers`` is empty.

    Example:
        >>> import torch
        >>> from modkit.models import PredictionNetwork
        >>> network = PredictionNetwork((3, 6, 7), 7, 1, 16, 2, 2, [32], [32], 21, 84, 84)
        >>> policy, value = network(torch.randn(2, 16, 6, 7))
        >>> policy.shape, value.shape
        (torch.Size([2, 7]), torch.Size([2, 21]))

    Same as ``lzero.model.common.PredictionNetwork``, which cannot be built with LayerNorm and
    downsampling; see https://opendilab.github.io/LightZero/.
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
        check_norm_type(self, norm_type)
        act = own_activation(activation)
        self.resblocks = nn.ModuleList(
            [ResBlock(num_channels, act, norm_type) for _ in range(num_res_blocks)]
        )
        self.conv1x1_value = nn.Conv2d(num_channels, value_head_channels, 1)
        self.conv1x1_policy = nn.Conv2d(num_channels, policy_head_channels, 1)
        shape = observation_shape
        self.norm_value = norm_of_planes(
            norm_type, value_head_channels, shape, downsample=downsample
        )
        self.norm_policy = norm_of_planes(
            norm_type, policy_head_channels, shape, downsample=downsample
        )
        self.flatten_output_size_for_value_head = flatten_output_size_for_value_head
        self.flatten_output_size_for_policy_head = flatten_output_size_for_policy_head
        self.activation = act
        self.fc_value = head(
            self,
            flatten_output_size_for_value_head,
            ("fc_value_layers", fc_value_layers),
            output_support_size,
            act,
            norm_type,
            zero_last_layer=last_linear_layer_init_zero,
        )
        self.fc_policy = head(
            self,
            flatten_output_size_for_policy_head,
            ("fc_policy_layers", fc_policy_layers),
            action_space_size,
            act,
            norm_type,
            zero_last_layer=last_linear_layer_init_zero,
        )

    def forward(self, latent_state: Tensor) -> tuple[Tensor, Tensor]:
        """Map latent states to the logits of the policy and of the value, in this order.

        Raises:
            RuntimeError: The size of the latent state does not fit.
            ValueError: In training mode, the batch is a single sample.
        """
        x = latent_state
        for block in self.resblocks:
            x = block(x)
        value = self.activation(self.norm_value(self.conv1x1_value(x)))
        policy = self.activation(self.norm_policy(self.conv1x1_policy(x)))
        if not is_scripting():
            name = "flatten_output_size_for_value_head"
            check_features(self, name, self.flatten_output_size_for_value_head, value)
            name = "flatten_output_size_for_policy_head"
            check_features(self, name, self.flatten_output_size_for_policy_head, policy)
        return self.fc_policy(policy.flatten(1)), self.fc_value(value.flatten(1))
