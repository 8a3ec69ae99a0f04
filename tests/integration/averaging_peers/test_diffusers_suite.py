"""The 14 cases of diffusers' tests/others/test_ema.py: 7, each with and without foreach.

The original loads the UNet of a tiny pipeline; here it has random weights. Three of the original cases
assert `~torch.allclose(...)`, which is true for every pair of tensors, or compare a list with itself.
Those cases state here what the library does.
"""

import pytest
import torch

from tests.integration.averaging_peers.diffusers_names import OnDiffusers, OnModkit


pytestmark = [
    pytest.mark.parametrize("foreach", [False, True]),
    pytest.mark.parametrize("make", [OnDiffusers, OnModkit]),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    # A state without an update holds no averages: averaging starts anew.
    pytest.mark.filterwarnings("ignore:EMA. the s:UserWarning"),
]


def unet_class():
    """Return the class of the UNet, or skip."""
    return pytest.importorskip("diffusers").UNet2DConditionModel


@pytest.fixture
def unet():
    """Return a conditional UNet with random weights."""
    return unet_class()(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def simulate_backprop(model):
    """Replace every weight by a random one."""
    state = model.state_dict().items()
    model.load_state_dict(
        {name: torch.randn_like(value) + value * torch.randn_like(value) for name, value in state}
    )


def copies(tensors):
    """Return copies of the tensors."""
    return [tensor.detach().clone() for tensor in tensors]


def all_equal(first, second):
    """Return True if each pair of tensors is equal within rounding."""
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, second, strict=True))


def all_differ(first, second):
    """Return True if no pair of tensors is equal within rounding."""
    return not any(torch.allclose(a, b) for a, b in zip(first, second, strict=True))


def test_from_pretrained(unet, make, foreach, tmp_path):
    """A saved average comes back with its tensors and its count."""
    ema = make(unet, foreach=foreach)
    ema.step(unet)

    ema.save_pretrained(tmp_path)
    loaded = make.from_pretrained(tmp_path, type(unet), foreach=foreach)

    assert all_equal(loaded.shadow_params, ema.shadow_params)
    assert loaded.optimization_step == ema.optimization_step == 1


def test_optimization_steps_updated(unet, make, foreach):
    """Each step is counted."""
    ema = make(unet, foreach=foreach)
    counts = []
    for _ in range(3):
        ema.step(unet)
        counts.append(ema.optimization_step)

    assert counts == [1, 2, 3]


def test_shadow_params_not_updated(unet, make, foreach):
    """The average of weights that do not change is these weights."""
    ema = make(unet, foreach=foreach)
    for _ in range(5):
        ema.step(unet)
        assert all_equal(ema.shadow_params, unet.parameters())


def test_shadow_params_updated(unet, make, foreach):
    """The first step copies the weights; after a later one the average differs from them."""
    ema = make(unet, foreach=foreach)
    simulate_backprop(unet)
    ema.step(unet)
    assert all_equal(ema.shadow_params, unet.parameters())

    for _ in range(4):
        simulate_backprop(unet)
        ema.step(unet)
        assert all_differ(ema.shadow_params, unet.parameters())


def test_consecutive_shadow_params_updated(unet, make, foreach):
    """Two steps after two changes of the weights give two averages."""
    ema = make(unet, foreach=foreach)
    found = []
    for _ in range(2):
        simulate_backprop(unet)
        ema.step(unet)
        found.append(copies(ema.shadow_params))

    assert all_differ(*found)


def test_zero_decay(unet, make, foreach):
    """Without decay the average is the latest weights."""
    ema = make(unet, 0.0, foreach=foreach)
    for _ in range(2):
        simulate_backprop(unet)
        ema.step(unet)
        assert all_equal(ema.shadow_params, unet.parameters())


def test_serialization(unet, make, foreach, tmp_path):
    """A saved average loads as a plain model, and before the first step computes what the model does."""
    ema = make(unet, foreach=foreach)
    ema.save_pretrained(tmp_path)
    loaded = type(unet).from_pretrained(tmp_path)
    inputs = torch.randn(1, 4, 8, 8), torch.randint(0, 1000, (1,)), torch.randn(1, 7, 8)

    with torch.no_grad():
        outputs = [model.eval()(*inputs).sample for model in (unet, loaded)]

    torch.testing.assert_close(*outputs)
