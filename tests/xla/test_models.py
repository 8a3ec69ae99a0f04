from typing import Any

import pytest
import torch

import modkit
from modkit.models import DynamicsNetwork, EfficientZeroModel
from tests.xla.recipes import agree, counted, end_step, on_host


pytestmark = pytest.mark.xla

# Sums over more products than in the other tests.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def efficient_zero(place: Any) -> EfficientZeroModel:
    """Return a small network for boards, the same each time."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_channels": 8, "lstm_hidden_size": 16}
    return EfficientZeroModel((3, 6, 6), 4, **options).to(place)


def searched(model: EfficientZeroModel, place: Any, steps: int = 2) -> list[Any]:
    """Return the outputs of a root and of the steps behind it."""
    torch.manual_seed(1)
    root = model.initial_inference(torch.randn(2, 3, 6, 6).to(place))
    state, hidden = root.latent_state, root.reward_hidden_state
    found = [root.value, root.policy_logits, state]
    for step in range(steps):
        node = model.recurrent_inference(state, hidden, torch.full((2,), step).to(place))
        state, hidden = node.latent_state, node.reward_hidden_state
        found += [node.value, node.policy_logits, node.value_prefix, state, *hidden]
    # In training mode, batch normalization of two projections amplifies rounding errors.
    return found if model.training else [*found, model.project(state)]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_inference(training: bool, fast: bool, device: torch.device) -> None:
    """Root, recurrent steps and projection give the values of the CPU, with and without the fast block."""

    def scenario(place: torch.device) -> object:
        model = efficient_zero(place).train(training)
        if not fast:
            return on_host(searched(model, place))
        with torch.no_grad(), modkit.fast_inference(model):
            return on_host(searched(model, place))

    agree(scenario, device, **CLOSE)


def test_steps_of_a_search_compile_once(device: torch.device) -> None:
    """After the first search nothing is compiled, and nothing is read."""
    model = efficient_zero(device).eval()
    with torch.no_grad():
        for _ in range(2):
            searched(model, device, steps=1)
            end_step()
        with counted() as counts:
            searched(model, device, steps=1)
            end_step()

    assert (counts.compilations, counts.reads) == (0, 0)


@pytest.mark.parametrize("res_connection", [False, True])
def test_dynamics(res_connection: bool, device: torch.device) -> None:
    """The dynamics network gives the values of the CPU, its statistics of weights too."""

    def scenario(place: torch.device) -> object:
        torch.manual_seed(0)
        options = {
            "action_encoding_dim": 2,
            "num_res_blocks": 1,
            "num_channels": 6,
            "flatten_output_size_for_reward_head": 1024,
        }
        net = DynamicsNetwork((4, 4, 4), **options, lstm_hidden_size=8).to(place)
        torch.manual_seed(1)
        planes = torch.randn(2, 6, 4, 4).to(place)
        hidden = torch.randn(1, 2, 8).to(place), torch.randn(1, 2, 8).to(place)
        net.train(res_connection)
        return *net(planes, hidden), net.get_dynamic_mean(), net.get_reward_mean()[1]

    agree(scenario, device, **CLOSE)
