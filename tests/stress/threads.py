"""Use one model in sixteen threads at once, on torch or on modkit, and count errors.

python -m tests.stress.threads torch --seconds 60
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import modkit
from tests.helpers import MODKIT, TORCH, Implementation, seed_everything


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# So short that a thread is interrupted in the middle of nearly every call.
SWITCH_INTERVAL = 1e-5


def network(impl: Implementation) -> torch.nn.Module:
    """Return a small model: a part with hooks and gradients, one to load, and two with averages."""
    nn = impl.own

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("offset", torch.ones(4))

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            if x.shape[-1] != 4:
                raise LookupError("four features")
            return torch.relu(self.layer(x) * scale + self.offset)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Part()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
            self.tail = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tail(self.head(self.layers(self.body(x, scale=0.5))))

    seed_everything()
    return Net()


class Storm:
    """The model, the expected result of each use, and the counts of uses and errors."""

    def __init__(self, impl: Implementation) -> None:
        self.impl = impl
        self.model: Any = network(impl)
        self.x = torch.randn(3, 4)
        self.expected = self.model(self.x).detach().clone()
        self.gradient = self.differentiate()
        self.names = [name for name, _ in self.model.named_modules()]
        self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.loaded = {
            name: value.clone() for name, value in self.model.layers.state_dict().items()
        }
        self.done: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.ends = 0.0

    def differentiate(self) -> torch.Tensor:
        """Return the gradient of the input, which backward hooks see."""
        x = self.x.clone().requires_grad_()
        return torch.autograd.grad(self.model.body(x).sum(), x)[0]

    def check(self, holds: object, what: str) -> None:
        """Count ``what`` as an error unless it holds."""
        if not holds:
            self.wrong[what] += 1

    # Each of the following is repeated by one thread.

    def call(self) -> None:
        """Call the model without gradients."""
        with torch.no_grad():
            self.check(torch.equal(self.expected, self.model(self.x)), "wrong result")

    def backward(self) -> None:
        """Call the model and differentiate."""
        self.check(torch.equal(self.gradient, self.differentiate()), "wrong gradient")

    def hooked(self, register: str) -> None:
        """Register a hook, call the model, which must call it, and remove it."""
        own, calls = threading.get_ident(), []

        def hook(*arguments: object) -> None:
            if threading.get_ident() == own:
                calls.append(arguments)

        handle = getattr(self.model.body, register)(hook)
        self.call()
        handle.remove()
        self.call()
        self.check(len(calls) == 1, "lost hook" if not calls else "hook called after its removal")

    def pre_hook(self) -> None:
        """Use a pre-hook."""
        self.hooked("register_forward_pre_hook")

    def hook(self) -> None:
        """Use a hook."""
        self.hooked("register_forward_hook")

    def raising_call(self) -> None:
        """Call with an error, which must propagate past the hooks of other threads.

        After an error, torch's call walks the table of hooks, to which other threads may add at that
        moment (docs/hooks.md, Threads). The first error is then the context of the second.
        """
        try:
            self.model.body(torch.ones(1, 3))
        except (LookupError, RuntimeError) as error:
            is_race = str(error) == "OrderedDict mutated during iteration"
            first = error.__context__ if is_race else error
            holds = isinstance(first, LookupError) and str(first) == "four features"
            self.check(holds, "wrong error")
        else:
            self.check(False, "lost error")

    def backward_hooks(self) -> None:
        """Use a backward hook and a backward pre-hook."""
        own, calls = threading.get_ident(), []

        def hook(*arguments: object) -> None:
            calls.append((threading.get_ident(), len(arguments)))

        body = self.model.body
        with body.register_full_backward_hook(hook), body.register_full_backward_pre_hook(hook):
            self.backward()
        self.check(sorted(calls).count((own, 3)) == 1, "lost backward hook")
        self.check(sorted(calls).count((own, 2)) == 1, "lost backward pre-hook")

    def state_hooks(self) -> None:
        """Use hooks of saving and loading on the part that other threads save and load."""
        own, calls = threading.get_ident(), []

        def hook(*_: object) -> None:
            if threading.get_ident() == own:
                calls.append(_)

        layer = self.model.layers[0]
        with (
            layer.register_state_dict_pre_hook(hook),
            layer.register_state_dict_post_hook(hook),
            layer.register_load_state_dict_pre_hook(hook),
            layer.register_load_state_dict_post_hook(hook),
        ):
            self.save()
            self.load()
        self.check(len(calls) == 4, "lost state hook")

    def save(self) -> None:
        """Read the state."""
        state = self.model.state_dict()
        self.check(list(state) == list(self.saved), "wrong names in a state")
        same = all(torch.equal(value, self.saved[name]) for name, value in state.items())
        self.check(same, "wrong state")

    def load(self) -> None:
        """Load the state of a part with its own values."""
        keys = self.model.layers.load_state_dict(self.loaded)
        self.check(not keys.missing_keys and not keys.unexpected_keys, "wrong keys of a load")

    def walk(self) -> None:
        """List the modules."""
        names = [name for name, _ in self.model.named_modules()]
        self.check(names == self.names, "wrong names of modules")
        self.check(sum(1 for _ in self.model.parameters()) == 10, "wrong parameters")

    def average(self) -> None:
        """Update averages of weights that do not change, and swap them in."""
        averaged = self.impl.AveragedModel(self.model.head)
        averaged.update_parameters(self.model.head)
        if self.impl is TORCH:
            return
        ema = modkit.EMA(self.model.head, decay=0.5)
        for _ in range(3):
            ema.update()
            with ema.applied():
                self.call()
                self.check(len(ema.state_dict().get("raw", ())) == 4, "lost training weights")

    def average_another(self) -> None:
        """Swap the averages of another part in, while other swaps of the process come and go."""
        ema = modkit.EMA(self.model.tail, decay=0.5)
        ema.update()
        for _ in range(10):
            with ema.applied():
                self.check(len(ema.state_dict().get("raw", ())) == 2, "lost training weights")

    def scope(self) -> None:
        """Open a block of fast inference, call and leave."""
        with modkit.fast_inference(self.model):
            self.call()
        self.call()

    def work(self, number: int, action: Callable[[], None]) -> None:
        """Repeat one use until the time is over; count exceptions with the line that raised them."""
        while time.monotonic() < self.ends:
            try:
                action()
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error}"[:80]
                self.wrong[f"{text} ({place.filename.split('/')[-1]}:{place.lineno})"] += 1
            self.done[f"{number}:{action.__name__}"] += 1

    def run(self, seconds: float) -> None:
        """Run sixteen threads at once."""
        hooks = (self.pre_hook, self.pre_hook, self.hook, self.hook, self.raising_call)
        states = (self.backward_hooks, self.state_hooks, self.save, self.load, self.walk)
        ours = (self.call, self.walk) if self.impl is TORCH else (self.average_another, self.scope)
        calls = (self.call, self.call, self.backward, self.average)
        actions = (*calls, *hooks, *states, *ours)
        threads = [
            threading.Thread(target=self.work, args=(number, action))
            for number, action in enumerate(actions)
        ]
        self.ends = time.monotonic() + seconds
        with frequent_switches():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        tables = [vars(module) for module in self.model.modules()]
        left = [key for table in tables for key in table if "_hooks" in key and table[key]]
        self.check(not left, "hooks left behind")


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def main() -> None:
    """Run the load and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("implementation", choices=["torch", "modkit"])
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    storm = Storm(TORCH if given.implementation == "torch" else MODKIT)
    storm.run(given.seconds)
    sys.stdout.write(json.dumps({"done": storm.done, "wrong": storm.wrong}, indent=1) + "\n")


if __name__ == "__main__":
    main()
