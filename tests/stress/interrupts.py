"""Interrupts the operations of an average at random moments: `python interrupts.py SIGNALS LAYERS SEED`.

Each signal raises KeyboardInterrupt at some bytecode of the main thread. After each one it is checked
that nothing is lost, nothing is left behind, and that the averages and their counters agree.
"""

import copy
import json
import random
import signal
import sys
import time
from collections import Counter

import torch
from torch.overrides import _get_current_function_mode_stack

import modkit
from modkit import _fast_inference
from modkit.averaging import swap


WEIGHT = 3.0
OPERATIONS = ("applied", "update", "copied", "load", "evaluating", "fast")
BINDINGS = _fast_inference._bindings


class Run:
    """A model of ``4 * layers`` parameters and their average, whose operations are interrupted."""

    def __init__(self, layers):
        blocks = [(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(layers)]
        self.net = torch.nn.Sequential(*[one for block in blocks for one in block])
        self.ema = modkit.EMA(self.net, decay=0.5)
        self.ema.update()
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.fill_(WEIGHT)
        self.ema.update()
        self.state = copy.deepcopy(self.ema.state_dict())
        self.callback = modkit.EMACallback(self.net, decay=0.5)
        self.callback.ema = self.ema
        self.dicts = self.entries()

    def entries(self):
        """Return the names in the ``__dict__`` of each module, and its mode."""
        return [(sorted(module.__dict__), module.training) for module in self.net.modules()]

    def evaluating(self):
        """Evaluate the average, and the training weights inside."""
        with self.callback.evaluating(), self.callback.evaluating_training_weights():
            pass

    def fast(self):
        """Enter and leave the scope."""
        with modkit.fast_inference(self.net):
            pass

    def applied(self):
        """Swap the average in and restore the training weights."""
        with self.ema.applied():
            pass

    def update(self):
        """Take one step of the average."""
        self.ema.update()

    def copied(self):
        """Copy the average in and restore the training weights."""
        self.ema.store()
        self.ema.copy_to()
        self.ema.restore()

    def load(self):
        """Load the state of the beginning."""
        self.ema.load_state_dict(self.state)

    def averages(self):
        """Return copies of the averages, with the counters that belong to them."""
        tensors = {name: tensor.clone() for name, tensor in self.ema.named_averages()}
        return (self.ema.step, self.ema.n_averaged), tensors

    def outcomes(self):
        """Return the averages by counters: now, after one more update, and after a load."""
        found = [self.averages()]
        self.ema.update()
        found.append(self.averages())
        self.load()
        found.append(self.averages())
        return dict(found)

    def problems(self, outcomes):
        """Return what an interrupt has broken."""
        found = []
        if _get_current_function_mode_stack() or not torch.is_grad_enabled():
            found.append("modes left")
        if swap.active_swaps:
            found.append("averages left in the model")
        if self.entries() != self.dicts or BINDINGS:
            found.append("modules changed")
            BINDINGS.clear()
        if self.ema.training_weights():
            # Between copy_to() and restore() the training weights are stored: nothing is lost.
            self.ema.restore()
        if any(not parameter.eq(WEIGHT).all() for parameter in self.net.parameters()):
            found.append("training weights lost")
        counters, tensors = self.averages()
        expected = outcomes.get(counters, {})
        if tensors.keys() != expected.keys() or any(
            not torch.equal(tensor, expected[name]) for name, tensor in tensors.items()
        ):
            found.append("averages and counters disagree")
        return found


class User:
    """Presses Ctrl-C once, after a delay. A signal that comes too late is ignored."""

    waits = False

    @classmethod
    def press(cls, number, frame):
        """Handle the signal of the timer as that of Ctrl-C is handled."""
        if cls.waits:
            signal.default_int_handler(number, frame)

    @classmethod
    def interrupt(cls, work, delay):
        """Call a function and interrupt it after a delay; return True if it was interrupted."""
        cls.waits, interrupted = True, False
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted = True
        cls.waits = False
        return interrupted


def bombard(operation, signals, layers, rng):
    """Interrupt an operation at random moments; count what that has broken."""
    found = Counter()
    run = Run(layers)
    work = getattr(run, operation)
    started = time.perf_counter()
    for _ in range(5):
        work()
    duration = (time.perf_counter() - started) / 5

    run.load()
    outcomes = run.outcomes()
    while signals:
        if not User.interrupt(work, rng.uniform(1e-6, 1.3 * duration)):
            run.load()
            continue
        signals -= 1
        if problems := run.problems(outcomes):
            found.update(problems)
            run = Run(layers)
            work = getattr(run, operation)
            outcomes = run.outcomes()
        run.load()
    return found


def main(signals, layers, seed):
    """Interrupt each operation, and print the number of signals and of faults as JSON."""
    press = User.press
    signal.signal(signal.SIGALRM, press)
    rng = random.Random(seed)
    faults = Counter()
    for operation in OPERATIONS:
        faults.update(bombard(operation, signals // len(OPERATIONS), layers, rng))
    handlers = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT)]
    if handlers != [press, signal.default_int_handler]:
        faults["handlers left"] += 1
    sys.stdout.write(json.dumps({"signals": signals, "faults": faults}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
