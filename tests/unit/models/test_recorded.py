from pathlib import Path
from typing import Any

import pytest
import torch

from modkit import models
from modkit.models import _networks
from tests.cases import for_each
from tests.efficientzero import (
    CASES,
    kernels,
    layout,
    mean_of_dynamics,
    runs,
    summary,
    versions,
)


RECORD = Path(__file__).resolve().parents[2] / "data" / "efficientzero.pt"

every_case = for_each("name", CASES)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """Results of LightZero 0.1.0; ``same_kernels`` is True if this machine sums in the same order."""
    content = torch.load(RECORD, weights_only=True)
    same = content["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    return {**content, "same_kernels": same and content["kernels"] == kernels()}


def assert_as_recorded(actual: dict[str, Any], expected: dict[str, Any], *, exact: bool) -> None:
    """Compare a summary with the one on record: all bits, or where they may differ some elements."""
    assert actual.keys() == expected.keys()
    if exact:
        assert {k: v for k, v in actual.items() if k != "sample"} == {
            k: v for k, v in expected.items() if k != "sample"
        }
    tolerance = 1e-3 if expected["sample"].dtype == torch.float32 else 1e-9
    torch.testing.assert_close(
        actual["sample"], expected["sample"], rtol=tolerance, atol=tolerance, equal_nan=True
    )


def test_every_case_is_on_record(record):
    """The record has the cases that there are, and stays small."""
    assert list(record["cases"]) == list(CASES)
    assert RECORD.stat().st_size <= 1_000_000


@every_case
def test_layout_and_weights_of_a_seed(name, record):
    """Keys, shapes, dtypes, versions and parameters are LightZero's, and a seed's initial weights."""
    network = CASES[name].build()

    expected = record["cases"][name]
    state = summary({"state": list(network.state_dict().values())})
    assert_as_recorded(state, expected["initial"], exact=record["same_kernels"])
    assert layout(network) == expected["layout"]
    assert versions(network) == expected["versions"]
    assert "\n".join(key for key, _ in network.named_parameters()) == expected["parameters"]
    assert sum(parameter.numel() for parameter in network.parameters()) == expected["count"]


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
@every_case
def test_numbers(name, record, large):
    """Outputs, gradients and statistics are LightZero's: bits on its kernels, close on others."""
    if large != (record["cases"][name]["count"] > 3_000_000):
        pytest.skip("in the other run")
    case = CASES[name]
    expected = record["cases"][name]["runs"]

    actual = {run: summary(results) for run, results in runs(case, case.build)}

    assert actual.keys() == expected.keys()
    for run, results in actual.items():
        assert_as_recorded(results, expected[run], exact=record["same_kernels"])


@for_each("name", [name for name, case in CASES.items() if case.kind == "DynamicsNetwork"])
def test_mean_of_the_dynamics(name, record):
    """The mean of the absolute weights is LightZero's."""
    network = CASES[name].build()

    expected = record["cases"][name]["mean"]
    assert network.get_dynamic_mean() == pytest.approx(expected, rel=1e-6)
    assert mean_of_dynamics(network) == pytest.approx(expected, rel=1e-6)


def test_every_public_method_is_compared():
    """Each method of a network is recorded; LightZero's methods for two means raise."""
    values = [*vars(models).values(), *vars(_networks).values()]
    classes = [v for v in values if isinstance(v, type) and issubclass(v, torch.nn.Module)]
    public = {name for cls in classes for name in vars(cls) if not name.startswith("_")}
    methods = {name for cls in classes for name in public if callable(getattr(cls, name, None))}
    called = {method for case in CASES.values() for method in case.methods} - {"__call__"}

    assert methods == {"forward", "get_dynamic_mean", "get_reward_mean", "get_params_mean", *called}


def test_checkpoint(record):
    """A state dict of a trained network of LightZero loads strictly, and gives its outputs."""
    trained = record["trained"]
    network = CASES["BN"].build().eval()

    keys = network.load_state_dict(trained["state"])

    assert keys == ([], [])
    with torch.no_grad():
        latent, hidden, prefix = network(*trained["inputs"])
    for actual, expected in zip((latent, *hidden, prefix), trained["outputs"], strict=True):
        if record["same_kernels"]:
            assert torch.equal(actual, expected)
        torch.testing.assert_close(actual, expected)
