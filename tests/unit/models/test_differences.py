from types import SimpleNamespace

import pytest
import torch

from modkit import nn
from tests.efficientzero import CASES, NETWORKS, scramble, small, tensors_in
from tests.integration.lightzero.networks import lightzero_networks
from tests.integration.torchscript import reloaded, scripted_tests


pytestmark = pytest.mark.parametrize("impl", ["lightzero", "modkit"])


@pytest.fixture
def networks(impl: str) -> SimpleNamespace:
    """The networks of one of the two, as a namespace."""
    if impl == "modkit":
        return NETWORKS
    pytest.importorskip("lzero", reason="needs LightZero: nox -s lightzero installs it")
    return lightzero_networks()


def random_inputs(batch=3):
    """Planes and hidden states for a small DynamicsNetwork."""
    x = torch.randn(batch, 11, 6, 6)
    return x, (torch.randn(1, batch, 12), torch.randn(1, batch, 12))


def model_options(**options):
    return {**CASES["model, BN, one_hot"].options, **options}


def test_mean_of_the_reward_head(networks):
    """The weights of the head come as one vector, with the mean of their absolute values."""
    network = small().build(networks)
    tensors = [network.conv1x1_reward.weight, *network.fc_reward_head.parameters()]

    weights, mean = network.get_reward_mean()

    assert weights.dtype.name == "float32"
    assert weights.shape == (sum(tensor.numel() for tensor in tensors),)
    assert weights[-5:].tolist() == network.fc_reward_head[3].bias.tolist()
    assert mean == pytest.approx(abs(weights).mean(), rel=1e-6)


def test_mean_of_the_parameters(networks):
    """A model has the mean of the absolute values of all its parameters."""
    model = networks.EfficientZeroModel(**model_options())
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert model.get_params_mean() == pytest.approx(values.double().abs().mean().item(), rel=1e-12)


def test_default_activation_is_not_shared_between_networks(networks):
    """A change of one network's default activation does not show in another network."""
    first, second = small().build(networks), small().build(networks)
    first.eval()

    assert first.activation is first.resblocks[0].act
    assert first.activation is first.fc_reward_head[2]
    assert second.activation is not first.activation
    assert second.activation.training


def test_output_of_the_first_normalization(networks):
    """A forward hook there keeps the output that the layer computed."""
    network = small().build(networks)
    seen, copies = [], []
    network.norm_common.register_forward_hook(lambda module, args, output: seen.append(output))
    network.norm_common.register_forward_hook(lambda *args: copies.append(args[2].clone()))

    network(*random_inputs())

    assert torch.equal(seen[0], copies[0])


def test_backward_hook_on_the_first_normalization(networks):
    """A full backward hook fits there."""
    network = small(activation=torch.nn.GELU()).build(networks)
    gradients = []
    network.norm_common.register_full_backward_hook(lambda *args: gradients.append(args[2]))

    latent, _, prefix = network(*random_inputs())
    (latent.sum() + prefix.sum()).backward()

    assert gradients[0][0].shape == (3, 8, 6, 6)


def test_planes_of_another_size(networks):
    """Features of one sample are never taken for those of several."""
    network = small().build(networks).eval()
    hidden = torch.zeros(1, 12, 12), torch.zeros(1, 12, 12)

    with pytest.raises(RuntimeError, match="Expected 72, got 288"):
        network(torch.randn(3, 11, 12, 12), hidden)


@pytest.mark.parametrize("planes", [0, -1])
def test_no_planes_of_the_action(networks, planes):
    """An action of no planes is refused when the network is built."""
    with pytest.raises(ValueError, match=f"action_encoding_dim={planes} is less than 1"):
        small(action_encoding_dim=planes).build(networks)


@scripted_tests
@pytest.mark.parametrize(
    "name",
    [
        "LN, downsample",
        "PReLU",
        "DownSample96, LN",
        "RepresentationNetwork96, BN",
        "RepresentationNetwork, LN",
        "PredictionNetwork, BN",
    ],
)
def test_script(networks, name):
    """The networks script, and an archive of them computes the same."""
    case = CASES[name]
    network = case.build(networks)
    scramble(network)
    network.eval()
    given = case.inputs("__call__", torch.float32)

    loaded = reloaded(torch.jit.script(network))

    torch.testing.assert_close(list(tensors_in(loaded(*given))), list(tensors_in(network(*given))))


@pytest.mark.parametrize("height", [64, 84, 96])
def test_layer_norm_with_downsampling(networks, height):
    """A model with both is built, and runs for each height that there is."""
    options = model_options(observation_shape=(4, height, height), norm_type="LN", downsample=True)
    model = networks.EfficientZeroModel(**options)
    root = model.initial_inference(torch.randn(2, 4, height, height))

    step = model.recurrent_inference(root.latent_state, None, torch.tensor([0, 1]))

    side = {64: 8, 84: 6, 96: 6}[height]
    assert root.latent_state.shape == step.latent_state.shape == (2, 8, side, side)


def test_images_of_84_pixels(networks):
    """They are downsampled to 6x6, as images of 96 pixels are."""
    options = model_options(observation_shape=(4, 84, 84), downsample=True)
    model = networks.EfficientZeroModel(**options)

    root = model.initial_inference(torch.randn(2, 4, 84, 84))

    assert root.latent_state.shape == (2, 8, 6, 6)


def test_shape_of_vector_observations(networks):
    """A tuple of one number is a column of that height, as the number alone is."""
    model = networks.EfficientZeroModel(**model_options(observation_shape=(5,)))

    root = model.initial_inference(torch.randn(2, 1, 5, 1))

    assert root.latent_state.shape == (2, 8, 5, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_search_in_another_precision(networks, dtype):
    """All of a search has the precision of the weights."""
    model = networks.EfficientZeroModel(**model_options()).to(dtype).eval()
    root = model.initial_inference(torch.randn(2, 4, 6, 7, dtype=dtype))

    step = model.recurrent_inference(
        root.latent_state, root.reward_hidden_state, torch.tensor([1, 3])
    )

    assert {tensor.dtype for tensor in tensors_in([root, step])} == {dtype}


def test_latent_states_between_0_and_1(networks):
    """With ``state_norm`` each latent state is scaled to that, and a constant one stays finite."""
    model = networks.EfficientZeroModel(**model_options(state_norm=True)).eval()
    plain = networks.EfficientZeroModel(**model_options()).eval()
    plain.load_state_dict(model.state_dict())
    obs = torch.randn(2, 4, 6, 7)
    latent = model.initial_inference(obs).latent_state

    raw = plain.initial_inference(obs).latent_state
    lowest, highest = raw.amin((1, 2, 3), keepdim=True), raw.amax((1, 2, 3), keepdim=True)
    torch.testing.assert_close(latent, (raw - lowest) / (highest - lowest))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert not model.initial_inference(obs).latent_state.any()
