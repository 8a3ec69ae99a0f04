import copy
import gc
import os
import pickle
import random
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modkit
from modkit import schedules
from modkit.averaging.engine import Engine
from modkit.errors import NameMismatchError
from tests.cases import for_each
from tests.unit.averaging.recipes import (
    PRECISIONS,
    CountCalls,
    averaged,
    model_of,
    network,
    set_to,
    train,
)


STEPS = 25


def background(model: nn.Module, **options: Any) -> "modkit.EMA[nn.Module]":
    """Return an average that is kept in a thread."""
    return modkit.EMA(model, **options, device="cpu", asynchronous=True)


@pytest.fixture
def _sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step in the thread take another time."""
    step, dice = Engine._step, random.Random(0)

    def slow(*args: Any) -> None:
        time.sleep(dice.random() * 2e-3)
        step(*args)

    monkeypatch.setattr(Engine, "_step", slow)


class Gate:
    """Holds the thread in front of its next step until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        step = Engine._step

        def gated(*args: Any) -> None:
            assert self.open.wait(60)
            step(*args)

        monkeypatch.setattr(Engine, "_step", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Return what holds the thread."""
    return Gate(monkeypatch)


def values(ema: "modkit.EMA[Any]") -> list[tuple[str, Tensor]]:
    """Return every average of every number, copied."""
    found = [pair for index in range(len(ema.schedules)) for pair in ema.named_averages(index)]
    return [(name, tensor.clone()) for name, tensor in found]


def run(options: dict[str, Any], dtype: torch.dtype, *, in_thread: bool) -> "modkit.EMA[Any]":
    """Train a network whose optimizer steps at once after each update."""
    net = network(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    ema = modkit.EMA(net, **options, device="cpu", asynchronous=in_thread).attach(optimizer)
    train(net, optimizer, 0, STEPS)
    return ema


OPTIONS: list[dict[str, Any]] = [
    *({"precision": precision, "decay": 0.9} for precision in PRECISIONS),
    *({"buffers": buffers, "decay": 0.9} for buffers in ("average", "ignore")),
    {"decay": [0.5, 0.9, 0.99]},
    {"schedule": schedules.Window(3)},
    {"schedule": schedules.BEMA()},
    {"schedule": schedules.Equal(), "update_after_step": 3, "update_every": 2},
    {"decay": 0.9, "on_nonfinite": "skip"},
    {"decay": 0.9, "on_nonfinite": "raise"},
]


@pytest.mark.usefixtures("_sleepy")
@for_each("options", OPTIONS, ids=str)
@for_each("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_thread_gets_the_same_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    """However long a step takes in the thread, the averages are those that are kept at once."""
    expected = run(options, dtype, in_thread=False)
    found = run(options, dtype, in_thread=True)

    assert (found.step, found.n_averaged) == (expected.step, expected.n_averaged)
    pairs = list(zip(values(found), values(expected), strict=True))
    assert pairs
    for (name, value), (expected_name, expected_value) in pairs:
        assert name == expected_name
        assert torch.equal(value, expected_value)


def test_an_update_does_not_wait_for_the_average(gate: Gate) -> None:
    """`update()` returns while the thread is at work, which sees the weights as they were then."""
    model = model_of(1.0)
    ema = background(model)
    ema.update()
    set_to(model, 5.0)
    waiting = ema.n_averaged
    gate.open.set()

    assert waiting == 1
    assert averaged(ema).item() == 1.0


def test_buffers_too_are_those_of_the_update(gate: Gate) -> None:
    """A buffer that changes while the thread is at work is copied as it was at the update."""
    net = nn.BatchNorm1d(2)
    ema = background(net)
    ema.update()
    net(torch.ones(4, 2))
    gate.open.set()

    assert averaged(ema, "num_batches_tracked").item() == 0
    assert torch.equal(averaged(ema, "running_mean"), torch.zeros(2))


def ask_state_dict(ema: "modkit.EMA[Any]") -> object:
    """Read the checkpoint."""
    return ema.state_dict()["averages"][0]["tensors"]["weight"].item()


def ask_applied(ema: "modkit.EMA[Any]") -> object:
    """Read the weight inside a block."""
    with ema.applied():
        return ema.model.weight.item()


def ask_copy_to(ema: "modkit.EMA[Any]") -> object:
    """Read the weight of another model that the average is copied to."""
    other = model_of(0.0)
    ema.copy_to(other)
    return other.weight.item()


def ask_averaged_model(ema: "modkit.EMA[Any]") -> object:
    """Read the weight of the averaged model."""
    return ema.averaged_model().weight.item()


def ask_a_copy(ema: "modkit.EMA[Any]") -> object:
    """Read the average of a deep copy."""
    return averaged(copy.deepcopy(ema)).item()


def ask_a_pickle(ema: "modkit.EMA[Any]") -> object:
    """Read the average that comes out of a pickle."""
    return averaged(pickle.loads(pickle.dumps(ema))).item()


ASKED = [
    ask_state_dict,
    ask_applied,
    ask_copy_to,
    ask_averaged_model,
    ask_a_copy,
    ask_a_pickle,
]


@pytest.mark.usefixtures("_sleepy")
@for_each("ask", ASKED, ids=lambda ask: ask.__name__)
def test_whoever_reads_waits_for_the_thread(ask: Any) -> None:
    """Whatever reads the averages in the middle of an update sees them after it."""
    model = model_of(0.0)
    ema = background(model, decay=0.5)
    ema.update()
    set_to(model, 8.0)
    ema.update()

    assert ask(ema) == 4.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ema: pickle.loads(pickle.dumps(ema))])
def test_copies_go_on_in_threads_of_their_own(copied: Any) -> None:
    """A copy averages on, independent of the original."""
    model = model_of(0.0)
    ema = background(model, decay=0.5)
    ema.update()
    twin = copied(ema)
    set_to(twin.model, 8.0)
    twin.update()

    assert averaged(twin).item() == 4.0
    assert averaged(ema).item() == 0.0


def broken(ema: "modkit.EMA[Any]", monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next update fail in the thread."""

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    # The update before it must not find the patched method.
    ema.flush()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", fail)
        ema.update()
        with pytest.raises(RuntimeError, match="in the background"):
            ema.flush()


@for_each("ask", [modkit.EMA.update, modkit.EMA.flush, *ASKED])
def test_an_error_in_the_thread_is_raised_wherever_it_matters(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updating and reading raise, with the error of the thread as the cause, and not just once."""
    model = model_of(1.0)
    ema = background(model)
    ema.update()
    broken(ema, monkeypatch)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="an update in the background has failed") as caught:
            ask(ema)
        assert isinstance(caught.value.__cause__, MemoryError)
    assert model.weight.item() == 1.0


def test_after_an_error_a_state_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint from before the error brings everything back."""
    model = model_of(1.0)
    ema = background(model, decay=0.5)
    ema.update()
    state = copy.deepcopy(ema.state_dict())
    broken(ema, monkeypatch)
    ema.load_state_dict(state)
    set_to(model, 3.0)
    ema.update()

    assert averaged(ema).item() == 2.0
    assert ema.n_averaged == 2


def test_after_an_error_averaging_can_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty state forgets the error too."""
    model = model_of(1.0)
    ema = background(model)
    ema.update()
    broken(ema, monkeypatch)
    with pytest.warns(UserWarning, match="starts anew"):
        ema.load_state_dict({})
    ema.update()

    assert averaged(ema).item() == 1.0


def test_a_model_that_does_not_fit_is_refused_at_once() -> None:
    """What is wrong with the model is raised by the update itself, and changes nothing."""
    model = model_of([1.0, 2.0])
    ema = background(model)
    ema.update()
    model.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(NameMismatchError, match="weight"):
        ema.update()

    assert torch.equal(averaged(ema), torch.tensor([1.0, 2.0]))
    assert ema.step == 1


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_thread_needs_averages_in_host_memory(device: str | None) -> None:
    """Other places are refused, with what is needed."""
    expected = f"asynchronous=True needs device='cpu', got device={device!r}"
    with pytest.raises(ValueError, match=expected):
        modkit.EMA(model_of(1.0), device=device, asynchronous=True)


def test_the_thread_ends_with_the_average() -> None:
    """No thread is started before the first update, and none is left."""
    others = set(threading.enumerate())
    ema = background(model_of(1.0))
    before = set(threading.enumerate()) - others
    ema.update()
    ema.flush()
    (thread,) = set(threading.enumerate()) - others
    gone = weakref.ref(ema)
    del ema
    gc.collect()
    thread.join(60)

    assert before == set()
    assert gone() is None
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_starts_a_thread_of_its_own() -> None:
    """In another process the average goes on, though its thread is not there."""
    model = model_of(0.0)
    ema = background(model, decay=0.5)
    ema.update()
    ema.flush()
    child = os.fork()
    if not child:
        # Without a thread, the child would wait for ever.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        set_to(model, 8.0)
        ema.update()
        os._exit(int(averaged(ema).item()))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


def test_the_update_asks_no_tensor_for_its_value() -> None:
    """No step waits for a device."""
    model = network()
    ema = background(model, schedule=schedules.InverseGamma())
    ema.update()
    with CountCalls("_local_scalar_dense") as count:
        for _ in range(3):
            ema.update()
    ema.flush()

    assert count.calls == []


def test_an_average_in_a_thread_resumes_with_every_bit() -> None:
    """Train, save in the middle of an update, load and train on equals to train through."""
    options: dict[str, Any] = {"decay": 0.9, "precision": "stochastic"}
    expected = run(options, torch.bfloat16, in_thread=True)
    net = network(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    first = background(net, **options).attach(optimizer)
    train(net, optimizer, 0, 11)
    state = copy.deepcopy(first.state_dict())
    first.detach()
    second = background(net, **options).attach(optimizer)
    second.load_state_dict(state)
    train(net, optimizer, 11, STEPS)

    assert [name for name, _ in values(second)] == [name for name, _ in values(expected)]
    for (_, value), (_, expected_value) in zip(values(second), values(expected), strict=True):
        assert torch.equal(value, expected_value)
