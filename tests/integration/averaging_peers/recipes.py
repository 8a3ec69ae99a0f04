"""Pairs of code for the same average, as docs/migration.md has them, and a loop for them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn


PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
_LOOP = """
{imports}
{name} = {construct}
{start}
for step in range(1, steps + 1):
    train_step()
    {update}
{evaluate}
"""
_OURS = {"name": "ema", "evaluate": "with ema.applied():\n    validate(model)"}


def _pair(imports, theirs, update, evaluate, ours, *, start=False, every="", after=""):
    """Return both sides of a row: constructors, in the loop that all rows share."""
    there = {"imports": imports, "name": "theirs", "construct": theirs, "evaluate": evaluate}
    here = {**_OURS, "imports": imports, "construct": ours, "start": "ema.update()" * start}
    return {
        "theirs": _LOOP.format(**there, start="", update=f"{every}{update}"),
        "ours": _LOOP.format(**here, update=f"{every}ema.update(){after}"),
    }


def _loops():
    """Return the pairs that run in a loop."""
    timm = {"imports": "from timm.utils import ModelEmaV3", "evaluate": "validate(theirs.module)"}
    torch_ema = {
        "imports": "from torch_ema import ExponentialMovingAverage",
        "update": "theirs.update()",
        "evaluate": "with theirs.average_parameters():\n    validate(model)",
        "start": True,
    }
    return {
        "torch-ema": _pair(
            "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn",
            "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))",
            "theirs.update_parameters(model)",
            "validate(theirs.module)",
            "modkit.EMA(model, 0.999)",
        ),
        "torch-swa": _pair(
            "from torch.optim.swa_utils import AveragedModel",
            "AveragedModel(model)",
            "theirs.update_parameters(model)",
            "validate(theirs.module)",
            "modkit.EMA(model, schedule=schedules.Equal())",
            every="if step % 7 == 0: ",
        ),
        "timm": _pair(
            theirs="ModelEmaV3(model, decay=0.999)",
            update="theirs.update(model, step=step)",
            ours='modkit.EMA(model, 0.999, buffers="average")',
            **timm,
        ),
        "timm-warmup": _pair(
            theirs="ModelEmaV3(model, decay=0.999, use_warmup=True, warmup_gamma=1.0, "
            "warmup_power=2 / 3)",
            update="theirs.update(model, step=step)",
            ours="modkit.EMA(model, schedule=schedules.InverseGamma(inv_gamma=1.0, power=2 / 3, "
            'decay=0.999), buffers="average")',
            **timm,
        ),
        "timm-without-step": _pair(
            theirs="ModelEmaV3(model, decay=0.999)",
            update="theirs.update(model)",
            ours='modkit.EMA(model, 0.999, buffers="average")',
            start=True,
            **timm,
        ),
        "diffusers": _pair(
            "from diffusers.training_utils import EMAModel",
            "EMAModel(model.parameters(), decay=0.999)",
            "theirs.step(model.parameters())",
            "theirs.store(model.parameters())\ntheirs.copy_to(model.parameters())\n"
            "validate(model)\ntheirs.restore(model.parameters())",
            "modkit.EMA(model, schedule=schedules.CountWarmup(0.999))",
        ),
        "diffusers-warmup": _pair(
            "from diffusers.training_utils import EMAModel",
            "EMAModel(model.parameters(), decay=0.999, update_after_step=5, "
            "use_ema_warmup=True, inv_gamma=2.0, power=0.75)",
            "theirs.step(model.parameters())",
            "theirs.copy_to(model.parameters())\nvalidate(model)",
            "modkit.EMA(model, schedule=schedules.InverseGamma(inv_gamma=2.0, power=0.75, "
            "decay=0.999), update_after_step=5)",
        ),
        "ema-pytorch": _pair(
            "from ema_pytorch import EMA\n"
            "warmup = schedules.PerUpdate(schedules.InverseGamma(power=2 / 3, decay=0.9999))",
            "EMA(model, beta=0.9999, update_after_step=100, update_every=10)",
            "theirs.update()",
            "validate(theirs.ema_model)",
            "modkit.EMA(model, schedule=warmup, update_after_step=100, update_every=10, "
            'buffers="average")',
        ),
        "ema-pytorch-every-step": _pair(
            "from ema_pytorch import EMA",
            "EMA(model, beta=0.9999, update_after_step=100, update_every=1)",
            "theirs.update()",
            "validate(theirs.ema_model)",
            "modkit.EMA(model, schedule=schedules.InverseGamma(power=2 / 3, decay=0.9999), "
            'update_after_step=100, buffers="average")',
        ),
        "ema-pytorch-switch": _pair(
            "from ema_pytorch import EMA",
            "EMA(model, beta=0.9999, update_after_step=100, update_every=1, "
            "update_model_with_ema_every=10)",
            "theirs.update()",
            "validate(theirs.ema_model)",
            "modkit.EMA(model, schedule=schedules.InverseGamma(power=2 / 3, decay=0.9999), "
            'update_after_step=100, buffers="average")',
            after="\n    if ema.step % 10 == 1: ema.copy_to()",
        ),
        "torch_ema": _pair(
            theirs="ExponentialMovingAverage(model.parameters(), decay=0.999)",
            ours="modkit.EMA(model, schedule=schedules.CountWarmup(0.999))",
            **torch_ema,
        ),
        "torch_ema-constant": _pair(
            theirs="ExponentialMovingAverage(model.parameters(), decay=0.999, "
            "use_num_updates=False)",
            ours="modkit.EMA(model, 0.999)",
            **torch_ema,
        ),
    }


_FIT = "pl.Trainer(callbacks=[callback], **options).fit(module, data)\nvalidate(module)"
_TRAINERS = {
    "lightning": {
        "theirs": f"""
from lightning.pytorch.callbacks import EMAWeightAveraging
callback = EMAWeightAveraging(decay=0.999, update_starting_at_step=3)
{_FIT}
""",
        "ours": f"""
from modkit.integrations.lightning import EMACallback
callback = EMACallback(0.999, update_after_step=3, buffers="average", swap_to_average_at_end=True)
{_FIT}
""",
    },
    "lightning-every-10-steps": {
        "theirs": f"""
from lightning.pytorch.callbacks import EMAWeightAveraging
callback = EMAWeightAveraging(decay=0.99, update_every_n_steps=10, update_starting_at_step=100)
{_FIT}
""",
        "ours": f"""
from modkit.integrations.lightning import EMACallback
callback = EMACallback(schedule=schedules.PerUpdate(0.99), \
update_every=10, update_after_step=100, buffers="average", swap_to_average_at_end=True)
{_FIT}
""",
    },
}
LIGHTNING_SETUP = """
import lightning.pytorch as pl


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


module = Net()
data = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8)
options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
options |= {"enable_progress_bar": False, "enable_model_summary": False, "max_steps": steps}
"""


def recipes():
    """Return the code of each pair, as `{name: {"theirs": code, "ours": code}}`."""
    return _loops() | _TRAINERS


def constructors():
    """Return the constructors of all pairs, each as it stands on the page."""
    code = "\n".join(side for pair in recipes().values() for side in pair.values())
    return sorted({*re.findall(r"^(?:theirs|ema|callback|warmup) = (.*\))$", code, re.MULTILINE)})


def network():
    """Return a small network with buffers of both kinds."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@dataclass
class Run:
    """The names that a block sees: a model that takes a random walk, and a `validate` that looks at it.

    Two runs of the same seed walk the same way.
    """

    steps: int
    seen: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(0)
        self.model = network()
        self._noise = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def train_step(self):
        """Move every parameter and running statistic by a random step."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=self._noise), alpha=0.01)
            else:
                tensor.add_(1)

    def validate(self, model):
        """Keep a copy of the floating-point tensors that the evaluation sees."""
        state = model.state_dict()
        self.seen.append(
            {name: value.clone() for name, value in state.items() if value.is_floating_point()}
        )

    def names(self):
        """Return the names that the page's setup gives to the blocks."""
        return {
            "model": self.model,
            "train_step": self.train_step,
            "validate": self.validate,
            "steps": self.steps,
        }
