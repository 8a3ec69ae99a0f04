import inspect
import re

import pytest
import torch

from modkit import models, nn
from tests.capabilities import EMPTY_INPUTS_ARE_REFUSED
from tests.cases import for_each
from tests.efficientzero import CASES, NETWORKS, small


def plainly(value):
    """Write a value without its address in memory, which differs from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def network(**options):
    """A DynamicsNetwork for planes of 3x3: 8 channels, of which 2 hold the action."""
    given = {
        "observation_shape": (4, 3, 3),
        "num_channels": 8,
        "reward_head_channels": 2,
        "flatten_output_size_for_reward_head": 18,
        "lstm_hidden_size": 12,
    }
    return models.DynamicsNetwork(**{**given, **options})


@for_each("norm_type", ["GN", "IN", "bn", None, "", 0])
@for_each("kind", ["DynamicsNetwork", "RepresentationNetwork", "PredictionNetwork", "DownSample"])
def test_norm_type(kind, norm_type):
    """A normalization other than the two is LightZero's error."""
    case = {
        "DynamicsNetwork": "BN",
        "RepresentationNetwork": "RepresentationNetwork, BN",
        "PredictionNetwork": "PredictionNetwork, BN",
        "DownSample": "DownSample96, BN",
    }[kind]
    options = {**CASES[case].options, "norm_type": norm_type}

    with pytest.raises(AssertionError, match="norm_type must in") as caught:
        getattr(NETWORKS, kind)(**options)

    assert str(caught.value) == "norm_type must in ['BN', 'LN']"


@for_each(
    ("options", "error", "text"),
    [
        ({"fc_reward_layers": []}, IndexError, "out of range"),
        ({"fc_reward_layers": 32}, TypeError, "int"),
        ({"flatten_output_size_for_reward_head": 0}, ValueError, "input_size must be greater than"),
        ({"lstm_hidden_size": 0}, ValueError, "hidden_size must be greater than zero"),
        ({"lstm_hidden_size": 1.5}, TypeError, "hidden_size should be of type int"),
        ({"num_res_blocks": 1.5}, TypeError, "float"),
        ({"activation": torch.relu}, TypeError, "is not a Module subclass"),
        ({"activation": nn.ReLU}, TypeError, "is not a Module subclass"),
        ({"observation_shape": 4, "norm_type": "LN"}, TypeError, "not subscriptable"),
        ({"observation_shape": (4,), "norm_type": "LN"}, IndexError, "out of range"),
        ({"width": 3}, TypeError, "unexpected keyword argument 'width'"),
    ],
    ids=plainly,
)
def test_constructor(options, error, text):
    """Other bad arguments raise the type of error that they raise in LightZero."""
    if "input_size" in text and not EMPTY_INPUTS_ARE_REFUSED:
        pytest.skip("this torch makes an LSTM without inputs")
    with pytest.raises(error, match=text):
        network(**options)


@pytest.mark.parametrize(
    ("size", "samples"), [(4, 4), (6, 16)], ids=["does not divide", "divides into more samples"]
)
def test_planes_of_another_size(size, samples):
    """Planes of another size are refused; LightZero mixes samples where the numbers divide."""
    text = f"Expected 18, got {2 * size * size}"

    with pytest.raises(RuntimeError, match=text):
        network().eval()(torch.randn(4, 8, size, size), state(1, samples, 12))


def test_actions():
    """An action that does not exist, and an unknown encoding of actions, are refused."""
    case = CASES["model, BN, one_hot"]
    model = case.build().eval()
    latent, hidden, _ = case.inputs("recurrent_inference", torch.float32)

    with pytest.raises(RuntimeError, match="action out of range: index 5 is out"):
        model.recurrent_inference(latent, hidden, torch.tensor([0, 1, 5]))
    with pytest.raises(AssertionError, match="two_hot"):
        models.EfficientZeroModel((4, 3, 3), discrete_action_encoding_type="two_hot")


def test_projection_left_out():
    """Without the self-supervised loss there is no projection."""
    options = {**CASES["model, BN, one_hot"].options, "self_supervised_learning_loss": False}
    model = models.EfficientZeroModel(**options)

    with pytest.raises(AttributeError, match="projection"):
        model.project(torch.randn(2, 8, 6, 7))


def test_newer_names():
    """The arguments that LightZero 0.2 has renamed build the same network."""
    old = small()
    options = dict(old.options)
    new = small(
        reward_head_hidden_channels=options.pop("fc_reward_layers"),
        flatten_input_size_for_reward_head=options.pop("flatten_output_size_for_reward_head"),
    )
    new_options = {key: value for key, value in new.options.items() if key not in old.options}

    torch.manual_seed(0)
    actual = models.DynamicsNetwork(**options, **new_options)

    expected = old.build()
    assert repr(actual) == repr(expected)
    assert all(map(torch.equal, actual.parameters(), expected.parameters()))
    assert actual.flatten_output_size_for_reward_head == 72
    assert actual.flatten_input_size_for_reward_head == 72


# --- the configuration ----------------------------------------------------------------------------


def test_configuration():
    """A model of a configuration is that of its options; options by name replace some."""
    config = models.EfficientZeroConfig((4, 3, 3), 5, num_channels=8)

    model = models.EfficientZeroModel(config)

    assert repr(model) == repr(models.EfficientZeroModel((4, 3, 3), 5, num_channels=8))
    wider = models.EfficientZeroModel(config, num_channels=16)
    assert repr(wider) == repr(models.EfficientZeroModel((4, 3, 3), 5, num_channels=16))
    with pytest.raises(TypeError, match="frame_stack_num"):
        models.EfficientZeroModel(config, frame_stack_num=4)
    with pytest.raises(TypeError, match="positional"):
        models.EfficientZeroModel(config, 5)


def test_signature():
    """Names, order and defaults of the arguments are those that LightZero documents."""
    parameters = inspect.signature(models.DynamicsNetwork).parameters.values()
    documented = {
        "observation_shape": inspect.Parameter.empty,
        "action_encoding_dim": 2,
        "num_res_blocks": 1,
        "num_channels": 64,
        "reward_head_channels": 64,
        "fc_reward_layers": [32],
        "output_support_size": 601,
        "flatten_output_size_for_reward_head": 64,
        "downsample": False,
        "lstm_hidden_size": 512,
        "last_linear_layer_init_zero": True,
        "norm_type": "BN",
    }

    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = {p.name: p.default for p in positional}
    assert repr(defaults.pop("activation")) == "ReLU(inplace=True)"
    assert defaults == documented
    assert list(defaults) == list(documented)


def state(*shape):
    """A hidden state of zeros."""
    return torch.zeros(shape), torch.zeros(shape)


@pytest.mark.parametrize("size", [(12, 7), (6, 14)])
def test_planes_of_another_size_in_prediction(size):
    """The heads of policy and value refuse it too."""
    predict = CASES["PredictionNetwork, BN"].build()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        predict(torch.randn(2, 8, *size))
