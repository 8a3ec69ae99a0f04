"""Small runs of Lightning's Trainer: a network, data that can be resumed, and callbacks that look.

A test that imports it is skipped where Lightning is missing.
"""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from modkit.averaging.sharding import has_shards, local_shard
from tests.distributed.averages.networks import whole


pl = pytest.importorskip(
    "lightning.pytorch", reason="needs Lightning: nox -s ecosystem installs it"
)
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
EMACallback = pytest.importorskip("modkit.integrations.lightning").EMACallback

# Advice about loaders and checkpoints.
QUIET = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)

BATCHES = 6


class Batches:
    """Numbered batches, the same each time; an epoch goes on where a checkpoint was written."""

    def __init__(self, count: int = BATCHES, *, first_seed: int = 0) -> None:
        self.count, self.first_seed, self.position = count, first_seed, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        self.position %= self.count
        for position in range(self.position, self.count):
            self.position = position + 1
            # Each process has data of its own.
            seed = self.first_seed + position + 100 * int(os.environ.get("LOCAL_RANK", "0"))
            yield torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Net(pl.LightningModule):
    """A network with batch normalization; what its first weight was in each stage is in ``seen``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        self.seen: dict[str, list[Tensor]] = {"validate": [], "test": [], "predict": []}

    def look(self, stage: str) -> None:
        weight = self.net[0].weight.detach()
        self.seen[stage].append(whole(weight).clone())

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.look("validate")
        self.log("loss", self.net(batch).square().mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.look("test")

    def predict_step(self, batch, batch_idx):
        self.look("predict")
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Adversaries(Net):
    """Two networks with an optimizer each, which step in the order that the user chooses."""

    def __init__(self, discriminator_steps: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(2, 1)
        self.discriminator_steps = discriminator_steps

    def training_step(self, batch, batch_idx):
        for _ in range(self.discriminator_steps):
            self.step_of(1, -self.critic(self.net(batch).detach()).mean())
        if batch_idx % 2 == 0:
            self.step_of(0, self.critic(self.net(batch)).mean())

    def step_of(self, index, loss):
        optimizer = self.optimizers()[index]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.net, self.critic)]


class Sharded(Net):
    """A model whose parameters are sharded over the ranks.

    It has no buffers: each process would have its own, and Lightning saves those of the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.LayerNorm(6)

    def configure_model(self) -> None:
        if not has_shards(self):
            fully_shard(self.net[3], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Failing(Net):
    """Fails once in a validation of the second epoch."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.error is not None and self.current_epoch == 1:
            error, self.error = self.error, None
            raise error("in the validation")


def average_of(callback: EMACallback, name: str = "net.0.weight") -> Tensor:
    return dict(callback.ema.named_averages(callback.index))[name]


class Watch(pl.Callback):
    """Notes the raw first weight and its average after each training batch."""

    def __init__(self, ema: EMACallback) -> None:
        self.ema, self.raw, self.averages = ema, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.raw.append(pl_module.net[0].weight.detach().clone())
        self.averages.append(average_of(self.ema).clone())


class Saver(pl.Callback):
    """Writes a checkpoint in each of several places of a run.

    It comes before ``EMACallback``: other callbacks may save before that one knows of the step.
    """

    def __init__(self, folder) -> None:
        self.folder = folder

    def save(self, trainer, place: str) -> None:
        trainer.save_checkpoint(self.folder / f"{place}.ckpt")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        count = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if count == trainer.accumulate_grad_batches:
            self.save(trainer, "first-step")
        if count == 4:
            self.save(trainer, "mid-epoch")

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 0:
            self.save(trainer, "epoch-end")

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ) -> None:
        if trainer.current_epoch == 0 and batch_idx == 0 and not trainer.sanity_checking:
            self.save(trainer, "evaluating")


PLACES = ["first-step", "mid-epoch", "evaluating", "epoch-end"]


class Report(pl.Callback):
    """Leaves the numbers of each process in a folder when a fit ends."""

    def __init__(self, folder, ema: EMACallback) -> None:
        self.folder, self.ema = folder, ema

    def on_train_end(self, trainer, pl_module) -> None:
        found = {
            "numbers": numbers_of(pl_module, self.ema),
            "seen": pl_module.seen["validate"][-1],
            "average": whole(average_of(self.ema)),
            "step": self.ema.ema.step,
        }
        torch.save(found, self.folder / f"{trainer.global_rank}.pt")


def trainer_for(folder, *callbacks, **options) -> pl.Trainer:
    """Return a quiet trainer on the processor."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
        "max_epochs": 2,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def fit(folder, *callbacks, after=(), model=None, resume=None, ema=None, **options):
    """Train, with callbacks before and after the one of the averages; return what took part."""
    net = Net() if model is None else model
    ema = EMACallback(decay=0.9) if ema is None else ema
    trainer = trainer_for(folder, *callbacks, ema, *after, **options)
    trainer.fit(net, Batches(), Batches(2, first_seed=1000), ckpt_path=resume)
    return net, ema, trainer


def numbers_of(net: nn.Module, callback: EMACallback) -> list[list[float]]:
    """Return all weights and averages of a run, to compare them with those of another one."""
    ema = callback.ema
    averages = [v for i in range(len(ema.schedules)) for _, v in ema.named_averages(i)]
    assert averages
    tensors = [local_shard(value) for value in (*net.state_dict().values(), *averages)]
    return [value.tolist() for value in tensors]


class VectorNet(pl.LightningModule):
    """One vector, for tests that look at the file and not at the training."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))

    def training_step(self, batch, batch_idx):
        return self.w.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def vector_trainer(elements: int) -> tuple[pl.Trainer, EMACallback]:
    """Return a trainer that has taken a step, ready to save checkpoints, and its callback."""
    callback = EMACallback(decay=0.5)
    trainer = trainer_for(None, callback, max_steps=1, max_epochs=1)
    trainer.fit(VectorNet(elements), Batches(1))
    return trainer, callback
