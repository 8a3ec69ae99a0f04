"""The network that predicts what an action leads to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from modkit import nn
from modkit._upstream import is_scripting
from modkit.models._blocks import (
    DEFAULT_ACTIVATION,
    ONE_HIDDEN_LAYER,
    ResBlock,
    check_features,
    check_norm_type,
    head,
    mean_of_absolutes,
    norm_of_planes,
    own_activation,
    renamed,
)
from modkit.nn._load_state_dict import only_migrates


if TYPE_CHECKING:
    import numpy as np


class DynamicsNetwork(nn.Module):
    """Predict the next latent state and the value prefix from a latent state and an action.

    The state dict, the initial weights of a seed, the outputs and the gradients are those of
    LightZero's class. Checkpoints of its versions 0.0.2 to 0.0.4 load too: their ``reward_resblocks``,
    which no forward ever used, are left out.

    Args:
        observation_shape: Channels, height and width of an observation. Read with ``norm_type="LN"``
            only, which needs the height and width of the latent state.
        action_encoding_dim: How many of the input's channels hold the action; they come last.
        num_res_blocks: How many residual blocks follow the first convolution.
        num_channels: Channels of the input: those of the latent state and those of the action.
        reward_head_channels: Channels that the latent state is reduced to for the value prefix.
        fc_reward_layers: Hidden layers of the value prefix: as many as there are elements, all as wide
            as the first one says.
        output_support_size: Number of logits of the value prefix.
        flatten_output_size_for_reward_head: ``reward_head_channels`` times height times width of
            the latent state.
        downsample: With ``norm_type="LN"``: the latent state is 16 times smaller than an observation.
        lstm_hidden_size: Size of the two hidden states.
        last_linear_layer_init_zero: Whether the value prefix is zero at first.
        activation: Used in all places. The default stands for a ReLU of the network's own, whereas
            LightZero's networks all share one.
        norm_type: "BN", or "LN" for LayerNorm after the first convolution and in the reward head.
            Residual blocks have BatchNorm in either case.
        reward_head_hidden_channels: ``fc_reward_layers`` by its name in LightZero 0.2.
        flatten_input_size_for_reward_head: ``flatten_output_size_for_reward_head`` by its name there.

    Raises:
        AssertionError: ``norm_type`` is neither, or ``num_channels`` is not above
            ``action_encoding_dim``.
        ValueError: ``action_encoding_dim`` is less than 1.
        IndexError: ``fc_reward_layers`` is empty.
        TypeError: An argument is given under both of its names.

    Example:
        >>> import torch
        >>> from modkit.models import DynamicsNetwork
        >>> network = DynamicsNetwork(
        ...     (3, 6, 6), num_channels=10, reward_head_channels=2,
        ...     flatten_output_size_for_reward_head=2 * 6 * 6, lstm_hidden_size=16,
        ... )
        >>> latent, (h, c), value_prefix = network(torch.randn(4, 10, 6, 6), None)
        >>> latent.shape, h.shape, value_prefix.shape
        (torch.Size([4, 8, 6, 6]), torch.Size([1, 4, 16]), torch.Size([4, 601]))

    Same as ``lzero.model.efficientzero_model.DynamicsNetwork``, besides what ``docs/models.md`` lists;
    see https://opendilab.github.io/LightZero/.
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
        check_norm_type(self, norm_type)
        hidden, flat_size = self._renamed(
            (fc_reward_layers, reward_head_hidden_channels),
            (flatten_output_size_for_reward_head, flatten_input_size_for_reward_head),
        )
        self._check_channels(num_channels, action_encoding_dim)
        act = own_activation(activation)
        channels = num_channels - action_encoding_dim

        self.action_encoding_dim = action_encoding_dim
        self.num_channels = num_channels
        self.flatten_output_size_for_reward_head = flat_size
        self.lstm_hidden_size = lstm_hidden_size
        # The order is that of the random numbers of the weights, and of the keys in a checkpoint.
        self.activation = act
        self.conv = nn.Conv2d(num_channels, channels, 3, padding=1, bias=False)
        self.norm_common = norm_of_planes(
            norm_type, channels, observation_shape, downsample=downsample
        )
        self.resblocks = nn.ModuleList([ResBlock(channels, act) for _ in range(num_res_blocks)])
        self.conv1x1_reward = nn.Conv2d(channels, reward_head_channels, 1)
        self.norm_reward = norm_of_planes(
            norm_type, reward_head_channels, observation_shape, downsample=downsample
        )
        self.lstm = nn.LSTM(flat_size, lstm_hidden_size)
        self.norm_value_prefix = nn.BatchNorm1d(lstm_hidden_size)
        self.fc_reward_head = head(
            self,
            lstm_hidden_size,
            ("fc_reward_layers", hidden),
            output_support_size,
            act,
            norm_type,
            zero_last_layer=last_linear_layer_init_zero,
        )

    def _check_channels(self, num_channels: int, action_encoding_dim: int) -> None:
        if num_channels <= action_encoding_dim:
            message = f"num_channels:{num_channels} <= action_encoding_dim:{action_encoding_dim}"
            raise AssertionError(message)
        if action_encoding_dim < 1:
            name = type(self).__name__
            raise ValueError(f"{name}: action_encoding_dim={action_encoding_dim} is less than 1")

    def _renamed(
        self, layers: tuple[Sequence[int], Sequence[int] | None], size: tuple[int, int | None]
    ) -> tuple[Sequence[int], int]:
        """Return the two arguments that have a newer name, under whichever they were given."""
        owner = type(self).__name__
        hidden = renamed(
            *(owner, "fc_reward_layers", layers[0], ONE_HIDDEN_LAYER),
            *("reward_head_hidden_channels", layers[1]),
        )
        flat_size = renamed(
            *(owner, "flatten_output_size_for_reward_head", size[0], 64),
            *("flatten_input_size_for_reward_head", size[1]),
        )
        return cast("Sequence[int]", hidden), cast("int", flat_size)

    def forward(
        self,
        state_action_encoding: Tensor,
        reward_hidden_state: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Take one step.

        Args:
            state_action_encoding: Shape (batch, num_channels, height, width): the latent state, then
                ``action_encoding_dim`` planes of the action.
            reward_hidden_state: h and c, each of shape (1, batch, lstm_hidden_size); None for zeros.

        Returns:
            The next latent state, of shape (batch, num_channels - action_encoding_dim, height, width);
            the next h and c; and the logits of the value prefix, (batch, output_support_size).

        Raises:
            RuntimeError: The number of channels, the size of the planes or a hidden state do not fit.
            ValueError: In training mode, the batch is a single sample.
        """
        state_encoding = state_action_encoding[:, : -self.action_encoding_dim, :, :]
        x = self.norm_common(self.conv(state_action_encoding)) + state_encoding
        x = self.activation(x)
        for block in self.resblocks:
            x = block(x)
        next_latent_state = x

        x = self.activation(self.norm_reward(self.conv1x1_reward(x)))
        if not is_scripting():
            name = "flatten_output_size_for_reward_head"
            check_features(self, name, self.flatten_output_size_for_reward_head, x)
        prefix, next_hidden_state = self.lstm(x.flatten(1).unsqueeze(0), reward_hidden_state)
        prefix = self.activation(self.norm_value_prefix(prefix.squeeze(0)))
        return next_latent_state, next_hidden_state, self.fc_reward_head(prefix)

    @only_migrates
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Leave out the blocks that early versions of LightZero made and never called."""
        unused = prefix + "reward_resblocks."
        for key in [key for key in state_dict if key.startswith(unused)]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def get_dynamic_mean(self) -> float:
        """Return the mean of the absolute weights of the first convolution and all residual blocks.

        Example:
            >>> import torch
            >>> from modkit.models import DynamicsNetwork
            >>> _ = torch.manual_seed(0)
            >>> round(DynamicsNetwork((12, 96, 96)).get_dynamic_mean(), 6)
            0.022135
        """
        blocks = [tensor for block in self.resblocks for tensor in block.parameters()]
        return mean_of_absolutes([self.conv.weight, *blocks])

    def get_reward_mean(self) -> "tuple[np.ndarray[Any, Any], float]":
        """Return the weights that the value prefix comes from, and the mean of their absolutes.

        These are the weights of the 1x1 convolution and all parameters of the head after the LSTM,
        as one vector. LightZero's method raises AttributeError.

        Example:
            >>> from modkit.models import DynamicsNetwork
            >>> weights, mean = DynamicsNetwork((12, 96, 96)).get_reward_mean()
            >>> weights.shape, type(mean)
            ((40281,), <class 'float'>)
        """
        tensors = [self.conv1x1_reward.weight, *self.fc_reward_head.parameters()]
        weights = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return weights.cpu().numpy(), float(weights.abs().mean())
