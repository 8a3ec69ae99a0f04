"""Public training scripts on torch and on modkit, compared bit by bit.

python -m tests.suites.training_scripts FOLDER                # all of them
python -m tests.suites.training_scripts FOLDER --only nanoGPT # some; the others keep their rows

FOLDER has a checkout of each repository at OWNER/NAME; a file ``.commit`` in it names the commit,
unless it is a git repository. Nothing is written into a checkout. The results are
docs/_render/results/training_scripts.json and a table of the documentation.
"""

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from modkit.compat.swap import swap_source
from tests.suites import script_data
from tests.suites.runs import ROOT


RESULTS = ROOT / "docs" / "_render" / "results" / "training_scripts.json"
PROCESS = Path(__file__).with_name("script_process.py")
COMPARED = ("losses", "printed losses", "steps", "modules", "optimizers", "random states")
# A resumed run ends with these of the uninterrupted run.
RESUMED = ("averages", "modules", "optimizers", "random states")
LOSS = re.compile(r"loss\w*[^\w\n]{1,4}(-?\d[\d.]*(?:e[-+]?\d+)?)", re.IGNORECASE)


class Edit(NamedTuple):
    """Lines of the documentation, put before, after or instead of a line, without its indentation."""

    anchor: str
    lines: str
    where: str = "after"
    indent: int | None = None


class Script(NamedTuple):
    """One public script, with arguments that make it small and what of its repository the run needs.

    ``data`` names a function of ``script_data``; ``ema`` has what adds an average, saves it in the middle of
    the run and resumes with ``resume``; ``patches`` are lines without which it needs another machine.
    """

    name: str
    kind: str
    repository: str
    path: str
    arguments: tuple[str, ...] = ()
    data: str = ""
    folders: tuple[str, ...] = (".",)
    cwd: str = "."
    ema: tuple[Edit, ...] = ()
    resume: tuple[str, ...] = ()
    patches: tuple[Edit, ...] = ()


# The lines of the tutorial (docs/tutorial.md), steps 2, 4 and 5. The loop is the next line.
AVERAGE = """\
import modkit, os
ema = modkit.EMACallback(model, optimizer, schedule=modkit.schedules.CountWarmup(0.95))
parts, done = {"model": model, "optimizer": optimizer, "ema": ema}, 0
if os.path.exists("last.pt"):
    checkpoint = modkit.load_checkpoint("last.pt")
    for name, part in parts.items():
        part.load_state_dict(checkpoint[name])
    torch.set_rng_state(checkpoint["rng"])
    done = checkpoint["epoch"]
"""
SAVE = """\
if epoch == HALF:
    state = {name: part.state_dict() for name, part in parts.items()}
    modkit.save_checkpoint({**state, "epoch": epoch, "rng": torch.get_rng_state()}, "last.pt")
"""


def loop(
    line: str, end: str, half: int, indent: int | None = None, further: str = ""
) -> tuple[Edit, ...]:
    """Return the edits of a loop over epochs, by its first and last line, that saves after ``half``.

    ``indent`` is that of its body, if it is not that of the last line; ``further`` are parts of the state.
    """
    return (
        Edit(line, AVERAGE.replace('"ema": ema', f'"ema": ema{further}'), "before"),
        Edit(line, "for epoch in range(done + 1, args.epochs + 1):", "instead"),
        Edit(end, SAVE.replace("HALF", str(half)), indent=indent),
    )


_NANOGPT = (
    *("--device=cpu", "--compile=False", "--dtype=float32", "--dataset=shakespeare_char"),
    *("--eval_interval=10", "--eval_iters=2", "--gradient_accumulation_steps=2", "--batch_size=4"),
    *("--block_size=32", "--n_layer=2", "--n_head=2", "--n_embd=32", "--dropout=0.1"),
    *("--max_iters=15", "--warmup_iters=2", "--lr_decay_iters=15"),
)
_GAN = 'trainer = Trainer(accelerator="gpu", devices=1)'
_SMALL_GAN = """\
options = {"max_epochs": 2, "limit_train_batches": 6, "limit_val_batches": 0}
trainer = Trainer(accelerator="cpu", devices=1, enable_progress_bar=False, **options)
"""
# Lightning restores no random states. The loader draws its order after `on_fit_start`.
_LIGHTNING = """\
from pathlib import Path
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from modkit.integrations.lightning import EMACallback
class RandomState(Callback):
    state = None
    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["random"] = torch.get_rng_state()
    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.state = checkpoint["random"]
    def on_fit_start(self, trainer, module):
        if self.state is not None:
            torch.set_rng_state(self.state)
keep = ModelCheckpoint("kept", "{epoch}", save_top_k=-1)
options["callbacks"] = [EMACallback(decay=0.9), RandomState(), keep]
"""
_RESUME = """\
first = "kept/epoch=0.ckpt"
trainer.fit(model, dm, ckpt_path=first if Path(first).exists() else None)
"""
SCRIPTS = (
    Script(
        "nanoGPT",
        "language model",
        "karpathy/nanoGPT",
        "train.py",
        _NANOGPT,
        data="tokens",
        resume=("--init_from=resume",),
        ema=(
            Edit(
                "if init_from == 'resume':",
                "import modkit\n"
                "schedule = modkit.schedules.CountWarmup(0.95)\n"
                "ema = modkit.EMACallback(model, optimizer, schedule=schedule)\n",
                "before",
            ),
            Edit(
                "optimizer.load_state_dict(checkpoint['optimizer'])",
                "ema.load_state_dict(checkpoint['ema'])\nresumed = checkpoint\n",
            ),
            Edit(
                "X, Y = get_batch('train') # fetch the very first batch",
                "if init_from == 'resume':\n"
                "    X, Y = resumed['batch']\n"
                "    torch.set_rng_state(resumed['rng'])\n",
            ),
            Edit("losses = estimate_loss()", "rng = torch.get_rng_state()\n", "before"),
            Edit("'config': config,", "'ema': ema.state_dict(), 'rng': rng, 'batch': (X, Y),\n"),
        ),
    ),
    Script(
        "mnist",
        "image classifier",
        "pytorch/examples",
        "mnist/main.py",
        ("--epochs", "4", "--log-interval", "1"),
        data="digits",
        folders=("mnist",),
        cwd="mnist",
        ema=loop(
            "for epoch in range(1, args.epochs + 1):",
            "scheduler.step()",
            2,
            further=', "scheduler": scheduler',
        ),
    ),
    Script(
        "Lightning GAN",
        "Lightning",
        "Lightning-AI/pytorch-lightning",
        "examples/pytorch/domain_templates/generative_adversarial_net.py",
        data="all_digits",
        folders=("examples/pytorch/domain_templates",),
        patches=(Edit(_GAN, _SMALL_GAN, "instead"),),
        ema=(
            Edit(_SMALL_GAN.splitlines()[-1], _LIGHTNING, "before"),
            Edit("trainer.fit(model, dm)", _RESUME, "instead"),
        ),
    ),
)


def work_tree(script: Script, checkout: Path, folder: Path, edits: Iterable[Edit]) -> Path:
    """Copy what the script needs of a checkout, edit it and write its data; return the copy."""
    shutil.rmtree(folder, ignore_errors=True)
    tree = folder / "tree"
    unused = shutil.ignore_patterns(".git", "*.ipynb")
    for part in script.folders:
        shutil.copytree(checkout / part, tree / part, ignore=unused, dirs_exist_ok=True)
    for edit in edits:
        file = tree / script.path
        file.write_text(edited(file.read_text(encoding="utf-8"), edit), encoding="utf-8")
    if script.data:
        getattr(script_data, script.data)(tree / script.cwd)
    return tree


def edited(source: str, edit: Edit) -> str:
    """Return a source with the lines of an edit, at the only line that is the anchor."""
    lines = source.splitlines()
    (at,) = [index for index, line in enumerate(lines) if line.strip() == edit.anchor]
    of_anchor = len(lines[at]) - len(lines[at].lstrip())
    outer = " " * (of_anchor if edit.indent is None else edit.indent)
    added = [outer + line for line in edit.lines.splitlines()]
    start, end = {"before": (at, at), "after": (at + 1, at + 1), "instead": (at, at + 1)}[
        edit.where
    ]
    lines[start:end] = added
    return "\n".join(lines) + "\n"


def run(
    script: Script, tree: Path, *, swap: bool, arguments: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run a script in a process of its own, and return its record."""
    record = tree.parent / "record.json"
    options = {
        "script": str(tree / script.path),
        "arguments": [*script.arguments, *arguments],
        "swap": swap,
        "tree": str(tree),
        "record": str(record),
    }
    (tree.parent / "options.json").write_text(json.dumps(options), encoding="utf-8")
    paths = (tree, ROOT, ROOT / "src")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    # By its path: with -m, a folder of the checkout named tests would come first.
    command = [sys.executable, str(PROCESS), str(tree.parent / "options.json")]
    done = subprocess.run(
        command,
        check=False,
        cwd=tree / script.cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    (tree.parent / "output.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{script.name} failed: {done.stderr[-3000:]}")
    return {
        **json.loads(record.read_text(encoding="utf-8")),
        "printed losses": LOSS.findall(done.stdout),
    }


def changed_lines(tree: Path, paths: Iterable[str]) -> list[str]:
    """Return the lines that differ between torch and modkit, each once."""
    lines: dict[str, None] = {}
    for path in paths:
        source = (tree / path).read_text(encoding="utf-8")
        pairs = zip(source.splitlines(), swap_source(source).splitlines(), strict=True)
        # A line that still begins with the whole of the old one only has an import after it.
        lines |= {old.strip(): None for old, new in pairs if old not in new}
    return list(lines)


def compare(script: Script, checkout: Path, folder: Path) -> dict[str, Any]:
    """Run a script on both sides, and with an average where it has one; return the row of the table."""
    started = time.perf_counter()
    records = {}
    for side in ("torch", "modkit"):
        tree = work_tree(script, checkout, folder / side, script.patches)
        records[side] = run(script, tree, swap=side == "modkit")
    theirs, ours = (records[side] for side in ("torch", "modkit"))
    if not theirs["losses"] or not ours["of modkit"]:
        raise RuntimeError(f"{script.name} compares nothing: {ours['of modkit']} modules of modkit")

    swapped = [path for path in ours["swapped files"] if path != script.path]
    row = {
        "kind": script.kind,
        "repository": script.repository,
        "commit": commit(checkout),
        "script": script.path,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "lines": changed_lines(tree, [script.path]),
        "files": len(swapped),
        "lines of files": changed_lines(tree, swapped),
        "steps": theirs["steps"],
        "losses": len(theirs["losses"]) + len(theirs["printed losses"]),
        "modules of modkit": ours["of modkit"],
        "differing": [name for name in COMPARED if theirs[name] != ours[name]],
    }
    if script.ema:
        row["average"] = average(script, checkout, folder / "average")
    row["seconds"] = round(time.perf_counter() - started)
    return row


def average(script: Script, checkout: Path, folder: Path) -> dict[str, Any]:
    """Run a script with an average, and resume it from its middle; return what differs between the ends."""
    tree = work_tree(script, checkout, folder, [*script.patches, *script.ema])
    whole = run(script, tree, swap=True)
    resumed = run(script, tree, swap=True, arguments=script.resume)
    steps, again = len(whole["losses"]), len(resumed["losses"])
    if not whole["averages"] or not 0 < again < steps:
        raise RuntimeError(f"{script.name} did not resume: {again} of {steps} losses")
    return {
        "lines": sum(len(edit.lines.splitlines()) for edit in script.ema),
        "losses": steps,
        "of them resumed": again,
        "differing": [name for name in RESUMED if whole[name] != resumed[name]],
    }


def commit(checkout: Path) -> str:
    """Return the commit of a checkout."""
    named = checkout / ".commit"
    if named.exists():
        return named.read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.check_output(command, text=True).strip()


def main() -> int:
    """Run the chosen scripts; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of scripts")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "training_scripts")
    options = parser.parse_args()
    stored = (
        json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"scripts": {}}
    )
    # Results of scripts that are no longer in the table stay.
    rows = stored["scripts"]

    for script in SCRIPTS:
        if options.only and script.name not in options.only:
            continue
        folder = (options.folder / script.name.replace(" ", "_")).resolve()
        rows[script.name] = compare(script, options.checkouts / script.repository, folder)
        sys.stderr.write(f"{script.name}: {json.dumps(rows[script.name], indent=1)}\n")
        write(rows)
    averages = [row["average"] for row in rows.values() if "average" in row]
    return any(row["differing"] for row in [*rows.values(), *averages])


def write(rows: dict[str, Any]) -> None:
    """Store the rows, and write the page."""
    content = {"torch": version("torch").partition("+")[0], "scripts": rows}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    runpy.run_path(str(ROOT / "docs" / "render.py"))["write_pages"]()


if __name__ == "__main__":
    sys.exit(main())
