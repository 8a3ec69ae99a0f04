"""The averages of five training repositories, replaced by `modkit.EMA` in the middle of a run.

python -m tests.suites.own_averages FOLDER

FOLDER has a checkout of each repository at OWNER/NAME. Their code for averages runs next to
`modkit.EMA`, which takes the run over from their state; both are compared after each further step.
The results are docs/_render/results/own_averages.json and a table of the documentation.
"""

import ast
import math
import sys
import typing
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import modkit
from modkit import schedules
from tests.suites.runs import ROOT, store


RESULTS = ROOT / "docs" / "_render" / "results" / "own_averages.json"
STEPS = 60
TAKEN_OVER = 30

Names = dict[str, Any]


class Run(NamedTuple):
    """A training run with averages of its own, and the `EMA` that takes over in the middle.

    ``update`` gets the number of a step, from 1; ``load`` gives the `EMA` the state of theirs.
    """

    model: nn.Module
    inputs: Tensor
    update: Callable[[int], object]
    averages: Callable[[], dict[str, Tensor]]
    ema: modkit.EMA
    load: Callable[[modkit.EMA, int], object]


def definitions(file: Path, *wanted: str, **names: Any) -> Names:
    """Run functions and classes of a file without the rest of it, whose imports are not installed."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = [node for node in tree.body if getattr(node, "name", None) in wanted]
    space = {
        **vars(typing),
        "torch": torch,
        "nn": nn,
        "th": torch,
        "math": math,
        "deepcopy": deepcopy,
        **names,
    }
    exec(compile(ast.Module(body, []), str(file), "exec"), space)
    return space


def floats(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the floating-point tensors."""
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def detection(folder: Path) -> Run:
    """YOLOv5: a decay that ramps up, over parameters and statistics of batch normalization."""
    their = definitions(
        folder / "ultralytics/yolov5/utils/torch_utils.py",
        *("ModelEMA", "copy_attr"),
        de_parallel=lambda model: model,
    )
    blocks = (
        nn.Sequential(nn.Conv2d(i, o, 3, 2), nn.BatchNorm2d(o), nn.SiLU())
        for i, o in ((3, 8), (8, 16))
    )
    model = nn.Sequential(*blocks, nn.Conv2d(16, 18, 1))
    average = their["ModelEMA"](model, tau=20)
    # Their first step is step 1, and n counts those since the average was a copy.
    ramp = schedules_from(average.decay)
    return Run(
        model,
        torch.randn(4, 3, 16, 16),
        lambda _: average.update(model),
        lambda: floats(average.ema.state_dict()),
        modkit.EMA(model, schedule=ramp, buffers="average"),
        lambda ema, step: ema.load_state_dict(average.ema.state_dict(), step=step),
    )


def schedules_from(decay: Callable[[int], float]) -> Callable[[int], float]:
    """Return the decay of a step that is counted from 1 as a function of steps since the copy."""
    return lambda n: decay(n + 1)


def diffusion(folder: Path) -> Run:
    """Latent diffusion: `LitEma`, whose decay ramps up with the number of updates."""
    their = definitions(folder / "CompVis/latent-diffusion/ldm/modules/ema.py", "LitEma")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 3))
    average = their["LitEma"](model)
    ramp = schedules_from(lambda step: min(0.9999, (1 + step) / (10 + step)))

    def averages() -> dict[str, Tensor]:
        stored = dict(average.named_buffers())
        return {name: stored[key] for name, key in average.m_name2s_name.items()}

    return Run(
        model,
        torch.randn(4, 3, 16, 16),
        lambda _: average(model),
        averages,
        modkit.EMA(model, schedule=ramp),
        lambda ema, step: ema.load_state_dict(averages(), step=step),
    )


def speech(folder: Path) -> Run:
    """Icefall: a running mean of all batches, which its recipes take differences of."""
    their = definitions(
        folder / "k2-fsa/icefall/icefall/checkpoint.py",
        *("update_averaged_model", "average_state_dict"),
        Tensor=Tensor,
        DDP=nn.parallel.DistributedDataParallel,
    )

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(20, 16, batch_first=True)
            self.head = nn.Linear(16, 30)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0])
            return out

    model = Encoder()
    average = deepcopy(model).double()

    def update(step: int) -> None:
        params = SimpleNamespace(average_period=1, batch_idx_train=step)
        their["update_averaged_model"](params, model, average)

    return Run(
        model,
        torch.randn(4, 12, 20),
        update,
        lambda: dict(average.state_dict()),
        modkit.EMA(model, schedule=schedules.Equal(), precision="fp64"),
        lambda ema, step: ema.load_state_dict(average.state_dict(), step=step),
    )


def reinforcement(folder: Path) -> Run:
    """Stable-Baselines3: the target network of a critic."""
    their = definitions(
        folder / "DLR-RM/stable-baselines3/stable_baselines3/common/utils.py",
        "polyak_update",
    )
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
    target = deepcopy(model)
    return Run(
        model,
        torch.randn(32, 6),
        lambda _: their["polyak_update"](model.parameters(), target.parameters(), 0.005),
        lambda: dict(target.state_dict()),
        modkit.EMA(model, 0.995),
        lambda ema, step: ema.load_state_dict(target.state_dict(), step=step),
    )


def self_supervised(folder: Path) -> Run:
    """DINO: a teacher whose momentum grows to 1 along a cosine, in the loop of its script."""
    scheduler = definitions(folder / "facebookresearch/dino/utils.py", "cosine_scheduler", np=np)[
        "cosine_scheduler"
    ]
    momenta = scheduler(0.996, 1, 2, STEPS)
    script = ast.parse((folder / "facebookresearch/dino/main_dino.py").read_text(encoding="utf-8"))
    loops = [
        node
        for node in ast.walk(script)
        if isinstance(node, ast.For) and "param_k" in ast.unparse(node.target)
    ]
    code = compile(ast.Module([loops[0]], []), "main_dino.py", "exec")
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    student = nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2))
    teacher = deepcopy(student)
    space = {"student": SimpleNamespace(module=student), "teacher_without_ddp": teacher}

    def update(step: int) -> None:
        with torch.no_grad():
            exec(code, {**space, "m": momenta[step - 1]})

    return Run(
        student,
        torch.randn(4, 5, 8),
        update,
        lambda: dict(teacher.state_dict()),
        modkit.EMA(student, schedule=schedules_from(lambda step: float(momenta[step - 1]))),
        lambda ema, step: ema.load_state_dict(teacher.state_dict(), step=step),
    )


RUNS: dict[str, Callable[[Path], Run]] = {
    "ultralytics/yolov5": detection,
    "CompVis/latent-diffusion": diffusion,
    "k2-fsa/icefall": speech,
    "DLR-RM/stable-baselines3": reinforcement,
    "facebookresearch/dino": self_supervised,
}


def compare(run: Run) -> dict[str, Any]:
    """Train, take over in the middle, and return the largest difference after any further step."""
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    largest, tensors = 0.0, 0
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        (run.model(run.inputs) - 1).square().mean().backward()
        optimizer.step()
        run.update(step)
        if step > TAKEN_OVER:
            run.ema.update()
            ours = dict(run.ema.named_averages())
            theirs = run.averages()
            tensors = len(theirs)
            for name, value in theirs.items():
                difference = (ours[name].double() - value.double()).abs().max() / value.abs().max()
                largest = max(largest, float(difference))
        if step == TAKEN_OVER:
            run.load(run.ema, step)
    return {"tensors": tensors, "steps": STEPS - TAKEN_OVER, "difference": largest}


def main() -> None:
    """Compare all, and write the results."""
    folder = Path(sys.argv[1])
    rows: dict[str, Any] = {}
    for name, make in RUNS.items():
        torch.manual_seed(0)
        rows[name] = {"what": (make.__doc__ or "").partition(": ")[2], **compare(make(folder))}
        sys.stderr.write(f"{name}: {rows[name]}\n")
    store(RESULTS, rows)


if __name__ == "__main__":
    main()
