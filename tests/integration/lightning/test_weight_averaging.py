"""Lightning's own weight averaging is the oracle: each test runs on it and on modkit."""

import pytest
import torch

from modkit import schedules
from tests.integration.lightning import runs
from tests.integration.lightning.runs import QUIET, EMACallback, callbacks


# And advice about configure_model() in Lightning's own callback.
pytestmark = [
    QUIET,
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]
BOTH = pytest.mark.parametrize("library", ["lightning", "modkit"])
EPOCHS = 8


class Recorded:
    """Records the calls of `should_update`, and how many models the average has after each epoch."""

    def should_update(self, step_idx=None, epoch_idx=None):
        chosen = self.rule or super().should_update
        found = chosen(step_idx=step_idx, epoch_idx=epoch_idx)
        self.calls.append((step_idx, epoch_idx, found))
        return found

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        self.counts.append(int((self.ema or self._average_model).n_averaged))
        self.weights.append(pl_module.net[0].weight.detach().clone())


class Theirs(Recorded, callbacks.EMAWeightAveraging):
    ema = None


class TheirMean(Recorded, callbacks.WeightAveraging):
    ema = None


class Ours(Recorded, EMACallback):
    pass


def callback_of(library, decay=0.9, *, rule=None, use_buffers=True, **options):
    """Return the callback of a library with the same options, under the names of Lightning.

    A decay of None is the equally weighted mean.
    """
    if library == "lightning":
        options["use_buffers"] = use_buffers
        found = TheirMean(**options) if decay is None else Theirs(decay=decay, **options)
    else:
        # Lightning's own answers, of which modkit has no options.
        asked = {name: options.pop(name) for name in [*options] if name.startswith("update_")}
        rule = callbacks.EMAWeightAveraging(**asked).should_update if asked else rule
        options |= {"buffers": "average" if use_buffers else "copy", "swap_to_average_at_end": True}
        decays = {"schedule": schedules.Equal()} if decay is None else {"decay": decay}
        found = Ours(**decays, **options)
    found.rule, found.calls, found.counts, found.weights = rule, [], [], []
    return found


def trained(folder, library, *, model=None, decay=0.9, **options):
    """Train for 8 epochs with 3 steps in each; return the final tensors and the callback."""
    trainer = {"max_epochs": EPOCHS, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    trainer |= options.pop("trainer", {})
    callback = callback_of(library, decay, **options)
    net = runs.Net() if model is None else model
    runs.fit(folder, model=net, ema=callback, **trainer)
    return dict(net.state_dict()), callback


def check_against_lightning(folder, **options):
    """Assert that both libraries ask, count and average alike; return modkit's callback."""
    make = options.pop("make", runs.Net)
    theirs, their_callback = trained(folder, "lightning", model=make(), **options)
    ours, callback = trained(folder, "modkit", model=make(), **options)

    # Lightning asks again after a batch that only accumulates, if the answer was False.
    assert callback.calls == list(dict.fromkeys(their_callback.calls))
    assert callback.counts == their_callback.counts
    for name, value in ours.items():
        # Lightning averages the integers of a counter as well.
        if value.is_floating_point():
            torch.testing.assert_close(value, theirs[name], msg=lambda text, n=name: f"{n}: {text}")
    return callback


class Plain(runs.Net):
    """A network without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.nn.Identity()


class Late(Plain):
    """A network whose layers are made by `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.net = self.net, None

    def configure_model(self) -> None:
        self.net = self.made if self.net is None else self.net


@pytest.mark.parametrize("make", [runs.Net, Plain, Late])
@pytest.mark.parametrize("use_buffers", [True, False])
def test_every_step(make, use_buffers, tmp_path) -> None:
    """By default each optimizer step is one update, and each epoch is asked about."""
    callback = check_against_lightning(tmp_path, make=make, use_buffers=use_buffers)

    assert callback.counts == [3 * epoch for epoch in range(1, EPOCHS + 1)]
    assert callback.calls[:4] == [
        (0, None, True),
        (1, None, True),
        (2, None, True),
        (None, 0, False),
    ]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"update_every_n_steps": 1}, 24),
        ({"update_every_n_steps": 5}, 5),
        ({"update_starting_at_step": 10}, 14),
        ({"update_every_n_steps": 5, "update_starting_at_step": 10}, 3),
        ({"update_starting_at_epoch": 3}, 24 + 5),
        ({"update_starting_at_step": 10**6, "update_starting_at_epoch": 3}, 5),
        ({"device": "cpu"}, 24),
    ],
    ids=str,
)
def test_options_of_lightning(options, count, tmp_path) -> None:
    """`should_update` is asked as in Lightning, whose options say when to update."""
    callback = check_against_lightning(tmp_path, **options)

    assert callback.counts[-1] == count


def test_mean_of_chosen_epochs(tmp_path) -> None:
    """An overridden `should_update` gives stochastic weight averaging of epochs 3, 5 and 7."""

    def rule(step_idx=None, epoch_idx=None):
        return epoch_idx in {3, 5, 7}

    callback = check_against_lightning(tmp_path, decay=None, rule=rule)

    assert callback.counts == [0, 0, 0, 1, 1, 2, 2, 3]
    mean = torch.stack([callback.weights[epoch] for epoch in (3, 5, 7)]).mean(0)
    torch.testing.assert_close(runs.average_of(callback), mean)


@BOTH
@pytest.mark.parametrize("place", runs.PLACES)
def test_resume_with_a_frequency(library, place, tmp_path) -> None:
    """Options count the steps of the whole training, not those since the checkpoint."""
    options = {"update_every_n_steps": 2, "update_starting_at_step": 3}
    through = callback_of(library, **options)
    net, _, _ = runs.fit(tmp_path, runs.Saver(tmp_path), ema=through, max_epochs=EPOCHS)
    resumed = callback_of(library, **options)
    again, _, _ = runs.fit(
        tmp_path, ema=resumed, max_epochs=EPOCHS, resume=tmp_path / f"{place}.ckpt"
    )

    if library == "modkit":
        assert runs.numbers_of(again, resumed) == runs.numbers_of(net, through)
    assert resumed.calls[-20:] == through.calls[-20:]
    assert resumed.counts[-1] == through.counts[-1]


@pytest.mark.parametrize("saver", ["before", "after"])
@pytest.mark.parametrize("place", runs.PLACES)
def test_resume_with_updates_at_the_end_of_epochs(place, saver, tmp_path) -> None:
    """A checkpoint of the end of an epoch counts that epoch once, whichever callback saves it."""
    options = {"update_starting_at_step": 10**6, "update_starting_at_epoch": 0}
    through, saving = callback_of("modkit", **options), runs.Saver(tmp_path)
    order = ((saving,), ()) if saver == "before" else ((), [saving])
    net, _, _ = runs.fit(tmp_path, *order[0], after=order[1], ema=through, max_epochs=4)
    resumed = callback_of("modkit", **options)
    again, _, _ = runs.fit(tmp_path, ema=resumed, max_epochs=4, resume=tmp_path / f"{place}.ckpt")

    assert through.counts == [1, 2, 3, 4]
    assert resumed.ema.n_averaged == 4
    assert runs.numbers_of(again, resumed) == runs.numbers_of(net, through)
