"""``torch.set_default_device()`` and ``with torch.device()`` do not concern models that exist already."""

from typing import Any

import torch
from torch import nn

import modkit
from modkit.optim.swa_utils import AveragedModel
from tests.cases import for_each
from tests.models import set_weight as set_to
from tests.unit.averaging.recipes import PRECISIONS


def layers() -> nn.Sequential:
    """Return small layers of one shape in host memory, all elements 0."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)), nn.BatchNorm1d(3))
    set_to(model, 0.0)
    return model


@for_each("precision", PRECISIONS)
@for_each("policy", ["ignore", "skip", "raise"])
def test_ema(precision: Any, policy: Any) -> None:
    """Averages are where the parameters are."""
    model = layers()
    with torch.device("meta"):
        options = {"precision": precision, "on_nonfinite": policy, "buffers": "average"}
        ema = modkit.EMA(model, 0.5, **options)
        ema.update()
        set_to(model, 4.0)
        ema.update()
        resumed = modkit.EMA(model, 0.5, precision=precision)
        resumed.load_state_dict(modkit.EMA(model, 0.5).state_dict())
        ema.rebind()
        _ = ema.module
    for name, average in ema.named_averages():
        assert average.device.type == "cpu"
        if name.startswith("0."):
            assert average.gt(0.0).all()


@for_each("precision", PRECISIONS)
@for_each("policy", ["ignore", "skip", "raise"])
def test_averaged_model(precision: Any, policy: Any) -> None:
    """The copy is where the model is, or on the device that was given."""
    model = layers()
    with torch.device("meta"):
        average = AveragedModel(
            model, torch.device("cpu"), precision=precision, on_nonfinite=policy
        )
        average.update_parameters(model)
        set_to(model, 4.0)
        average.update_parameters(model)
    assert all(parameter.eq(2.0).all() for parameter in average.module[:5].parameters())
