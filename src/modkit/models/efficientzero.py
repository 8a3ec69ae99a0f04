"""EfficientZero's model, as LightZero has it: three networks and the two steps of a search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from modkit import nn
from modkit.models._blocks import DEFAULT_ACTIVATION, ONE_HIDDEN_LAYER, own_activation, renamed
from modkit.models._dynamics import DynamicsNetwork
from modkit.models._networks import (
    DownSample,
    PredictionNetwork,
    RepresentationNetwork,
    reduction,
)


__all__ = [
    "DownSample",
    "DynamicsNetwork",
    "EZNetworkOutput",
    "EfficientZeroModel",
    "PredictionNetwork",
    "RepresentationNetwork",
]


# A head's channels, and its hidden layers under the older and under the newer name.
_Head: TypeAlias = tuple[int, Sequence[int], Sequence[int] | None]


@dataclass
class EZNetworkOutput:
    """What one inference of an :class:`EfficientZeroModel` returns.

    Attributes:
        value: Logits of the value, (batch, value_support_size).
        value_prefix: Logits of the value prefix, (batch, reward_support_size); a list of zeros after
            the initial inference.
        policy_logits: Logits of the actions, (batch, action_space_size).
        latent_state: The latent state, (batch, num_channels, height, width).
        reward_hidden_state: h and c of the LSTM, each (1, batch, lstm_hidden_size).
    """

    value: Tensor
    value_prefix: Tensor | list[float]
    policy_logits: Tensor
    latent_state: Tensor
    reward_hidden_state: tuple[Tensor, Tensor]


class EfficientZeroModel(nn.Module):
    """EfficientZero's model: observations to latent states, steps between them, and predictions.

    The state dict, the initial weights of a seed, the outputs and the gradients are those of
    LightZero's class.

    Args:
        observation_shape: Channels, height and width of an observation; one number n stands for
            (1, n, 1).
        action_space_size: Number of actions.
        lstm_hidden_size: Size of the hidden states.
        num_res_blocks: Residual blocks in each of the three networks.
        num_channels: Channels of the latent state.
        reward_head_channels: Channels that the head of the value prefix reduces it to.
        value_head_channels: Channels that the head of the value reduces it to.
        policy_head_channels: Channels that the head of the policy reduces it to.
        fc_reward_layers: Hidden layers of the value prefix: as many as there are elements, all as wide
            as the first one says.
        fc_value_layers: Hidden layers of the value, likewise.
        fc_policy_layers: Hidden layers of the policy, likewise.
        reward_support_size: Number of logits of the value prefix.
        value_support_size: Number of logits of the value.
        proj_hid: Width of the projection's hidden layers.
        proj_out: Number of features of the projection.
        pred_hid: Width of the hidden layer of the head after the projection.
        pred_out: Number of features of that head.
        self_supervised_learning_loss: Whether there is a projection.
        categorical_distribution: False makes the value and its prefix single numbers.
        last_linear_layer_init_zero: Whether policy, value and value prefix are zero at first.
        state_norm: Whether each latent state is scaled to lie between 0 and 1.
        downsample: Whether observations are made smaller first, see :class:`DownSample`. Without it,
            a network for images of 96x96 pixels has 900 million parameters.
        activation: Used in all places. The default stands for a ReLU of the model's own.
        norm_type: "BN" or "LN".
        discrete_action_encoding_type: "one_hot" for one plane for each action, "not_one_hot" for one
            plane with the number of the action.
        reward_head_hidden_channels: ``fc_reward_layers`` by its name in LightZero 0.2.
        value_head_hidden_channels: ``fc_value_layers`` by its name there.
        policy_head_hidden_channels: ``fc_policy_layers`` by its name there.
        **kwargs: Ignored: LightZero hands over the whole section of a configuration.

    Raises:
        AssertionError: ``norm_type`` or ``discrete_action_encoding_type`` is none that there is.
        NotImplementedError: There is no downsampling for the height of the observation.
        IndexError: A head has no hidden layer.
        TypeError: An argument is given under both of its names.

    Example:
        >>> import torch
        >>> from modkit.models import EfficientZeroModel
        >>> model = EfficientZeroModel(
        ...     (3, 6, 7), action_space_size=7, num_channels=16, lstm_hidden_size=32
        ... ).eval()
        >>> root = model.initial_inference(torch.zeros(1, 3, 6, 7))
        >>> step = model.recurrent_inference(
        ...     root.latent_state, root.reward_hidden_state, torch.tensor([3])
        ... )
        >>> step.policy_logits.shape, step.value_prefix.shape
        (torch.Size([1, 7]), torch.Size([1, 601]))

    Same as ``lzero.model.efficientzero_model.EfficientZeroModel``, besides what ``docs/models.md``
    lists; see https://opendilab.github.io/LightZero/.
    """

    def __init__(
        self,
        observation_shape: int | Sequence[int] = (12, 96, 96),
        action_space_size: int = 6,
        lstm_hidden_size: int = 512,
        num_res_blocks: int = 1,
        num_channels: int = 64,
        reward_head_channels: int = 16,
        value_head_channels: int = 16,
        policy_head_channels: int = 16,
        fc_reward_layers: Sequence[int] = ONE_HIDDEN_LAYER,
        fc_value_layers: Sequence[int] = ONE_HIDDEN_LAYER,
        fc_policy_layers: Sequence[int] = ONE_HIDDEN_LAYER,
        reward_support_size: int = 601,
        value_support_size: int = 601,
        proj_hid: int = 1024,
        proj_out: int = 1024,
        pred_hid: int = 512,
        pred_out: int = 1024,
        self_supervised_learning_loss: bool = True,
        categorical_distribution: bool = True,
        last_linear_layer_init_zero: bool = True,
        state_norm: bool = False,
        downsample: bool = False,
        activation: nn.Module | None = DEFAULT_ACTIVATION,
        norm_type: str | None = "BN",
        discrete_action_encoding_type: str = "one_hot",
        *,
        reward_head_hidden_channels: Sequence[int] | None = None,
        value_head_hidden_channels: Sequence[int] | None = None,
        policy_head_hidden_channels: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        encoding = discrete_action_encoding_type
        if encoding not in ("one_hot", "not_one_hot"):
            raise AssertionError(encoding)
        self.reward_support_size = reward_support_size if categorical_distribution else 1
        self.value_support_size = value_support_size if categorical_distribution else 1
        self.action_space_size = action_space_size
        self.discrete_action_encoding_type = encoding
        self.action_encoding_dim = action_space_size if encoding == "one_hot" else 1
        self.lstm_hidden_size = lstm_hidden_size
        self.proj_hid, self.proj_out = proj_hid, proj_out
        self.pred_hid, self.pred_out = pred_hid, pred_out
        self.last_linear_layer_init_zero = last_linear_layer_init_zero
        self.state_norm = state_norm
        self.downsample = downsample
        self.self_supervised_learning_loss = self_supervised_learning_loss
        self.norm_type = norm_type
        self.activation = own_activation(activation)

        heads = {
            "reward": (reward_head_channels, fc_reward_layers, reward_head_hidden_channels),
            "value": (value_head_channels, fc_value_layers, value_head_hidden_channels),
            "policy": (policy_head_channels, fc_policy_layers, policy_head_hidden_channels),
        }
        self._add_networks(_three_lengths(observation_shape), num_res_blocks, num_channels, heads)
        if self_supervised_learning_loss:
            self._add_projection()

    def _add_networks(
        self,
        shape: Sequence[int],
        num_res_blocks: int,
        num_channels: int,
        heads: Mapping[str, _Head],
    ) -> None:
        """Add the three networks, in the order of the random numbers of their weights."""
        factor = reduction(self, shape) if self.downsample else 1
        # What the heads see. LightZero gives them the observation's size, and they take it for 16
        # times that of the latent state, which is not so if observations are 64 pixels high.
        latent = [num_channels, -(-shape[1] // factor), -(-shape[2] // factor)]
        cells = latent[1] * latent[2]
        self.projection_input_dim = num_channels * cells
        channels = {kind: head[0] for kind, head in heads.items()}
        hidden = {kind: _hidden(kind, *head[1:]) for kind, head in heads.items()}
        common: dict[str, Any] = {"activation": self.activation, "norm_type": self.norm_type}
        zero_last: dict[str, Any] = {
            "last_linear_layer_init_zero": self.last_linear_layer_init_zero
        }
        self.representation_network = RepresentationNetwork(
            shape, num_res_blocks, num_channels, self.downsample, **common
        )
        self.dynamics_network = DynamicsNetwork(
            latent,
            self.action_encoding_dim,
            num_res_blocks,
            num_channels + self.action_encoding_dim,
            channels["reward"],
            hidden["reward"],
            self.reward_support_size,
            channels["reward"] * cells,
            lstm_hidden_size=self.lstm_hidden_size,
            **zero_last,
            **common,
        )
        self.prediction_network = PredictionNetwork(
            latent,
            self.action_space_size,
            num_res_blocks,
            num_channels,
            channels["value"],
            channels["policy"],
            hidden["value"],
            hidden["policy"],
            self.value_support_size,
            channels["value"] * cells,
            channels["policy"] * cells,
            **zero_last,
            **common,
        )

    def _add_projection(self) -> None:
        """Add what the self-supervised loss compares latent states by; its norms are BatchNorm."""
        activation = [] if self.activation is None else [self.activation]
        self.projection = nn.Sequential(
            *(nn.Linear(self.projection_input_dim, self.proj_hid), nn.BatchNorm1d(self.proj_hid)),
            *activation,
            *(nn.Linear(self.proj_hid, self.proj_hid), nn.BatchNorm1d(self.proj_hid)),
            *activation,
            *(nn.Linear(self.proj_hid, self.proj_out), nn.BatchNorm1d(self.proj_out)),
        )
        self.prediction_head = nn.Sequential(
            *(nn.Linear(self.proj_out, self.pred_hid), nn.BatchNorm1d(self.pred_hid)),
            *activation,
            nn.Linear(self.pred_hid, self.pred_out),
        )

    def initial_inference(self, obs: Tensor) -> EZNetworkOutput:
        """Begin a search: represent observations, and predict what to do.

        Args:
            obs: Observations, (batch, channels, height, width).

        Returns:
            The predictions, with a value prefix and hidden states of zero.
        """
        latent_state = self._representation(obs)
        policy_logits, value = self._prediction(latent_state)
        shape = (1, obs.shape[0], self.lstm_hidden_size)
        # LightZero's zeros are always float32, which a network in another precision refuses.
        hidden = (latent_state.new_zeros(shape), latent_state.new_zeros(shape))
        return EZNetworkOutput(value, [0.0] * obs.shape[0], policy_logits, latent_state, hidden)

    def recurrent_inference(
        self,
        latent_state: Tensor,
        reward_hidden_state: tuple[Tensor, Tensor] | None,
        action: Tensor,
    ) -> EZNetworkOutput:
        """Take a step of a search: what an action leads to, and what to do then.

        Args:
            latent_state: Latent states, (batch, num_channels, height, width).
            reward_hidden_state: h and c, each (1, batch, lstm_hidden_size); None for zeros.
            action: The number of an action for each of them, (batch,) or (batch, 1).

        Returns:
            The predictions, with the next latent state and hidden states.

        Raises:
            RuntimeError: There is no such action, or a shape does not fit.
        """
        state, hidden, value_prefix = self._dynamics(latent_state, reward_hidden_state, action)
        policy_logits, value = self._prediction(state)
        return EZNetworkOutput(value, value_prefix, policy_logits, state, hidden)

    def project(self, latent_state: Tensor, with_grad: bool = True) -> Tensor:
        """Project latent states to the features that the self-supervised loss compares.

        Args:
            latent_state: Latent states, (batch, num_channels, height, width).
            with_grad: True for the online branch, through the head after the projection; False for
                the projection alone, without gradient.

        Returns:
            Features, (batch, pred_out) or (batch, proj_out).

        Raises:
            AttributeError: The model was made without ``self_supervised_learning_loss``.
        """
        features: Tensor = self.projection(latent_state.flatten(1))
        return cast("Tensor", self.prediction_head(features)) if with_grad else features.detach()

    def _representation(self, observation: Tensor) -> Tensor:
        latent_state: Tensor = self.representation_network(observation)
        return _renormalized(latent_state) if self.state_norm else latent_state

    def _prediction(self, latent_state: Tensor) -> tuple[Tensor, Tensor]:
        return cast("tuple[Tensor, Tensor]", self.prediction_network(latent_state))

    def _dynamics(
        self,
        latent_state: Tensor,
        reward_hidden_state: tuple[Tensor, Tensor] | None,
        action: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        inputs = torch.cat([latent_state, self._action_planes(latent_state, action)], 1)
        state, hidden, value_prefix = self.dynamics_network(inputs, reward_hidden_state)
        return _renormalized(state) if self.state_norm else state, hidden, value_prefix

    def _action_planes(self, latent_state: Tensor, action: Tensor) -> Tensor:
        """Return planes of the size of the latent state that tell the action."""
        action = action.reshape(-1, 1)
        if self.discrete_action_encoding_type == "one_hot":
            encoded = latent_state.new_zeros(len(action), self.action_space_size)
            encoded.scatter_(1, action.long(), 1)
        else:
            # The quotient of integers has the default precision, as it has in LightZero.
            encoded = (action / self.action_space_size).to(latent_state.dtype)
        batch, _, height, width = latent_state.shape
        return encoded.unsqueeze(2).unsqueeze(3).expand(batch, -1, height, width)


def _three_lengths(observation_shape: int | Sequence[int]) -> Sequence[int]:
    if isinstance(observation_shape, int):
        return [1, observation_shape, 1]
    return [1, observation_shape[0], 1] if len(observation_shape) == 1 else observation_shape


def _hidden(kind: str, layers: Sequence[int], alias: Sequence[int] | None) -> Sequence[int]:
    """Return the hidden layers of a head, under whichever name they were given."""
    names = f"fc_{kind}_layers", f"{kind}_head_hidden_channels"
    chosen = renamed("EfficientZeroModel", names[0], layers, ONE_HIDDEN_LAYER, names[1], alias)
    return cast("Sequence[int]", chosen)


def _renormalized(latent_state: Tensor) -> Tensor:
    """Scale each latent state so that it lies between 0 and 1; a constant one becomes zero."""
    flat = latent_state.flatten(1)
    lowest, highest = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    scaled = (flat - lowest) / (highest - lowest).clamp(min=1e-8)
    return scaled.reshape(latent_state.shape)
