"""Train a small convolutional network on handwritten digits, and average its weights.

    python examples/train_digits.py                          # on modkit
    python examples/train_digits.py --backend torch          # the same file on torch: bitwise identical
    python examples/train_digits.py --load out/checkpoint.pt # evaluate a checkpoint of either backend

The data are the 1,797 images of 8x8 pixels in scikit-learn; a CPU is enough.
A run writes ``checkpoint.pt``, ``metrics.json`` and ``curves.png`` in the output folder.
"""

import argparse
import json
import os
from pathlib import Path
from pickle import PickleError
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NoReturn

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


parser = Parser(description=(__doc__ or "").partition("\n")[0])
parser.add_argument("--backend", choices=["modkit", "torch"], default="modkit")
parser.add_argument("--epochs", type=int, default=24, help="passes over the data")
parser.add_argument("--seed", type=int, default=0, help="seed for weights, order and noise")
parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results")
parser.add_argument("--load", type=Path, metavar="CHECKPOINT", help="evaluate, do not train")
options = parser.parse_args()
if options.epochs < 1:
    parser.error(f"argument --epochs: {options.epochs} is less than 1")
if not 0 <= options.seed < 2**63:
    parser.error(f"argument --seed: {options.seed} is not between 0 and 2**63 - 1")

# The two backends differ only in these imports.
if TYPE_CHECKING or options.backend == "modkit":
    from modkit import EMA, nn
    from modkit.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
else:
    from torch import nn
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

    EMA = None


# Exceptions of loading a file that is missing, has another format or other contents.
NOT_A_CHECKPOINT = (
    OSError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    PickleError,
)

# Key of each network's results, label in tables, color in the plot.
NETWORKS = [("raw", "raw", "0.6"), ("swa", "SWA", "tab:orange"), ("ema", "EMA", "tab:blue")]
if TYPE_CHECKING or EMA is not None:
    # No second network: the averages are swapped into the model for a test.
    NETWORKS.append(("in_place", "in place", "tab:green"))


class DigitNet(nn.Module):
    """Three convolutions with batch normalization and one linear layer: 19,258 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 4 * 4, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 1, 8, 8) to the logits of the ten digits (batch, 10)."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def digits() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Return the training and the test set, with the same split in every run."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(data.target))
    return random_split(dataset, [896, 901], torch.Generator().manual_seed(0))


def build() -> dict[str, Any]:
    """Return everything that is saved: the network, its averages and the optimizer."""
    model = DigitNet()
    state: dict[str, Any] = {
        "raw": model,
        "swa": AveragedModel(model),
        "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99)),
        "optimizer": torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
        ),
    }
    if TYPE_CHECKING or EMA is not None:
        ema = EMA(model, decay=0.99, buffers="average")
        state["in_place"] = ema.attach(state["optimizer"])
    return state


def renew_statistics(loader: DataLoader[Any], model: nn.Module) -> None:
    """Recompute the batch normalization statistics of an average."""
    # Torch draws dropout masks here and modkit does not; keep the random state independent of that.
    with torch.random.fork_rng(devices=[]):
        update_bn(loader, model)


def evaluate(model: nn.Module, test_set: Subset[Any]) -> dict[str, float]:
    """Return the mean loss, the number of errors and the accuracy."""
    model.eval()
    images, labels = next(iter(DataLoader(test_set, batch_size=len(test_set))))
    with torch.no_grad():
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels).item()
    errors = int((logits.argmax(1) != labels).sum())
    return {"loss": loss, "errors": errors, "accuracy": 1 - errors / len(labels)}


def tested(state: dict[str, Any], name: str, test_set: Subset[Any]) -> dict[str, float]:
    """Return the test results of a network, or of the average swapped into it."""
    if name == "in_place":
        # A DataLoader draws a seed, and the torch backend does not run this test.
        with state[name].applied(), torch.random.fork_rng(devices=[]):
            return evaluate(state["raw"], test_set)
    return evaluate(state[name], test_set)


def train(state: dict[str, Any], train_set: Subset[Any], test_set: Subset[Any]) -> dict[str, Any]:
    """Train the network and average it, with SWA in the last third and EMA throughout.

    Returns:
        The loss of every step, and the test results of every epoch by network.
    """
    model, swa_model, ema_model = state["raw"], state["swa"], state["ema"]
    optimizer = state["optimizer"]
    swa_start = 2 * options.epochs // 3
    scheduler = CosineAnnealingLR(optimizer, T_max=options.epochs)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    loss_fn = nn.CrossEntropyLoss()
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    history: dict[str, Any] = {"losses": [], **{name: [] for name, *_ in NETWORKS}}

    with progress_bar() as progress:
        task = progress.add_task("training", total=options.epochs, loss=float("nan"))
        for epoch in range(options.epochs):
            model.train()
            for images, labels in loader:
                optimizer.zero_grad()
                noisy = images + 0.15 * torch.randn_like(images)
                loss = loss_fn(model(noisy), labels)
                loss.backward()
                optimizer.step()
                ema_model.update_parameters(model)
                history["losses"].append(loss.item())
            if epoch >= swa_start:
                swa_model.update_parameters(model)
                swa_scheduler.step()
                renew_statistics(loader, swa_model)
            else:
                scheduler.step()
            renew_statistics(loader, ema_model)
            for name, *_ in NETWORKS:
                if name != "swa" or epoch >= swa_start:
                    history[name].append(tested(state, name, test_set))
            progress.update(task, advance=1, loss=history["losses"][-1])
    return history


def save(state: dict[str, Any], path: Path) -> None:
    """Write the checkpoint atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save({name: part.state_dict() for name, part in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Build everything and load a checkpoint of either backend."""
    state = build()
    try:
        checkpoint = torch.load(path, weights_only=True)
        for name, part in state.items():
            # A checkpoint of the torch backend has only an AveragedModel; `EMA` loads its state.
            part.load_state_dict(checkpoint["ema" if name not in checkpoint else name])
    except NOT_A_CHECKPOINT as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        parser.error(f"cannot load {path}: {type(error).__name__}: {reason}")
    return state


def equal(first: Any, second: Any) -> bool:
    """Return True if two state dicts are equal, tensors element by element."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def progress_bar() -> Progress:
    """Return a progress bar over epochs that shows the loss."""
    loss = TextColumn("loss {task.fields[loss]:.3f}")
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        loss,
        TimeElapsedColumn(),
    )


def results_table(results: dict[str, dict[str, float]]) -> Table:
    """Return the test results of the networks as a table."""
    table = Table(title=f"Test set, {options.backend}", title_justify="left")
    table.add_column("weights")
    for heading in "loss", "accuracy", "errors":
        table.add_column(heading, justify="right")
    for name, label, _ in NETWORKS:
        result = results[name]
        numbers = f"{result['loss']:.4f}", f"{result['accuracy']:.2%}", f"{result['errors']}"
        table.add_row(label, *numbers)
    return table


def plot(history: dict[str, Any], path: Path) -> None:
    """Draw the training loss and the test accuracies over the epochs."""
    losses = torch.tensor(history["losses"]).view(options.epochs, -1)
    epochs = range(1, options.epochs + 1)
    swa_start = options.epochs - len(history["swa"])
    with mpl.rc_context({"axes.titlelocation": "left", "font.size": 9, "legend.frameon": False}):
        figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2)
        steps = torch.arange(1, losses.numel() + 1) / losses.shape[1]
        left.semilogy(steps, losses.flatten(), color="0.82", linewidth=0.6, label="each step")
        left.semilogy(epochs, losses.mean(1), ".-", color="0.2", label="mean of the epoch")
        left.set_title("Training loss")
        for name, label, color in NETWORKS:
            percent = [100 * result["accuracy"] for result in history[name]]
            right.plot(epochs[-len(percent) :], percent, ".-", color=color, label=label)
        right.set_title("Test accuracy (%)")
        right.set_ylim(
            min(90, *(100 * history[name][-1]["accuracy"] for name, *_ in NETWORKS)), 100
        )
        for axes in left, right:
            axes.axvspan(swa_start, options.epochs, color="tab:orange", alpha=0.08)
            axes.set(xlabel="epoch (shaded: the SWA phase)", xlim=(0, options.epochs + 0.2))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(path)


def main() -> None:
    """Train and save, or load; then evaluate and show the results."""
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        parser.error(f"cannot write to {options.out}: {error.strerror}")
    # The images are small: a second thread costs more than it saves.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(options.seed)
    console = Console()

    train_set, test_set = digits()
    if options.load:
        state = load(options.load)
        report: dict[str, Any] = {"backend": options.backend}
    else:
        state = build()
        history = train(state, train_set, test_set)
        save(state, options.out / "checkpoint.pt")
        plot(history, options.out / "curves.png")
        report = {"backend": options.backend, "history": history}
    report["test"] = {name: tested(state, name, test_set) for name, *_ in NETWORKS}
    # JSON keeps all digits of a float, so two runs can be compared exactly.
    file = options.out / ("evaluation.json" if options.load else "metrics.json")
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(results_table(report["test"]))

    if not options.load:
        restored = load(options.out / "checkpoint.pt")
        if not all(equal(state[name].state_dict(), restored[name].state_dict()) for name in state):
            parser.error("the reloaded checkpoint differs from the saved state")
        console.print("Reloaded the checkpoint: every tensor is equal.")
        if EMA is not None:
            weights = dict(state["ema"].module.named_parameters())
            averages = dict(state["in_place"].named_averages())
            if not all(torch.equal(averages[name], weights[name]) for name in weights):
                parser.error("the two exponential averages differ")
            console.print("EMA and AveragedModel are bitwise identical.")
    console.print(f"Results are in {options.out}{os.sep}")


if __name__ == "__main__":
    main()
