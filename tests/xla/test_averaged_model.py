import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import MODKIT, TORCH, Implementation
from tests.xla.recipes import (
    HALF,
    agree,
    counted,
    end_step,
    network,
    on_host,
    train,
)


pytestmark = pytest.mark.xla

ROOT = Path(__file__).resolve().parents[2]

RULES: dict[str, Any] = {
    "SWA": lambda impl: {},
    "EMA, of lists": lambda impl: {"multi_avg_fn": impl.swa_utils.get_ema_multi_avg_fn(0.9)},
    "SWA, of lists": lambda impl: {"multi_avg_fn": impl.swa_utils.get_swa_multi_avg_fn()},
    "EMA, one by one": lambda impl: {"avg_fn": impl.swa_utils.get_ema_avg_fn(0.9)},
    "SWA, one by one": lambda impl: {"avg_fn": impl.swa_utils.get_swa_avg_fn()},
    "user's": lambda impl: {
        "avg_fn": lambda average, current, count: average + (current - average) / 2
    },
}
each_rule = pytest.mark.parametrize("rule", RULES)
# None: the count is in host memory, as in torch.
each_place = pytest.mark.parametrize("place_of_count", [None, "xla"])
OWN: dict[str, dict[str, Any]] = {
    **{precision: {"precision": precision} for precision in ("fp32", "fp64")},
    "stochastic": {"precision": "stochastic"},
    "skip": {"on_nonfinite": "skip"},
    "buffers": {"buffers": "average"},
    "exclude": {"exclude": "3.*"},
}


def averaged(
    impl: Implementation, place: Any, rule: str, steps: int = 5, **options: Any
) -> tuple[Any, Any]:
    """Return a network and its averaged model after some steps."""
    dtype = options.pop("dtype", torch.float32)
    net = network(place, dtype)
    if options.get("device") == "xla":
        options["device"] = place
    average = impl.swa_utils.AveragedModel(net, **RULES[rule](impl), **options)
    train(net, lambda: average.update_parameters(net), 0, steps)
    return net, average


@each_place
@each_rule
def test_values(
    rule: str, place_of_count: str | None, impl: Implementation, device: torch.device
) -> None:
    """Five updates give parameters, buffers and a count as on the CPU."""

    def scenario(place: torch.device) -> object:
        _, average = averaged(impl, place, rule, device=place_of_count)
        return average.state_dict()

    agree(scenario, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_place
@pytest.mark.parametrize("options", OWN.values(), ids=OWN)
def test_values_of_own_options(
    options: dict[str, Any], place_of_count: str | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Precisions, policies and selections, which torch does not have, give the values of the CPU."""

    def scenario(place: torch.device) -> object:
        given = {"dtype": dtype, "device": place_of_count, **options}
        _, average = averaged(MODKIT, place, "EMA, of lists", **given)
        return average.export_state_dict(), average.n_averaged

    agree(scenario, device, **({} if dtype is torch.float32 else HALF))


@each_rule
def test_no_update_reads_or_compiles(rule: str, device: torch.device) -> None:
    """With the count on the device no update reads it, which torch does; nothing is compiled."""
    found = {}
    for impl in TORCH, MODKIT:
        net, average = averaged(impl, device, rule, device="xla")
        with counted() as counts:
            train(net, lambda: average.update_parameters(net), 5, 11)
        found[str(impl)] = counts

    assert (found["modkit"].compilations, found["modkit"].reads) == (0, 0)
    assert found["torch"].reads >= 6


WRITES: dict[str, Any] = {
    "fill_": lambda average: average.n_averaged.fill_(9),
    "data": lambda average: average.n_averaged.data.fill_(9),
    "data.copy_": lambda average: average.n_averaged.data.copy_(torch.tensor(9)),
    "replaced": lambda average: setattr(average, "n_averaged", average.n_averaged + 4),
    "loaded": lambda average: average.load_state_dict(
        {**average.state_dict(), "n_averaged": torch.tensor(9)}
    ),
    "zero": lambda average: average.n_averaged.data.zero_(),
    "below zero": lambda average: average.n_averaged.data.fill_(-1),
}


@pytest.mark.parametrize("write", WRITES)
@each_rule
def test_writes_to_the_count_are_followed(rule: str, write: str, device: torch.device) -> None:
    """The next updates give what torch gives, whichever way the count was written."""
    found = {}
    for impl in TORCH, MODKIT:
        net, average = averaged(impl, device, rule, device="xla")
        WRITES[write](average)
        end_step()
        train(net, lambda: average.update_parameters(net), 5, 8)
        found[str(impl)] = on_host(average.state_dict())

    torch.testing.assert_close(found["modkit"], found["torch"], rtol=1e-5, atol=1e-6)


UNCHANGED = """
import sys
from tests.helpers import Implementation
from tests.xla.recipes import end_step, frozen_network, on_host, train
import torch_xla

impl, use_buffers = Implementation(sys.argv[1]), sys.argv[2] == "averaged buffers"
states = []
for place in "cpu", torch_xla.device():
    net = frozen_network(place)
    average = impl.swa_utils.AveragedModel(net, use_buffers=use_buffers)
    if use_buffers:
        net.requires_grad_()
    train(net, lambda: average.update_parameters(net), 0, 5)
    states.append(on_host({**average.state_dict(), **net.state_dict()}))
expected, found = states
import torch
torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize("case", ["averaged buffers", "frozen parameters"])
def test_values_that_do_not_change(case: str, impl: Implementation, device: torch.device) -> None:
    """Averaging a tensor of the model that stays as it is leaves it to the model.

    In a process of its own, because after a failure torch_xla cannot end any step.
    """
    command = [sys.executable, "-W", "ignore", "-c", UNCHANGED, str(impl), case]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr.strip().splitlines()[-1]
