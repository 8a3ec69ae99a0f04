"""EfficientZero's model as in LightZero: three networks and the two inference steps of a search."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from modkit import nn
from modkit.models._networks import (
    DEFAULT_ACTIVATION,
    ONE_HIDDEN_LAYER,
    DynamicsNetwork,
    PredictionNetwork,
    RepresentationNetwork,
    checked,
    reduction,
    renamed,
)


# Of a head its channels, and its hidden layers under the older and the newer name.
_Head: TypeAlias = tuple[int, Sequence[int], Sequence[int] | None]


def _hidden_layers(kind: str, head: _Head) -> Sequence[int]:
    """Return the hidden layers of a head, under whichever name they were given."""
    _, layers, newer_layers = head
    names = {f"fc_{kind}_layers": layers, f"{kind}_head_hidden_channels": newer_layers}
    hidden: Sequence[int] = renamed("EfficientZeroModel", ONE_HIDDEN_LAYER, **names)
    return hidden


def _number_of_logits(
    is_categorical: bool, size: int, support_range: Sequence[float] | None
) -> int:
    """Return the number of logits, for which LightZero after version 0.2 has a range."""
    if not is_categorical:
        return 1
    return size if support_range is None else len(torch.arange(*support_range))


@dataclass
class EZNetworkOutput:
    """The result of one inference of an :class:`EfficientZeroModel`.

    Attributes:
        value: Logits, (batch, value_support_size).
        value_prefix: Logits, (batch, reward_support_size); zeros after the initial inference.
        policy_logits: Logits of the actions, (batch, action_space_size).
        latent_state: Latent states, (batch, num_channels, height, width).
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
        observation_shape: Channels, height and width of an observation; an integer n means (1, n,
            1).
        action_space_size: Number of actions.
        lstm_hidden_size: Size of the hidden states.
        num_res_blocks: Number of residual blocks in each of the three networks.
        num_channels: Channels of the latent state.
        reward_head_channels: Channels before the head of the value prefix.
        value_head_channels: Channels before the head of the value.
        policy_head_channels: Channels before the head of the policy.
        fc_reward_layers: Hidden layers of the value prefix: one for each element, all as wide as
            the first.
        fc_value_layers: Hidden layers of the value, in the same way.
        fc_policy_layers: Hidden layers of the policy, in the same way.
        reward_support_size: Number of logits of the value prefix.
        value_support_size: Number of logits of the value.
        proj_hid: Width of the projection's hidden layers.
        proj_out: Number of features of the projection.
        pred_hid: Width of the hidden layer of the head after the projection.
        pred_out: Number of features of that head.
        self_supervised_learning_loss: If True, the model has a projection.
        categorical_distribution: If False, the value and the value prefix are single numbers.
        last_linear_layer_init_zero: If True, policy, value and value prefix are zero at first.
        state_norm: If True, each latent state is scaled to lie between 0 and 1.
        downsample: If True, begin with :class:`DownSample`, as large images require: without it, a
            model for images of 96x96 pixels has 900 million parameters.
        activation: Activation of all layers; by default a new ReLU.
        norm_type: "BN" or "LN".
        discrete_action_encoding_type: "one_hot" for one plane per action, or "not_one_hot".
        reward_head_hidden_channels: Name of ``fc_reward_layers`` in LightZero 0.2.
        value_head_hidden_channels: Name of ``fc_value_layers`` in LightZero 0.2.
        policy_head_hidden_channels: Name of ``fc_policy_layers`` in LightZero 0.2.
        reward_support_range: Start, end and step of the supports, in place of
            ``reward_support_size``: as in LightZero after version 0.2.
        value_support_range: Start, end and step in place of ``value_support_size``.
        **kwargs: No effect: LightZero passes the whole section of a configuration.

    Raises:
        AssertionError: If ``norm_type`` or ``discrete_action_encoding_type`` is invalid.
        NotImplementedError: If observations of this height cannot be downsampled.
        IndexError: If a head has no hidden layer.
        TypeError: If an argument is given under both of its names.

    Example:
        >>> import torch
        >>> from modkit.models import EfficientZeroModel
        >>> model = EfficientZeroModel((3, 6, 7), action_space_size=7, num_channels=16).eval()
        >>> model.initial_inference(torch.zeros(1, 3, 6, 7)).policy_logits.shape
        torch.Size([1, 7])

    Same as ``lzero.model.efficientzero_model.EfficientZeroModel``; ``docs/models.md`` lists the
    differences.
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
        reward_support_range: Sequence[float] | None = None,
        value_support_range: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if discrete_action_encoding_type not in ("one_hot", "not_one_hot"):
            # LightZero's assert statement raises this.
            raise AssertionError(discrete_action_encoding_type)

        number_of_logits = partial(_number_of_logits, categorical_distribution)
        self.reward_support_size: int = number_of_logits(reward_support_size, reward_support_range)
        self.value_support_size: int = number_of_logits(value_support_size, value_support_range)
        self.action_space_size = action_space_size
        self.discrete_action_encoding_type = discrete_action_encoding_type
        self.lstm_hidden_size = lstm_hidden_size
        self.proj_hid, self.proj_out = proj_hid, proj_out
        self.pred_hid, self.pred_out = pred_hid, pred_out
        self.last_linear_layer_init_zero = last_linear_layer_init_zero
        self.state_norm = state_norm
        self.downsample = downsample
        self.self_supervised_learning_loss = self_supervised_learning_loss
        self.norm_type = norm_type
        self.activation: nn.Module | None = checked(norm_type, activation)

        heads: dict[str, _Head] = {
            "reward": (reward_head_channels, fc_reward_layers, reward_head_hidden_channels),
            "value": (value_head_channels, fc_value_layers, value_head_hidden_channels),
            "policy": (policy_head_channels, fc_policy_layers, policy_head_hidden_channels),
        }
        self._add_networks(observation_shape, num_res_blocks, num_channels, heads)

    def _add_networks(
        self,
        observation_shape: int | Sequence[int],
        num_res_blocks: int,
        num_channels: int,
        heads: dict[str, _Head],
    ) -> None:
        """Add the networks, in the order of the random numbers of their weights."""
        one_hot = self.discrete_action_encoding_type == "one_hot"
        self.action_encoding_dim: int = self.action_space_size if one_hot else 1
        shape = [observation_shape] if isinstance(observation_shape, int) else observation_shape
        # A vector of n numbers is an image of n rows and one column.
        shape = [1, shape[0], 1] if len(shape) == 1 else shape
        factor = reduction(self, shape) if self.downsample else 1
        # LightZero's heads divide the observation's size by 16, which is wrong if it is 64 high.
        latent = [num_channels, -(-shape[1] // factor), -(-shape[2] // factor)]
        cells = latent[1] * latent[2]

        channels = {kind: head[0] for kind, head in heads.items()}
        hidden = {kind: _hidden_layers(kind, head) for kind, head in heads.items()}

        common: dict[str, Any] = {"activation": self.activation, "norm_type": self.norm_type}
        self.representation_network: RepresentationNetwork = RepresentationNetwork(
            observation_shape=shape,
            num_res_blocks=num_res_blocks,
            num_channels=num_channels,
            downsample=self.downsample,
            **common,
        )
        # Only now: the representation network has no linear layer, and does not take it.
        common["last_linear_layer_init_zero"] = self.last_linear_layer_init_zero
        self.dynamics_network: DynamicsNetwork = DynamicsNetwork(
            observation_shape=latent,
            action_encoding_dim=self.action_encoding_dim,
            num_res_blocks=num_res_blocks,
            num_channels=num_channels + self.action_encoding_dim,
            reward_head_channels=channels["reward"],
            fc_reward_layers=hidden["reward"],
            output_support_size=self.reward_support_size,
            flatten_output_size_for_reward_head=channels["reward"] * cells,
            lstm_hidden_size=self.lstm_hidden_size,
            **common,
        )
        self.prediction_network: PredictionNetwork = PredictionNetwork(
            observation_shape=latent,
            action_space_size=self.action_space_size,
            num_res_blocks=num_res_blocks,
            num_channels=num_channels,
            value_head_channels=channels["value"],
            policy_head_channels=channels["policy"],
            fc_value_layers=hidden["value"],
            fc_policy_layers=hidden["policy"],
            output_support_size=self.value_support_size,
            flatten_output_size_for_value_head=channels["value"] * cells,
            flatten_output_size_for_policy_head=channels["policy"] * cells,
            **common,
        )

        self.projection_input_dim: int = num_channels * cells
        if self.self_supervised_learning_loss:
            self._add_projection()

    def _add_projection(self) -> None:
        """Add the layers by which the self-supervised loss compares latent states.

        Their norms are BatchNorm, whatever ``norm_type`` is, as in LightZero.
        """
        self.projection: nn.Sequential = nn.Sequential(
            *self._layer(self.projection_input_dim, self.proj_hid),
            *self._layer(self.proj_hid, self.proj_hid),
            nn.Linear(self.proj_hid, self.proj_out),
            nn.BatchNorm1d(self.proj_out),
        )
        self.prediction_head: nn.Sequential = nn.Sequential(
            *self._layer(self.proj_out, self.pred_hid),
            nn.Linear(self.pred_hid, self.pred_out),
        )

    def _layer(self, in_features: int, out_features: int) -> list[nn.Module]:
        activation = [] if self.activation is None else [self.activation]
        return [nn.Linear(in_features, out_features), nn.BatchNorm1d(out_features), *activation]

    def initial_inference(self, obs: Tensor) -> EZNetworkOutput:
        """Represent observations, and predict policy and value: the root of a search.

        Args:
            obs: Observations, (batch, channels, height, width).

        Returns:
            The predictions. The value prefix and the hidden states are zero.
        """
        latent_state = self._normalized(self.representation_network(obs))
        policy_logits, value = self.prediction_network(latent_state)
        shape = (1, obs.shape[0], self.lstm_hidden_size)
        # LightZero's zeros are always float32, which a network in another precision refuses.
        hidden = (latent_state.new_zeros(shape), latent_state.new_zeros(shape))
        return EZNetworkOutput(
            value=value,
            # A list as in LightZero: before the first action there is nothing to predict.
            value_prefix=[0.0] * obs.shape[0],
            policy_logits=policy_logits,
            latent_state=latent_state,
            reward_hidden_state=hidden,
        )

    def recurrent_inference(
        self,
        latent_state: Tensor,
        reward_hidden_state: tuple[Tensor, Tensor] | None,
        action: Tensor,
    ) -> EZNetworkOutput:
        """Predict the latent state after an action, its value prefix, and policy and value there.

        Args:
            latent_state: Latent states, (batch, num_channels, height, width).
            reward_hidden_state: h and c, each (1, batch, lstm_hidden_size); None for zeros.
            action: Index of an action for each latent state, (batch,) or (batch, 1).

        Returns:
            The predictions, with the next latent states and hidden states.

        Raises:
            RuntimeError: If an index is out of range, or a shape does not fit.
        """
        action = action.reshape(-1, 1)
        if self.discrete_action_encoding_type == "one_hot":
            encoded = latent_state.new_zeros(len(action), self.action_space_size)
            # Not by nn.functional.one_hot, whose result is int64 and would have to be cast.
            encoded.scatter_(1, action.long(), 1)
        else:
            # The quotient of integers has the default precision, as in LightZero.
            encoded = (action / self.action_space_size).to(latent_state.dtype)

        batch, _, height, width = latent_state.shape
        planes = encoded.unsqueeze(2).unsqueeze(3).expand(batch, -1, height, width)
        inputs = torch.cat([latent_state, planes], 1)

        state, hidden, value_prefix = self.dynamics_network(inputs, reward_hidden_state)
        state = self._normalized(state)
        policy_logits, value = self.prediction_network(state)
        return EZNetworkOutput(
            value=value,
            value_prefix=value_prefix,
            policy_logits=policy_logits,
            latent_state=state,
            reward_hidden_state=hidden,
        )

    def project(self, latent_state: Tensor, with_grad: bool = True) -> Tensor:
        """Project latent states to the features that the self-supervised loss compares.

        Args:
            latent_state: Latent states, (batch, num_channels, height, width).
            with_grad: True for the online branch, through the head after the projection; False for
                the target, which is the projection alone, without gradient.

        Returns:
            Features, (batch, pred_out) or (batch, proj_out).

        Raises:
            AttributeError: If the model was created with ``self_supervised_learning_loss=False``.
        """
        features: Tensor = self.projection(latent_state.flatten(1))
        return cast("Tensor", self.prediction_head(features)) if with_grad else features.detach()

    def _normalized(self, latent_state: Tensor) -> Tensor:
        """Scale each latent state to [0, 1] if ``state_norm``; a constant one becomes zero."""
        if not self.state_norm:
            return latent_state
        flat = latent_state.flatten(1)
        lowest = flat.amin(1, keepdim=True)
        highest = flat.amax(1, keepdim=True)
        # Without the bound, the elements of a constant state would be 0 / 0.
        scaled = (flat - lowest) / (highest - lowest).clamp(min=1e-8)
        return scaled.reshape(latent_state.shape)
