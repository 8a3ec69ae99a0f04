"""EfficientZero's model as in LightZero: three networks and the two inference steps of a search."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from modkit import nn
from modkit.models._networks import (
    DEFAULT_ACTIVATION,
    DynamicsNetwork,
    PredictionNetwork,
    RepresentationNetwork,
    mean_magnitude,
    own_activation,
    reduction,
)


# Names of LightZero 0.2, with the older ones.
NEWER_NAMES: Final = {
    "reward_head_hidden_channels": "fc_reward_layers",
    "value_head_hidden_channels": "fc_value_layers",
    "policy_head_hidden_channels": "fc_policy_layers",
    "reward_support_range": "reward_support_size",
    "value_support_range": "value_support_size",
}

# h and c of the LSTM.
HiddenState: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class EfficientZeroConfig:
    """Options of an :class:`EfficientZeroModel`. Names, order and defaults are LightZero's.

    Attributes:
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
        downsample: If True, begin by downsampling, as large images require: without it, a model
            for images of 96x96 pixels has 900 million parameters.
        activation: Activation of all layers; by default a new ReLU.
        norm_type: "BN" or "LN".
        discrete_action_encoding_type: "one_hot" for one plane per action, or "not_one_hot".

    Raises:
        AssertionError: If ``discrete_action_encoding_type`` is invalid.

    Example:
        >>> from dataclasses import replace
        >>> from modkit.models import EfficientZeroConfig, EfficientZeroModel
        >>> config = EfficientZeroConfig((3, 6, 7), action_space_size=7, num_channels=16)
        >>> model = EfficientZeroModel(config)
        >>> wider = EfficientZeroModel(replace(config, num_channels=32))
    """

    observation_shape: int | Sequence[int] = (12, 96, 96)
    action_space_size: int = 6
    lstm_hidden_size: int = 512
    num_res_blocks: int = 1
    num_channels: int = 64
    reward_head_channels: int = 16
    value_head_channels: int = 16
    policy_head_channels: int = 16
    fc_reward_layers: Sequence[int] = (32,)
    fc_value_layers: Sequence[int] = (32,)
    fc_policy_layers: Sequence[int] = (32,)
    reward_support_size: int = 601
    value_support_size: int = 601
    proj_hid: int = 1024
    proj_out: int = 1024
    pred_hid: int = 512
    pred_out: int = 1024
    self_supervised_learning_loss: bool = True
    categorical_distribution: bool = True
    last_linear_layer_init_zero: bool = True
    state_norm: bool = False
    downsample: bool = False
    activation: nn.Module | None = DEFAULT_ACTIVATION
    norm_type: str | None = "BN"
    discrete_action_encoding_type: str = "one_hot"

    def __post_init__(self) -> None:
        if self.discrete_action_encoding_type not in ("one_hot", "not_one_hot"):
            # LightZero's assert statement raises this.
            raise AssertionError(self.discrete_action_encoding_type)

    @classmethod
    def from_lightzero(cls, *args: Any, **options: Any) -> "EfficientZeroConfig":
        """Make a configuration from the arguments of LightZero's model, of any version.

        Args:
            *args: Options in the order of the attributes.
            **options: Options by name. Those of LightZero 0.2 are known too and take the place of
                the older ones; other names have no effect, since LightZero passes the whole
                section of a configuration.

        Returns:
            The configuration.
        """
        for newer, older in NEWER_NAMES.items():
            if newer in options:
                value = options[newer]
                # A range is the start, the end and the step of a support.
                is_range = newer.endswith("_range")
                options[older] = len(torch.arange(*value)) if is_range else value

        names = {field.name for field in fields(cls)}
        return cls(*args, **{name: value for name, value in options.items() if name in names})

    def logits(self, support_size: int) -> int:
        """Return the number of logits that a head has for a support of this size."""
        return support_size if self.categorical_distribution else 1

    @property
    def image_shape(self) -> Sequence[int]:
        """Channels, height and width of an observation; a vector is an image of one column."""
        shape = self.observation_shape
        sizes = [shape] if isinstance(shape, int) else shape
        return (1, sizes[0], 1) if len(sizes) == 1 else sizes

    @property
    def latent_shape(self) -> Sequence[int]:
        """Channels, height and width of a latent state."""
        _, height, width = self.image_shape
        # LightZero's heads divide the observation's size by 16, which is wrong if it is 64 high.
        factor = reduction(self.image_shape) if self.downsample else 1
        return (self.num_channels, -(-height // factor), -(-width // factor))


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
    reward_hidden_state: HiddenState


def scaled(latent_state: Tensor) -> Tensor:
    """Scale each latent state to [0, 1]; a constant one becomes zero."""
    flat = latent_state.flatten(1)
    lowest, highest = flat.aminmax(dim=1, keepdim=True)
    # Without the bound, the elements of a constant state would be 0 / 0.
    return ((flat - lowest) / (highest - lowest).clamp(min=1e-8)).reshape(latent_state.shape)


class EfficientZeroModel(nn.Module):
    """EfficientZero's model: observations to latent states, steps between them, and predictions.

    The state dict, the initial weights of a seed, the outputs and the gradients are those of
    LightZero's class.

    Args:
        *args: An :class:`EfficientZeroConfig`; or its options in their order, as in LightZero.
        **options: Options by name, which replace those of a configuration. Without one, names of
            LightZero 0.2 are known too and unknown names have no effect, as in
            :meth:`EfficientZeroConfig.from_lightzero`.

    Raises:
        AssertionError: If ``norm_type`` or ``discrete_action_encoding_type`` is invalid.
        NotImplementedError: If observations of this height cannot be downsampled.
        IndexError: If a head has no hidden layer.

    Example:
        >>> import torch
        >>> from modkit.models import EfficientZeroModel
        >>> model = EfficientZeroModel((3, 6, 7), action_space_size=7, num_channels=16).eval()
        >>> model.initial_inference(torch.zeros(1, 3, 6, 7)).policy_logits.shape
        torch.Size([1, 7])

    Same as ``lzero.model.efficientzero_model.EfficientZeroModel``; ``docs/models.md`` lists the
    differences.
    """

    action_space_size: int
    lstm_hidden_size: int
    discrete_action_encoding_type: str
    state_norm: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        if args and isinstance(args[0], EfficientZeroConfig):
            config = replace(*args, **options)
        else:
            config = EfficientZeroConfig.from_lightzero(*args, **options)
        # One activation for all networks, which each would make otherwise.
        config = replace(config, activation=own_activation(config.activation))
        # In LightZero, too, options are attributes of the model.
        for name, value in vars(config).items():
            setattr(self, name, value)
        self.reward_support_size: int = config.logits(config.reward_support_size)
        self.value_support_size: int = config.logits(config.value_support_size)

        one_hot = config.discrete_action_encoding_type == "one_hot"
        self.action_encoding_dim: int = config.action_space_size if one_hot else 1
        channels, height, width = config.latent_shape
        self.projection_input_dim: int = channels * height * width

        # The order decides the random numbers of the weights.
        self.representation_network: RepresentationNetwork = RepresentationNetwork(config)
        self.dynamics_network: DynamicsNetwork = DynamicsNetwork(
            observation_shape=config.latent_shape,
            action_encoding_dim=self.action_encoding_dim,
            num_res_blocks=config.num_res_blocks,
            num_channels=config.num_channels + self.action_encoding_dim,
            reward_head_channels=config.reward_head_channels,
            fc_reward_layers=config.fc_reward_layers,
            output_support_size=self.reward_support_size,
            flatten_output_size_for_reward_head=config.reward_head_channels * height * width,
            lstm_hidden_size=config.lstm_hidden_size,
            last_linear_layer_init_zero=config.last_linear_layer_init_zero,
            activation=config.activation,
            norm_type=config.norm_type,
        )
        self.prediction_network: PredictionNetwork = PredictionNetwork(config)
        if config.self_supervised_learning_loss:
            self._add_projection(config)

    def _add_projection(self, config: EfficientZeroConfig) -> None:
        """Add the layers by which the self-supervised loss compares latent states."""

        # BatchNorm whatever norm_type is, as in LightZero.
        def hidden(in_features: int, out_features: int) -> list[Any]:
            linear = nn.Linear(in_features, out_features)
            return [linear, nn.BatchNorm1d(out_features), config.activation]

        self.projection: nn.Sequential = nn.Sequential(
            *hidden(self.projection_input_dim, config.proj_hid),
            *hidden(config.proj_hid, config.proj_hid),
            nn.Linear(config.proj_hid, config.proj_out),
            nn.BatchNorm1d(config.proj_out),
        )
        self.prediction_head: nn.Sequential = nn.Sequential(
            *hidden(config.proj_out, config.pred_hid),
            nn.Linear(config.pred_hid, config.pred_out),
        )

    def initial_inference(self, obs: Tensor) -> EZNetworkOutput:
        """Represent observations, and predict policy and value: the root of a search.

        Args:
            obs: Observations, (batch, channels, height, width).

        Returns:
            The predictions. The value prefix and the hidden states are zero.
        """
        latent_state = self.representation_network(obs)
        shape = (1, obs.shape[0], self.lstm_hidden_size)
        # LightZero's zeros are always float32, which a network in another precision refuses.
        hidden = (latent_state.new_zeros(shape), latent_state.new_zeros(shape))
        # A list as in LightZero: before the first action there is nothing to predict.
        return self._predict(latent_state, [0.0] * obs.shape[0], hidden)

    def recurrent_inference(
        self, latent_state: Tensor, reward_hidden_state: HiddenState | None, action: Tensor
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
            try:
                encoded.scatter_(1, action.long(), 1)
            except RuntimeError as error:
                raise RuntimeError(f"action out of range: {error}") from error
        else:
            # The quotient of integers has the default precision, as in LightZero.
            encoded = (action / self.action_space_size).to(latent_state.dtype)

        planes = encoded[:, :, None, None].expand(len(latent_state), -1, *latent_state.shape[2:])
        inputs = torch.cat([latent_state, planes], 1)

        state, hidden, value_prefix = self.dynamics_network(inputs, reward_hidden_state)
        return self._predict(state, value_prefix, hidden)

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

    def get_params_mean(self) -> float:
        """Return the mean absolute value of all parameters, as in LightZero after version 0.2.

        In earlier versions of LightZero the method raises AttributeError.

        Returns:
            The mean over all elements, computed in double precision.
        """
        return mean_magnitude([*self.parameters()])

    def _predict(
        self, latent_state: Tensor, value_prefix: Tensor | list[float], hidden: HiddenState
    ) -> EZNetworkOutput:
        """Predict policy and value at a latent state, for the result of an inference."""
        if self.state_norm:
            latent_state = scaled(latent_state)
        policy_logits, value = self.prediction_network(latent_state)
        return EZNetworkOutput(
            value=value,
            value_prefix=value_prefix,
            policy_logits=policy_logits,
            latent_state=latent_state,
            reward_hidden_state=hidden,
        )
