import torch

from tests.helpers import Implementation, same
from tests.models import normed_net
from tests.parity.averaging.rules import training_states


def swap(averaged: torch.nn.Module, model: torch.nn.Module) -> None:
    """Exchange the weights and buffers of a model with its averages, as Lightning does."""
    for kept, current in zip(
        [*averaged.module.parameters(), *averaged.module.buffers()],
        [*model.parameters(), *model.buffers()],
        strict=True,
    ):
        old = kept.data.clone()
        kept.data.copy_(current.data)
        current.data.copy_(old)


def test_weight_averaging_callback() -> None:
    """Lightning's WeightAveraging with the class is bitwise identical to torch's.

    It makes the average by keywords, swaps it in for each validation, writes it into a checkpoint
    as the weights, the rest of its state beside them, and takes both apart again.
    """

    def scenario(impl: Implementation):
        model = normed_net(impl)
        arguments = {"device": None, "use_buffers": False, "avg_fn": impl.get_ema_avg_fn(0.9)}
        averaged = impl.AveragedModel(model=model, **arguments)
        outputs = []
        for _ in training_states(model, 3):
            averaged.update_parameters(model)
            swap(averaged, model)
            outputs.append(model.eval()(torch.ones(2, 3)))
            swap(averaged, model)
        state = averaged.state_dict()
        checkpoint = {
            "state_dict": {n[7:]: v for n, v in state.items() if n.startswith("module.")},
            "averaging_state": {n: v for n, v in state.items() if not n.startswith("module.")},
            "current_model_state": model.state_dict(),
        }

        resumed = normed_net(impl)
        resumed.load_state_dict(checkpoint["current_model_state"])
        other = impl.AveragedModel(model=resumed, **arguments)
        weights = {f"module.{name}": value for name, value in checkpoint["state_dict"].items()}
        other.load_state_dict({**checkpoint["averaging_state"], **weights})
        for _ in training_states(resumed, 2):
            other.update_parameters(resumed)
        return outputs, isinstance(other, torch.optim.swa_utils.AveragedModel), other

    assert same(scenario)[0] == "returned"
