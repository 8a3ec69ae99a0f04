import contextlib
import copy
import ctypes
import faulthandler
import gc
import inspect
import signal
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import modkit
from modkit import _interrupts as interrupts
from modkit._interrupts import uninterrupted
from modkit.averaging import callback, recipe, swap
from tests.cases import for_each
from tests.processes import python
from tests.unit.averaging.recipes import set_to


def plain() -> nn.Module:
    """Return a small network with parameters and buffers."""
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def cast() -> nn.Module:
    """Return a network whose averages, in 32 bits, are cast when they are swapped in."""
    return plain().bfloat16()


def with_sparse_buffers() -> nn.Module:
    """Return a network with buffers that have no data pointer."""
    model = plain()
    model.register_buffer("coo", torch.eye(3).to_sparse())
    with warnings.catch_warnings():
        # "Sparse CSR tensor support is in beta state", once in a process.
        warnings.simplefilter("ignore")
        model.register_buffer("csr", torch.eye(3).to_sparse_csr())
    return model


def average_of(model: nn.Module) -> "modkit.EMA[nn.Module]":
    """Return an average between ones and twos; the model ends with twos."""
    ema = modkit.EMA(model, decay=0.5)
    for value in 1.0, 2.0:
        set_to(model, value)
        ema.update()
    return ema


def dense(tensors) -> list[torch.Tensor]:
    """Return dense copies of tensors of any layout."""
    return [tensor.detach().to_dense().clone() for tensor in tensors]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Turn off the collection of garbage: what is left in cycles stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_deallocation(frame) -> bool:
    """Return True for code below a ``__del__``, whose exceptions Python ignores."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


class RaiseAtUndo:
    """A profiler that raises where a swap is undone again, because an exception has interrupted it."""

    def __init__(self) -> None:
        self.begun = []

    def __call__(self, frame, event, argument) -> None:
        """Look at calls of the method, but for those when an object is deallocated."""
        is_undo = event == "call" and frame.f_code is swap.Swap.undo.__code__
        if not is_undo or in_deallocation(frame):
            return
        interrupted = frame.f_locals["self"]
        if interrupted in self.begun and interrupted in swap.active_swaps:
            raise KeyboardInterrupt("planted second")
        self.begun.append(interrupted)


class RaiseAtLine:
    """Raises at one of the lines of a swap that run, counted from 0; None only counts them."""

    FILES = (
        swap.__file__,
        recipe.__file__,
        callback.__file__,
        inspect.getfile(modkit.EMA),
        contextlib.__file__,
    )

    def __init__(self, number: int | None, kind: type[BaseException]) -> None:
        self.number, self.kind, self.lines = number, kind, 0

    def __call__(self, frame, event, argument):
        """Trace the functions of a swap, but for what runs when an object is deallocated."""
        ignored = frame.f_code.co_filename not in self.FILES or in_deallocation(frame)
        return None if ignored else self.within

    def within(self, frame, event, argument):
        """Trace the lines of a function."""
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self.number:
                raise self.kind("planted")
        return self.within

    def run(self, work) -> None:
        """Call a function with this trace; what it raises is dropped with its frames."""
        before, profiler = sys.gettrace(), sys.getprofile()
        sys.settrace(self)
        try:
            work()
        except (KeyboardInterrupt, RuntimeError, KeyError):
            sys.settrace(before)
        finally:
            sys.settrace(before)
            sys.setprofile(profiler)


@for_each(
    ("make", "kind", "ending"),
    [
        (plain, KeyboardInterrupt, "normal"),
        (plain, KeyboardInterrupt, "twice"),
        (cast, RuntimeError, "error"),
        (with_sparse_buffers, KeyboardInterrupt, "normal"),
    ],
)
@pytest.mark.usefixtures("uncollected")
def test_every_line_of_a_swap_may_raise(make, kind, ending) -> None:
    """After an exception at any line, the training weights are in the model, and the averages are kept.

    At once, even if the exception of the block keeps the frames of the swap in a cycle, or if
    another exception interrupts the second attempt to restore them.
    """
    model = make()
    ema = average_of(model)
    weights = dense([*model.parameters(), *model.buffers()])
    averages = dense(value for _, value in ema.named_averages())

    def work() -> None:
        if ending == "twice":
            sys.setprofile(RaiseAtUndo())
        with ema.applied(), ema.applied():
            if ending == "error":
                raise KeyError("inside")

    counted = RaiseAtLine(None, kind)
    counted.run(work)
    for number in range(counted.lines):
        RaiseAtLine(number, kind).run(work)

        assert swap.active_swaps == []
        assert torch.is_grad_enabled()
        assert all(map(torch.equal, dense([*model.parameters(), *model.buffers()]), weights))
        assert all(map(torch.equal, dense(v for _, v in ema.named_averages()), averages))
    assert counted.lines > 60


@for_each("first", [True, False])
@for_each("place", ["model", "twin"])
@pytest.mark.usefixtures("uncollected")
def test_every_line_of_an_evaluation_may_raise(place: str, first: bool) -> None:
    """Later evaluations see the average of their own model, whichever was interrupted, and modes are back."""

    def start() -> tuple["modkit.EMACallback[nn.Module]", dict[str, nn.Module]]:
        evaluation = modkit.EMACallback(plain(), decay=0.5)
        for value in 1.0, 2.0:
            set_to(evaluation.model, value)
            evaluation.step()
        models = {"model": evaluation.model, "twin": copy.deepcopy(evaluation.model)}
        if not first:
            for model in models.values():
                look(evaluation, model)
        return evaluation, models

    def look(evaluation: "modkit.EMACallback[nn.Module]", model: nn.Module) -> float:
        with evaluation.evaluating(), evaluation.ema.applied(model):
            return model[0].weight[0, 0].item()

    number = lines = 0
    while number <= lines:
        evaluation, models = start()
        tracer = RaiseAtLine(number - 1 if number else None, KeyboardInterrupt)
        tracer.run(lambda e=evaluation, m=models[place]: look(e, m))
        lines = max(lines, tracer.lines)
        # Every second line; the two values of `first` begin at different ones.
        number += 2 if number else 1 + first

        assert all(module.training for module in evaluation.model.modules())
        assert not evaluation._evaluation.blocks
        assert [look(evaluation, model) for model in models.values()] == [1.5, 1.5]
        assert [model[0].weight[0, 0].item() for model in models.values()] == [2.0, 2.0]
    assert lines > 90


class CollectAtLine(RaiseAtLine):
    """Collects garbage at one of the lines at which the collector may run by itself."""

    FILES = (swap.__file__, callback.__file__)

    def within(self, frame, event, argument):
        """Trace the lines of a function."""
        if event == "line" and gc.isenabled():
            self.lines += 1
            if self.lines - 1 == self.number:
                gc.collect()
        return self.within


@pytest.fixture
def little_garbage() -> Iterator[None]:
    """Leave out what is there already, so that garbage is collected in no time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@for_each("first", [True, False])
@pytest.mark.usefixtures("little_garbage")
def test_an_abandoned_block_may_be_collected_at_every_line(first: bool) -> None:
    """It ends before or after a change, not in it: training weights and modes are back."""
    evaluation = modkit.EMACallback(cast(), decay=[0.5, 0.5])
    for value in 1.0, 2.0:
        set_to(evaluation.model, value)
        evaluation.step()
    weights = dense(evaluation.model.parameters())

    def abandon() -> None:
        def batches() -> Iterator[None]:
            with evaluation.evaluating(index=0):
                yield

        cycle = [batches()]
        next(cycle[0])
        cycle.append(cycle)

    def look() -> None:
        if first:
            abandon()
        with evaluation.evaluating(index=1):
            if not first:
                abandon()

    number = lines = 0
    while number <= lines:
        tracer = CollectAtLine(number - 1 if number else None, KeyboardInterrupt)
        tracer.run(look)
        gc.collect()
        lines = max(lines, tracer.lines)
        number += 1

        assert swap.active_swaps == []
        assert all(map(torch.equal, dense(evaluation.model.parameters()), weights))
        assert all(module.training for module in evaluation.model.modules())


def test_a_write_to_a_sparse_buffer_is_noticed() -> None:
    """The training value is back, and the warning names the option."""
    model = with_sparse_buffers()
    ema = average_of(model)

    def write() -> None:
        with ema.applied():
            model.coo.mul_(2)

    with pytest.warns(UserWarning, match=r"coo, .* was written to.*buffers=\{'coo': 'ignore'\}"):
        write()

    assert torch.equal(model.coo.to_dense(), torch.eye(3))


def test_signals_wait_for_the_end_of_a_block() -> None:
    """The handler runs after the block, and the handlers of the process are as before."""
    reached = []

    def interrupted() -> None:
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")
        reached.append("after the block")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert reached == ["the end of the block"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.posix
@for_each("place", ["before", "after"])
def test_a_signal_while_handlers_are_replaced_leaves_none_of_ours(place, monkeypatch) -> None:
    """The handlers of the process are restored, and the signal is not lost."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    set_handler = interrupts._signals.signal

    def interrupted(number, handler):
        if number == signal.SIGUSR1 and place == "before":
            monkeypatch.undo()
            signal.raise_signal(signal.SIGUSR1)
        found = set_handler(number, handler)
        if number == signal.SIGUSR1 and place == "after":
            monkeypatch.undo()
            signal.raise_signal(signal.SIGUSR1)
        return found

    monkeypatch.setattr(interrupts._signals, "signal", interrupted)
    entered = False
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            entered = True
        left = [signal.getsignal(number) for number in handlers]
    finally:
        signal.signal(signal.SIGUSR1, handlers[signal.SIGUSR1])

    assert left == [handlers[signal.SIGINT], signal.default_int_handler]
    assert entered == (place == "after")


@pytest.mark.posix
def test_handlers_that_do_not_raise_run_later() -> None:
    """A handler that only sets a flag runs once for each signal, in order."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            inside = list(seen)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert inside == []
    assert seen == [signal.SIGUSR1] * 2


def test_an_interrupted_update_is_complete() -> None:
    """A signal in the middle of an update arrives when averages and counters agree."""
    model = plain()
    ema = average_of(model)
    set_to(model, 3.5)
    before = ema._engine.step

    def step(*arguments) -> bool:
        signal.raise_signal(signal.SIGINT)
        return before(*arguments)

    ema._engine.step = step
    with pytest.raises(KeyboardInterrupt):
        ema.update()

    assert (ema.step, ema.n_averaged) == (3, 3)
    assert all(value.eq(2.5).all() for name, value in ema.named_averages() if name[0] == "0")


def use(work: str, model: nn.Module) -> None:
    """Enter and leave sections."""
    ema = average_of(model)
    if work == "update":
        ema.update()
    elif work == "applied":
        with ema.applied():
            pass
    else:
        with modkit.fast_inference(model):
            pass


# Of `struct sigaction` on Linux: a pointer and a set of 1,024 bits come before them.
FLAGS = slice(136, 140)


@pytest.mark.posix
@for_each("work", ["update", "applied", "fast_inference"])
@for_each("restarts", [False, True])
def test_what_c_code_has_installed_stays(work, restarts, tmp_path) -> None:
    """A chained faulthandler dumps the stacks after a section as before, and calls may be restarted."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        signal.siginterrupt(signal.SIGUSR1, not restarts)
        flags = []
        with (tmp_path / "stacks").open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, chain=True)
            sizes = []
            for _ in range(2):
                signal.raise_signal(signal.SIGUSR1)
                sizes.append((tmp_path / "stacks").stat().st_size)
                use(work, plain())
            faulthandler.unregister(signal.SIGUSR1)
        for _ in range(2):
            action = ctypes.create_string_buffer(256)
            interrupts._sigaction(int(signal.SIGUSR1), None, action)
            flags.append(action.raw[FLAGS])
            use(work, plain())
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert seen == [signal.SIGUSR1] * 2
    assert 0 < sizes[0] < sizes[1]
    assert flags[0] == flags[1]


@pytest.mark.posix
def test_each_signal_that_has_waited_is_handled() -> None:
    """Also after one whose handler raises."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert seen == [signal.SIGUSR1]


FORK = """
import gc, os, signal, threading, warnings
from modkit import _interrupts as interrupts

warnings.simplefilter("ignore")  # about forks of processes with threads
signal.signal(signal.SIGINT, signal.default_int_handler)
codes = []

def fork():
    child = os.fork()
    if not child:
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        is_free = interrupts._Process.lock.acquire(blocking=False)
        os._exit(0 if is_default and is_free and gc.isenabled() else 1)
    codes.append(os.waitpid(child, 0)[1])

with interrupts.uninterrupted():
    worker = threading.Thread(target=fork)
    worker.start()
    worker.join()
is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(codes, is_default and gc.isenabled())
"""


@pytest.mark.posix
def test_a_child_that_is_forked_during_a_section_has_the_handlers() -> None:
    """The section ends in the parent alone."""
    assert python(FORK).stdout == "[0] True\n"
