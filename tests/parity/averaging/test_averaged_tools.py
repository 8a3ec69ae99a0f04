import inspect
from typing import Any

import pytest
import torch

from modkit.optim import swa_utils


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """Forget what was compiled, so that no test meets the limit of recompilations."""
    yield
    torch._dynamo.reset()


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
    # Torch 2.8 compiles a lerp of lists to operations that round once more.
    is_fused = "addcmul" in inspect.getsource(torch._dynamo.polyfills.foreach_lerp_inplace)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0 if is_fused else 2e-15)
