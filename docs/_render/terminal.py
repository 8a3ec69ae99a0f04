"""The pictures of the terminal: runs commands, and draws docs/_static/terminal-*.svg.

Each file names the digest of its text without the numbers, which depend on the installed torch.
"""

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch

import modkit
from _render.stored_results import DOCS
from modkit.files.safetensors_files import save_safetensors


WIDTH = 96
COMMANDS = {
    "inspect": "modkit inspect run/last.pt --check --limit 5",
    "verify": "modkit verify run/",
    "diff": "modkit diff run/last.pt new.pt --key model --values",
    "dry-run": "modkit average run/last.pt run/other.pt --key model --dry-run",
}


def path(name: str) -> Path:
    """Return the file of a picture."""
    return DOCS / "_static" / f"terminal-{name}.svg"


def write_files() -> None:
    """Write the files that the commands read: one is corrupt, and two are of other models."""
    torch.manual_seed(0)
    Path("run").mkdir()
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    ema = modkit.EMA(net, 0.999)
    ema.update()
    content = {"model": net.state_dict(), "ema": ema.state_dict(), "epoch": 7}
    modkit.save_checkpoint(content, "run/last.pt")
    write_renamed(net.state_dict())
    last = torch.nn.Linear(256, 100)
    net[2] = last
    modkit.save_checkpoint({"model": net.state_dict()}, "run/other.pt")
    save_safetensors(net.state_dict(), Path("run/model.safetensors"))
    weight = last.weight.detach().numpy().tobytes()
    intact = Path("run/other.pt").read_bytes()
    Path("run/step-100.pt").write_bytes(intact.replace(weight, bytes([weight[0] ^ 1]) + weight[1:]))


def write_renamed(state: dict[str, torch.Tensor]) -> None:
    """Write a state dict with a layer renamed, another shape and dtype, and a changed value."""
    state = {name.replace("2.", "head."): tensor.clone() for name, tensor in state.items()}
    state["0.weight"][3, 5] += 0.25
    state["0.bias"] = state["0.bias"].bfloat16()
    state["head.bias"] = torch.zeros(100)
    state["scale"] = torch.ones(256)
    modkit.save_checkpoint({"model": state}, "new.pt")


def record(line: str) -> Any:
    """Run a command line, and return rich's console that has recorded what it printed."""
    # Imported here, because the pages can be rendered without these libraries.
    import click.testing
    from rich.console import Console
    from rich.text import Text

    from modkit.cli import _tables
    from modkit.cli._commands import commands

    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(Text.assemble(("$ ", "bold green"), (line, "bold")))
    ours: Any = _tables
    before, ours.console = ours.console, lambda: console
    try:
        done = click.testing.CliRunner().invoke(commands, line.split()[1:])
    finally:
        ours.console = before
    console.print(Text(done.stderr.rstrip(), "red"), end="\n" if done.stderr else "")
    return console


def recorded() -> dict[str, Any]:
    """Run all commands in an empty folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            write_files()
            return {name: record(line) for name, line in COMMANDS.items()}
        finally:
            os.chdir(before)


def digest(console: Any) -> str:
    """Return a digest of the recorded text without numbers, digests and the padding of tables."""
    text = re.sub(r"[0-9a-f]{32,}", "#", console.export_text(clear=False))
    text = re.sub(r"[ ─━]+", " ", re.sub(r"\d[\d.,]*", "#", text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stale() -> list[str]:
    """Return the names of the pictures whose command prints another text."""
    texts = {
        name: path(name).read_text("utf-8") if path(name).exists() else "" for name in COMMANDS
    }
    found = recorded().items()
    return [name for name, console in found if f"text {digest(console)}" not in texts[name]]


def draw(names: Container[str]) -> None:
    """Write these pictures, without the web fonts that rich refers to."""
    for name, console in recorded().items():
        if name not in names:
            continue
        comment = f"<!-- text {digest(console)} -->\n"
        svg = console.export_svg(title="modkit", unique_id=name)
        svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
        svg = re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)
        path(name).write_text(svg.rstrip() + "\n" + comment, encoding="utf-8")
