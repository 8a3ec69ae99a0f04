"""Probes: libraries without tests in their distribution, applied to a user's modules.

Each function of a file gets ``torch.nn`` or ``modkit.nn``, builds modules on it, and returns what is
compared: tensors by their bits, modules by their text and state, exceptions by type and text.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from tests.helpers import MODKIT, TORCH, outcome


# The file of each distribution.
PROBED = {
    "torchmetrics": "with_torchmetrics",
    "kornia": "with_kornia",
    "torchvision": "with_torchvision",
    "x-transformers": "with_x_transformers",
    "captum": "with_captum",
    "safetensors": "with_safetensors",
    "beartype": "with_beartype",
    "hydra-zen": "with_hydra_zen",
    "ipython": "with_ipython",
    "jaxtyping": "with_jaxtyping",
    "jedi": "with_jedi",
    "jsonargparse": "with_jsonargparse",
    "onnxruntime": "with_onnxruntime",
    "pydantic": "with_pydantic",
    "tensorboard": "with_tensorboard",
}


def probes(distribution: str) -> dict[str, Callable[..., Any]]:
    """Return the probes of a library by their names."""
    module = importlib.import_module(f"{__name__}.{PROBED[distribution]}")
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def compare(distribution: str) -> dict[str, Any]:
    """Run the probes of a library on both sides, and return the row of the report."""
    differing, raised, names = [], [], probes(distribution)
    for name, probe in names.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, actual = (outcome(lambda i: probe(i.nn), impl) for impl in (TORCH, MODKIT))
        if expected[0] == "raised":
            raised.append(f"{name}: {expected[1:]}")
        if expected != actual:
            differing.append(name)
    return {
        "version": version(distribution).partition("+")[0],
        "probes": len(names),
        "raised": raised,
        "differing": differing,
    }
