from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit import schedules
from modkit.optim import swa_utils
from tests.cases import for_each
from tests.models import set_weight
from tests.unit.averaging.recipes import (
    PRECISIONS,
    CountCalls,
    as_accelerator,
    layers,
    model_of,
    network,
)


# Torch says once that its check for host syncs is a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")

# The same claims hold on the CPU, where nothing has to be waited for.
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

EMA_OPTIONS: list[dict[str, Any]] = [
    *({"precision": precision} for precision in PRECISIONS),
    *({"buffers": buffers} for buffers in ("copy", "average", "ignore")),
    *({"schedule": schedule} for schedule in (schedules.Equal(), schedules.InverseGamma())),
    {"decay": [0.9, 0.99, 0.999]},
    {"update_every": 2},
    {"on_nonfinite": "skip"},
    {"include": "0.*"},
]
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "SWA": {},
    "EMA, of lists": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "SWA, of lists": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "EMA, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "SWA, one by one": {"avg_fn": swa_utils.get_swa_avg_fn()},
    "buffers": {"use_buffers": True},
    "precise": {"precision": "fp32"},
    "finite": {"on_nonfinite": "skip"},
}


@contextmanager
def no_waiting(device: str) -> Generator[CountCalls]:
    """Make every host sync an error, and count the values that are read."""
    mode = torch.cuda.get_sync_debug_mode() if device == "cuda" else 0
    try:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        with CountCalls("_local_scalar_dense") as count:
            yield count
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)


def move(net: nn.Module, amount: float) -> None:
    """Change all weights, as an optimizer would."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(amount)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", EMA_OPTIONS, ids=str)
def test_no_update_of_ema_waits_for_the_device(
    options: dict[str, Any], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first one, `update()` neither asks for a value nor waits, whatever the options."""
    as_accelerator(monkeypatch)
    net = network(dtype).to(device)
    ema = modkit.EMA(net, **options)
    ema.update()
    with no_waiting(device) as count:
        for _ in range(4):
            move(net, 1.0)
            ema.update()

    assert count.calls == []
    assert ema.step == 5
    assert all(tensor.device.type == device for _, tensor in ema.named_averages())


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", MODEL_OPTIONS.values(), ids=MODEL_OPTIONS)
def test_no_update_of_an_averaged_model_waits_for_the_device(
    options: dict[str, Any], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first one, `update_parameters()` neither asks for a value nor waits.

    The count is on the device of the averages only where that is given, as in torch.
    """
    as_accelerator(monkeypatch)
    net = network(dtype).to(device)
    average = swa_utils.AveragedModel(net, torch.device(device), **options)
    average.update_parameters(net)
    with no_waiting(device) as count:
        for _ in range(4):
            move(net, 1.0)
            average.update_parameters(net)

    assert count.calls == []
    assert average.n_averaged.item() == 5


@pytest.mark.gpu
def test_an_update_can_be_part_of_a_cuda_graph() -> None:
    """A step and an update of a constant decay that are replayed give what they give one by one."""
    decay, steps = 0.9, 5
    nets = [network().cuda() for _ in range(2)]
    emas = [modkit.EMA(net, decay=decay) for net in nets]
    for net, ema in zip(nets, emas, strict=True):
        for _ in range(3):
            move(net, 0.5)
            ema.update()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move(nets[0], 0.5)
        emas[0].update()
    for _ in range(steps):
        graph.replay()
        move(nets[1], 0.5)
        emas[1].update()
    torch.cuda.synchronize()

    found, expected = (dict(ema.named_averages()) for ema in emas)
    assert all(
        torch.equal(found[name], expected[name]) for name in dict(nets[0].named_parameters())
    )


class Recurrent(modkit.nn.Module):
    """An LSTM of two layers and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, num_layers=2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify the last output of each sequence."""
        return self.head(self.rnn(x)[0][-1])


@DEVICES
def test_recurrent_weights_are_in_one_piece_where_an_average_is_used(device: str) -> None:
    """So cuDNN has nothing to compact, which it says in a warning: an error here."""
    model = Recurrent().to(device)
    x = torch.ones(5, 2, 3, device=device)
    ema = modkit.EMA(model, decay=0.5)
    ema.update()
    move(model, 1.0)
    ema.update()
    before = {name: tensor.clone() for name, tensor in ema.named_averages()}
    loss = model(x).sum()

    reference = Recurrent().to(device)
    reference.load_state_dict(before)
    expected = reference(x)
    with ema.applied():
        assert torch.equal(model(x), expected)
    assert torch.equal(ema.averaged_model()(x), expected)

    loss.backward()
    model(x).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in ema.named_averages())


def test_recurrent_weights_that_are_swapped_in_part_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New memory for all weights of a layer would hold those without an average after the block."""
    called: list[int] = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda rnn: called.append(rnn.hidden_size))
    calls = []
    for include in ("*", "*l0"):
        ema = modkit.EMA(Recurrent(), include=include)
        ema.update()
        called.clear()
        with ema.applied():
            calls.append(list(called))

    assert calls == [[4], []]


@pytest.mark.parametrize("precision", ["same", "fp64"])
def test_an_average_follows_its_model_to_another_device(precision: str) -> None:
    """Averages move with the parameters, unless the average has a device of its own."""
    model = model_of(torch.ones(3), torch.bfloat16)
    moved = {"weight": torch.empty(3, dtype=torch.bfloat16, device="meta")}
    devices = []
    for options in ({}, {"device": "cpu"}):
        ema = modkit.EMA(model, precision=precision, **options)
        ema.update()
        (average,) = ema._engine.averages
        average.place(moved)
        devices.append({tensor.device.type for tensor in average.tensors.values()})

    assert devices == [{"meta"}, {"cpu"}]


def test_a_state_needs_a_model_that_is_initialized() -> None:
    """On the meta device the values of averages would be lost."""
    saved = modkit.EMA(set_weight(nn.Linear(3, 2), 4.0), 0.5)
    saved.update()
    model = nn.Linear(3, 2, device="meta")
    ema = modkit.EMA(model, 0.5, device="cpu")
    with pytest.raises(RuntimeError, match="weight is on the meta device"):
        ema.load_state_dict(saved.state_dict())
    set_weight(model.to_empty(device="cpu"), 2.0)
    ema.load_state_dict(saved.state_dict())
    ema.update()

    assert all(average.eq(3.0).all() for _, average in ema.named_averages())


# --- `torch.set_default_device()` does not concern models that exist already -----------------------


def with_norm() -> nn.Sequential:
    """Return small layers of one shape in host memory, all elements 0."""
    return layers().append(set_weight(nn.BatchNorm1d(3), 0.0))


@for_each("precision", PRECISIONS)
@for_each("policy", ["ignore", "skip", "raise"])
def test_ema_below_another_default_device(precision: Any, policy: Any) -> None:
    """Averages are where the parameters are."""
    model = with_norm()
    with torch.device("meta"):
        options = {"precision": precision, "on_nonfinite": policy, "buffers": "average"}
        ema = modkit.EMA(model, 0.5, **options)
        ema.update()
        set_weight(model, 4.0)
        ema.update()
        resumed = modkit.EMA(model, 0.5, precision=precision)
        resumed.load_state_dict(modkit.EMA(model, 0.5).state_dict())
        ema.rebind()
        _ = ema.module
    for name, average in ema.named_averages():
        assert average.device.type == "cpu"
        if name.startswith("0."):
            assert average.gt(0.0).all()
