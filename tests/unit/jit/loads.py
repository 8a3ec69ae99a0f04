"""Run in a process of its own: load archives with torch, and say of each what came of it.

``python loads.py FOLDER`` loads every file of the folder in the order of the names. For each it writes
a line at once: the name, and whether it was refused or has the right weights and outputs. If the
process dies, the last line names the file before the one that killed it.
"""

import sys
import warnings
from pathlib import Path

import torch


def outcome(path: Path, expected: dict[str, torch.Tensor], inputs: torch.Tensor) -> str:
    """Load one file, and compare what it holds and computes with what was saved."""
    try:
        module = torch.jit.load(path)
        output = module(inputs)
    except Exception as error:  # whatever it is, the file was not taken silently
        return f"refused {type(error).__name__}"
    found = {**module.state_dict(), "": output.detach()}
    same = found.keys() == expected.keys() and all(
        torch.equal(found[name], right) for name, right in expected.items()
    )
    return "right" if same else "WRONG"


def main(folder: str) -> None:
    """Load all files of the folder."""
    warnings.simplefilter("ignore")
    whole = torch.jit.load(Path(folder) / "whole.pt")
    inputs = torch.linspace(-1, 1, 6).reshape(2, 3)
    expected = {**whole.state_dict(), "": whole(inputs).detach()}
    for path in sorted(Path(folder).glob("case-*.pt")):
        sys.stdout.write(f"{path.name} {outcome(path, expected, inputs)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
