"""Run in a process of its own: load archives, and print the outcome of each.

``python torchscript_loads.py LIBRARY FOLDER`` loads every file of the folder in the order of the names, with torch
or with modkit. For each it writes a line at once: the name, and whether it was refused or has the right
weights and outputs. If the process dies, the last line names the file before the one that killed it.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import modkit.jit


def outcome(load: Any, path: Path, expected: dict[str, torch.Tensor], inputs: torch.Tensor) -> str:
    """Load one file, and compare what it holds and computes with what was saved."""
    try:
        module = load(path)
        output = module(inputs)
    except Exception as error:  # whatever it is, the file was not taken silently
        return f"refused {type(error).__name__}"
    found = {**module.state_dict(), "": output.detach()}
    same = found.keys() == expected.keys() and all(
        torch.equal(found[name], right) for name, right in expected.items()
    )
    return "right" if same else "WRONG"


def main(library: str, folder: str) -> None:
    """Load all files of the folder."""
    warnings.simplefilter("ignore")
    load = {"torch": torch.jit.load, "modkit": modkit.jit.load}[library]
    whole = torch.jit.load(Path(folder) / "whole.pt")
    inputs = torch.linspace(-1, 1, 6).reshape(2, 3)
    expected = {**whole.state_dict(), "": whole(inputs).detach()}
    for path in sorted(Path(folder).glob("case-*.pt")):
        sys.stdout.write(f"{path.name} {outcome(load, path, expected, inputs)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
