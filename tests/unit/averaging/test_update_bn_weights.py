"""``update_bn(weight_by_samples=True)`` against statistics in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import modkit
from modkit import nn
from modkit.optim.swa_utils import AveragedModel, update_bn
from tests.cases import for_each
from tests.helpers import freeze
from tests.unit.averaging.recipes import network


SIZES = [8, 8, 8, 3]


def batches(sizes: list[int], *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return batches of these sizes, far from zero, each with a mean of its own."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, *shape, generator=generator) * 3 + 7 + place).to(dtype)
        for place, size in enumerate(sizes)
    ]


def oracle(data: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return weighted means of the means and of the unbiased variances, in float64."""
    weights = torch.tensor([len(batch) for batch in data], dtype=torch.float64)
    weights /= weights.sum()
    rows = [batch.double().transpose(0, 1).flatten(1) for batch in data]
    means = torch.stack([row.mean(1) for row in rows])
    variances = torch.stack([row.var(1) for row in rows])
    return weights @ means, weights @ variances


def check(layer: Any, data: list[Tensor], calls: int = 1, **tolerances: float) -> None:
    """Compare the statistics of a layer with the oracle."""
    mean, variance = oracle(data)
    torch.testing.assert_close(layer.running_mean.double(), mean, **tolerances)
    torch.testing.assert_close(layer.running_var.double(), variance, **tolerances)
    assert layer.num_batches_tracked == calls * len(data)


CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@for_each("shape", [(5,), (5, 2), (5, 2, 3), (5, 2, 3, 2)])
@for_each("sizes", [SIZES, [3, 8], [2], [4] * 5, [2, 64, 7]])
@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_batches_weigh_as_many_samples_as_they_have(
    shape: tuple[int, ...], sizes: list[int], dtype: torch.dtype
) -> None:
    """Each kind of layer has the statistics of the formula, in the dtype of its buffers."""
    kinds: list[Callable[[int], Any]] = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]
    layer = kinds[max(0, len(shape) - 2)](5).to(dtype)
    data = batches(sizes, *shape, dtype=dtype)
    update_bn(data, layer, weight_by_samples=True)

    rough = {"rtol": 2e-2, "atol": 2e-2}
    check(layer, data, **(rough if dtype == torch.bfloat16 else CLOSE))
    assert layer.running_mean.dtype == dtype
    assert layer.momentum == 0.1


def test_a_layer_that_is_called_twice() -> None:
    """Both calls of a batch count alike."""
    layer = nn.BatchNorm1d(5, affine=False)
    net = nn.Sequential(layer, nn.Linear(5, 5), layer)
    data = batches(SIZES, 5)
    outputs = []
    for batch in data:
        normal = (batch - batch.mean(0)) / (batch.var(0, correction=0) + layer.eps).sqrt()
        outputs.append(net[1](normal).detach())
    update_bn(data, net, weight_by_samples=True)
    first, second = oracle(data), oracle(outputs)

    torch.testing.assert_close(layer.running_mean.double(), (first[0] + second[0]) / 2, **CLOSE)
    torch.testing.assert_close(layer.running_var.double(), (first[1] + second[1]) / 2, **CLOSE)
    assert layer.num_batches_tracked == 2 * len(data)


class Branches(nn.Module):
    """Normalizes small batches by a layer of their own, and by one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        self.unused, self.untracked = (
            nn.BatchNorm1d(5),
            nn.BatchNorm1d(5, track_running_stats=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Choose a layer by the number of samples."""
        return self.untracked(self.small(x) if len(x) < 5 else self.large(x))


def test_layers_that_some_batches_do_not_reach() -> None:
    """Such a batch has no weight in the statistics of the layer."""
    model = Branches()
    model.unused.running_mean.fill_(5.0)
    data = batches([8, 2, 9, 4], 5)
    update_bn(data, model, weight_by_samples=True)

    check(model.large, data[::2], **CLOSE)
    check(model.small, data[1::2], **CLOSE)
    assert model.unused.running_mean.tolist() == [0.0] * 5
    assert model.unused.running_var.tolist() == [1.0] * 5
    assert model.unused.num_batches_tracked == 0
    assert model.untracked.running_mean is None


@pytest.mark.parametrize("face", ["EMA", "EMACallback", "AveragedModel"])
def test_every_face_has_the_option(face: str) -> None:
    """The statistics of the averaged weights are weighted, and those of the model stay."""
    model = network()
    data = batches([8, 8, 3], 4)
    if face == "AveragedModel":
        averaged = AveragedModel(model)
        averaged.update_parameters(model)
        before = freeze(model)
        update_bn(data, averaged, weight_by_samples=True)
        found = averaged.module
    else:
        holder: Any = getattr(modkit, face)(model)
        ema = holder if face == "EMA" else holder.ema
        ema.update()
        before = freeze(model)
        holder.update_bn(data, weight_by_samples=True)
        found = ema.averaged_model()

    with torch.no_grad():
        check(found[1], [model[0](batch) for batch in data], **CLOSE)
    assert freeze(model) == before


def test_compiled_models() -> None:
    """Batches of any sizes are counted, in as few graphs as with the default."""
    data = batches([8, 7, 6, 5, 4, 3, 9, 10, 11, 12, 13], 4)
    nets = network(), network()
    update_bn(data, nets[0], weight_by_samples=True)
    update_bn(data, torch.compile(nets[1], backend="eager"), weight_by_samples=True)

    assert freeze(nets[0]) == freeze(nets[1])


def fails() -> Any:
    """Yield a batch, and raise."""
    yield batches([4], 4)[0]
    raise KeyError("data")


@for_each(
    ("loader", "error"),
    [
        (list, ValueError),
        (fails, KeyError),
        (lambda: [torch.ones(4, 4), {"x": torch.ones(4, 4)}], TypeError),
        (lambda: [torch.ones(4, 4), torch.tensor(1.0)], TypeError),
    ],
)
def test_after_an_error_the_model_is_as_before(loader: Any, error: type[Exception]) -> None:
    """Statistics, momenta and modes are put back."""
    model = network()
    model(torch.randn(8, 4))
    before = freeze(model)
    with pytest.raises(error):
        update_bn(loader(), model, weight_by_samples=True)

    assert freeze(model) == before


def test_the_error_names_the_option() -> None:
    """It says where the number of samples comes from."""
    with pytest.raises(TypeError, match=r"weight_by_samples=True.*first dimension.*got dict"):
        update_bn([{}], network(), weight_by_samples=True)
