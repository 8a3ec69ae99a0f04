import importlib.util

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.efficientzero import Case, layout, runs
from tests.integration.lightzero.networks import lightzero_networks


pytestmark = [
    pytest.mark.property,
    pytest.mark.skipif(
        importlib.util.find_spec("lzero") is None,
        reason="needs LightZero: nox -s lightzero installs it",
    ),
]

widths = st.integers(1, 9)
heads = st.lists(st.integers(1, 8), min_size=1, max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a DynamicsNetwork of any options, with the shape of planes that fits."""
    planes, latent, height, width = (draw(st.integers(1, 5)) for _ in range(4))
    channels, downsample = draw(st.integers(1, 4)), draw(st.booleans())
    observation = (height, width)
    if downsample:
        observation = tuple(16 * length - draw(st.integers(0, 15)) for length in observation)
    options = {
        "observation_shape": (draw(widths), *observation),
        "action_encoding_dim": planes,
        "num_res_blocks": draw(st.integers(0, 3)),
        "num_channels": planes + latent,
        "reward_head_channels": channels,
        "fc_reward_layers": draw(heads),
        "output_support_size": draw(widths),
        "flatten_output_size_for_reward_head": channels * height * width,
        "downsample": downsample,
        "lstm_hidden_size": draw(widths),
        "last_linear_layer_init_zero": draw(st.booleans()),
        "norm_type": draw(st.sampled_from(["BN", "LN"])),
        "activation": draw(
            st.sampled_from([torch.nn.ReLU(inplace=True), torch.nn.GELU(), torch.nn.PReLU()])
        ),
    }
    shape = (planes + latent, height, width)
    return Case("DynamicsNetwork", options, shape, hidden=draw(st.booleans()))


@settings(max_examples=10)
@given(cases())
def test_any_configuration(case):
    """A network of any configuration is bitwise identical to LightZero's in weights, outputs and gradients."""
    networks = lightzero_networks()
    ours, theirs = case.build(), case.build(networks)

    assert layout(ours) == layout(theirs)
    for actual, expected in zip(
        [*ours.state_dict().values()], [*theirs.state_dict().values()], strict=True
    ):
        assert torch.equal(actual, expected)
    expected_runs = dict(runs(case, lambda: case.build(networks)))
    for name, results in runs(case, case.build):
        for part, expected in expected_runs[name].items():
            assert [t is None for t in results[part]] == [t is None for t in expected]
            pairs = zip(results[part], expected, strict=True)
            assert all(mine is None or torch.equal(mine, other) for mine, other in pairs)
