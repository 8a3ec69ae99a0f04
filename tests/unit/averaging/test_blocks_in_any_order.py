"""Evaluations that do not end in the order of a stack, and threads that share an average."""

import asyncio
import copy
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit.averaging.callback import Evaluation
from tests.cases import for_each
from tests.unit.averaging.recipes import set_to


def evaluation() -> "modkit.EMACallback[nn.Module]":
    """Return averages of a network in training mode, of which average 2 is what the model holds."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.5))
    callback = modkit.EMACallback(net, None, [0.5, 0.8125, 0.0], index=2)
    for value in 0.0, 8.0, 9.0:
        set_to(net, value)
        callback.step()
    callback.ema.load_state_dict(callback.ema.state_dict())
    return callback


def seen(callback: Any) -> float:
    """Return what a forward sees."""
    return callback.model[0].weight.item()


def batches(callback: Any, index: int) -> Iterator[float]:
    """Evaluate batch by batch."""
    with callback.evaluating(index=index):
        for _ in range(2):
            yield seen(callback)


def tasks(callback: Any) -> None:
    """Evaluate in two tasks, of which the first one ends first."""

    async def evaluate(index: int) -> None:
        with callback.evaluating(index=index):
            await asyncio.sleep(0.001 * (index + 1))

    async def both() -> None:
        await asyncio.gather(evaluate(0), evaluate(1))

    asyncio.run(both())


def in_order(callback: Any) -> None:
    """Close two generators in the order in which they began."""
    first, second = batches(callback, 0), batches(callback, 1)
    next(first)
    next(second)
    first.close()
    assert not callback.model.training
    second.close()


def collected_later(callback: Any) -> None:
    """Forget a generator, which ends it within another block."""
    forgotten = batches(callback, 0)
    next(forgotten)
    with callback.evaluating(index=1):
        del forgotten
        gc.collect()
        assert not callback.model.training
        callback.on_validation_start()
        callback.on_validation_end()


def in_threads(callback: Any) -> None:
    """Begin two blocks in two threads, and end the first one first."""
    begun, ended = threading.Barrier(2, timeout=60), threading.Event()

    def evaluate(index: int) -> None:
        with callback.evaluating(index=index):
            begun.wait()
            if index:
                ended.wait(60)
        ended.set()

    workers = [threading.Thread(target=evaluate, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)


def training_inside(callback: Any) -> None:
    """Evaluate within a block in which dropout was turned on, for its own reasons."""
    with callback.evaluating(index=0):
        callback.model.train()
        with callback.evaluating(index=1):
            assert not callback.model.training
        assert callback.model.training


@for_each("way", [tasks, in_order, collected_later, in_threads, training_inside])
def test_the_next_evaluation_is_right(way: Callable[[Any], None]) -> None:
    """Modes and weights are those of training, and a later block or hook sees its own average."""
    callback = evaluation()
    expected = [float(dict(callback.ema.named_averages(i))["0.weight"]) for i in range(3)]
    way(callback)

    assert all(module.training for module in callback.model.modules())
    assert seen(callback) == 9.0
    callback.on_validation_start()
    assert seen(callback) == expected[2]
    callback.on_validation_end()
    for index in range(3):
        with callback.evaluating(index=index):
            assert seen(callback) == expected[index]
    assert callback.model.training


def test_blocks_of_two_models() -> None:
    """A callback of a trainer may average another model before the blocks of the first one end."""
    nets = [nn.Linear(1, 1) for _ in range(2)]
    evaluations = Evaluation()
    blocks = [evaluations.block(modkit.EMA(net, 0.9), 0) for net in nets]
    for block in blocks:
        block.__enter__()
    assert [net.training for net in nets] == [False, False]
    for block in blocks:
        block.__exit__(None, None, None)

    assert [net.training for net in nets] == [True, True]


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_all(*works: Callable[[], object]) -> None:
    """Run functions in a thread each."""
    workers = [threading.Thread(target=work) for work in works]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)


@pytest.mark.usefixtures("switching")
def test_threads_that_update_one_average() -> None:
    """No update is lost, and the state loads."""
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)])
    ema = modkit.EMA(net, 0.9)

    def work() -> None:
        for _ in range(200):
            ema.update()

    run_all(work, work, work)
    assert (ema.step, ema.n_averaged) == (600, 600)
    modkit.EMA(net, 0.9).load_state_dict(ema.state_dict())


@pytest.mark.usefixtures("switching")
@for_each("read", ["state_dict", "deepcopy", "averaged_model"])
def test_what_is_read_beside_updates_is_of_one_update(read: str) -> None:
    """Counters fit each other, and so do the tensors of a copy."""
    net = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(20)])
    ema = modkit.EMA(net, 0.0)
    set_to(net, -1.0)
    ema.update()
    mixed, counts = [], []
    done = threading.Event()

    def train() -> None:
        for step in range(200):
            set_to(net, float(step))
            ema.update()
        done.set()

    def look() -> None:
        while not done.is_set():
            other = copy.deepcopy(ema) if read == "deepcopy" else ema
            if read == "averaged_model":
                values = [parameter.item() for parameter in ema.averaged_model().parameters()]
                mixed.append(len(set(values)) > 1)
                continue
            state = other.state_dict()
            counts.append(state["step"] - state["n_averaged"])
            if read == "deepcopy":
                mixed.append(len({average.item() for _, average in other.named_averages()}) > 1)

    run_all(train, look)
    assert not any(mixed)
    assert not any(counts)
    assert len(mixed) + len(counts) > 10


@for_each("call", ["update", "rebind", "store", "load_state_dict"])
def test_a_block_that_begins_in_another_thread_is_noticed(call: str, monkeypatch: Any) -> None:
    """It waits for the call, or the call is refused: none takes the average for training weights."""
    net = nn.Linear(1, 1, bias=False)
    ema = modkit.EMA(net, 0.5)
    for value in 0.0, 8.0:
        set_to(net, value)
        ema.update()
    arguments = (ema.state_dict(),) if call == "load_state_dict" else ()
    begun, ended = threading.Event(), threading.Event()
    check = modkit.EMA._check_restored

    def evaluate() -> None:
        with ema.applied():
            begun.set()
            ended.wait(60)

    def checked(*arguments: Any) -> None:
        check(*arguments)
        if not worker.ident:
            worker.start()
            begun.wait(0.2)

    worker = threading.Thread(target=evaluate)
    monkeypatch.setattr(modkit.EMA, "_check_restored", checked)
    # So that each call checks, as with an average of another model in a block.
    ema._overwritten = [("weight", torch.zeros(1), 0)]
    try:
        if call == "load_state_dict":
            with pytest.raises(RuntimeError, match=r"was called inside applied\(\)"):
                ema.load_state_dict(*arguments)
        else:
            getattr(ema, call)(*arguments)
        expected = 6.0 if call == "update" else 4.0
    finally:
        ended.set()
        worker.join(60)

    assert float(dict(ema.named_averages())["weight"]) == expected
    assert all(value.item() == 8.0 for value in ema._stored.values())


@pytest.mark.posix
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_while_another_thread_changes_an_average() -> None:
    """The child does not wait for a thread that it does not have."""
    net = nn.Linear(1, 1)
    ema = modkit.EMA(net, 0.9)
    ema.update()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            ema.update()

    worker = threading.Thread(target=train)
    worker.start()
    try:
        for _ in range(10):
            child = os.fork()
            if not child:
                with ema.applied(), torch.no_grad():
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        worker.join(60)
