import copy
import pickle

import pytest
import torch

from modkit import nn
from tests.cases import for_each
from tests.efficientzero import CASES, mean_of_dynamics, scramble, small, tensors_in


@pytest.fixture
def network():
    """A small DynamicsNetwork in which no weight is zero."""
    net = CASES["BN"].build()
    scramble(net)
    return net.eval()


def inputs(batch=3):
    """Planes and hidden states for it."""
    x = torch.randn(batch, 11, 6, 6)
    return x, (torch.randn(1, batch, 12), torch.randn(1, batch, 12))


def equal(first, second):
    """Return True if two results consist of equal tensors."""
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


# --- weights --------------------------------------------------------------------------------------


@for_each("activation", [nn.ReLU(), nn.PReLU(), nn.PReLU(11), nn.Softplus()])
@for_each("num_res_blocks", [0, 1, 2, 3])
@for_each("norm_type", ["BN", "LN"])
def test_mean_of_the_dynamics(activation, num_res_blocks, norm_type):
    """It goes block by block, so a parameter of the activation that they share counts in each."""
    options = {"activation": activation, "num_res_blocks": num_res_blocks, "norm_type": norm_type}
    net = small(**options).build()
    scramble(net)

    assert net.get_dynamic_mean() == pytest.approx(mean_of_dynamics(net), rel=1e-12)


# --- the model ------------------------------------------------------------------------------------


def test_first_inference():
    """It gives zeros for the value prefix and the hidden states, one for each observation."""
    model = CASES["model, BN, one_hot"].build().eval()

    output = model.initial_inference(torch.randn(2, 4, 6, 7))

    assert output.value_prefix == [0.0, 0.0]
    assert [part.shape for part in output.reward_hidden_state] == [(1, 2, 12), (1, 2, 12)]
    assert not any(part.any() for part in output.reward_hidden_state)
    assert output.value.shape == (2, 7)
    assert output.policy_logits.shape == (2, 5)


def test_shapes_of_actions():
    """Actions come as (batch,) or as (batch, 1)."""
    case = CASES["model, BN, not_one_hot"]
    model = case.build().eval()
    latent, hidden, action = case.inputs("recurrent_inference", torch.float32)

    flat = model.recurrent_inference(latent, hidden, action)
    column = model.recurrent_inference(latent, hidden, action[:, None])

    assert equal(flat, column)


# --- tools ----------------------------------------------------------------------------------------


def test_copies(network):
    """Copies and pickles compute the same, and have an activation of their own."""
    given = inputs()

    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert equal(other(*given), network(*given))
        assert other.activation is other.resblocks[0].act
        assert other.activation is not network.activation
