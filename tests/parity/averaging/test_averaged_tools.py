from typing import Any

import pytest
import torch

from modkit.optim import swa_utils
from tests.helpers import Implementation
from tests.models import normed_net
from tests.parity.averaging.rules import training_states


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """Forget what was compiled, so that no test meets the limit of recompilations."""
    yield
    torch._dynamo.reset()


def averaged_net(impl: Implementation) -> torch.nn.Module:
    """Return an average in evaluation mode."""
    model = normed_net(impl)
    averaged = impl.AveragedModel(model)
    for _ in training_states(model, 2):
        averaged.update_parameters(model)
    return averaged.eval()


TOOLS = {
    "compile": lambda m, x: torch.compile(m, backend="eager", fullgraph=True)(x),
    "export": lambda m, x: torch.export.export(m, (x,)).module()(x),
    "functional_call": lambda m, x: torch.func.functional_call(m, dict(m.state_dict()), (x,)),
    "vmap": lambda m, x: torch.func.vmap(m)(x.unsqueeze(1)).squeeze(1),
    "fx": lambda m, x: torch.fx.symbolic_trace(m.module)(x),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_take_an_averaged_model(impl: Implementation, tool: str) -> None:
    """Compilers, exporters, tracers and function transforms give the eager result."""
    averaged = averaged_net(impl)
    inputs = torch.randn(4, 3)

    torch.testing.assert_close(TOOLS[tool](averaged, inputs), averaged(inputs))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp64"},
        {"precision": "stochastic"},
        {"precision": "fp32", "on_nonfinite": "skip"},
    ],
    ids=str,
)
def test_options_hold_in_compiled_code(options: dict[str, Any]) -> None:
    """A compiled update has the precision, and skips what is not finite, as an eager one does."""
    states = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 16).to(torch.bfloat16)
        averaged = swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99), **options
        )
        update = averaged.update_parameters
        for step in range(6):
            with torch.no_grad():
                model.weight.copy_(torch.randn(16, 16))
                if step == 3 and "on_nonfinite" in options:
                    model.weight[0, 0] = torch.nan
            (torch.compile(update, backend="eager") if is_compiled else update)(model)
        states.append(averaged.state_dict())

    eager, compiled = states
    assert eager["n_averaged"] == 6 - ("on_nonfinite" in options)
    assert eager.keys() == compiled.keys()
    assert all(torch.equal(eager[name], compiled[name]) for name in eager)
