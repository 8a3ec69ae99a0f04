"""Save a compiled object above the limit on the size of files: ``full_disk.py LIBRARY KIND PATH``.

It prints the error. A limit stands for a full disk, which only root can make.
"""

import importlib
import resource
import signal
import sys
import warnings
from typing import Any

import torch


WEIGHTS = torch.ones(200, 200)
LIMIT = WEIGHTS.nbytes // 2


class Lists(torch.nn.Module):
    """A module with tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = [WEIGHTS]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add a tensor."""
        return x + self.tensors[0]


class ClassBased(torch.jit.ScriptModule):
    """A class of the user, with a script method."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(WEIGHTS)

    @torch.jit.script_method
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the parameter."""
        return x + self.weight


def add(x: torch.Tensor) -> torch.Tensor:
    return x + WEIGHTS


def made(jit: Any, kind: str) -> tuple[Any, dict[str, str]]:
    """Return what is saved, and its extra files."""
    layer = torch.nn.Linear(200, 200).eval()
    if kind == "extra file":
        return jit.script(torch.nn.ReLU()), {"notes.txt": "x" * WEIGHTS.nbytes}
    found = {
        "module": lambda: jit.script(layer),
        "frozen module": lambda: jit.freeze(jit.script(layer)),
        "module of torch": lambda: torch.jit.script(layer),
        "class of torch": ClassBased,
        "function": lambda: jit.trace(add, (WEIGHTS.clone(),)),
        "list": lambda: jit.script(Lists()),
    }
    return found[kind](), {}


def main() -> None:
    """Save."""
    warnings.simplefilter("ignore")
    library, kind, path = sys.argv[1:]
    jit = importlib.import_module(f"{library}.jit")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    compiled, files = made(jit, kind)
    try:
        jit.save(compiled, path, _extra_files=files)
    except OSError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()
