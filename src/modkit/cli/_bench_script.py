"""Compiled modules for the rows about TorchScript, made by torch.jit or by modkit.jit."""

import importlib
import warnings
from types import ModuleType
from typing import Any

import torch


def _jit(nn: ModuleType) -> Any:
    return importlib.import_module(f"{nn.__name__.partition('.')[0]}.jit")


def compiled(nn: ModuleType) -> dict[str, Any]:
    """Compile the module whose forward does nothing, so that only the call itself is timed."""

    class Empty(nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with warnings.catch_warnings():
        # What is timed is the call; both libraries say that TorchScript has had its time.
        warnings.simplefilter("ignore")
        return {"m": _warm(_jit(nn).script(Empty())), "x": torch.zeros(1)}


def class_based(nn: ModuleType) -> dict[str, Any]:
    """Make the same as a class with a script method."""
    jit = _jit(nn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        class Empty(jit.ScriptModule):  # type: ignore[name-defined, misc]
            @jit.script_method  # type: ignore[untyped-decorator]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        return {"m": _warm(Empty()), "x": torch.zeros(1)}


def _warm(module: Any) -> Any:
    """Call often enough that the executor is done with optimizing."""
    for _ in range(5):
        module(torch.zeros(1))
    return module
