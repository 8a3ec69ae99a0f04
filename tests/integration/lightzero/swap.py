"""A plugin of pytest: LightZero and DI-engine are imported with modkit.nn in the place of torch.nn.

    python -m pytest -p tests.integration.lightzero.swap .../test_efficientzero_model.py

What is imported after them, the tests included, sees torch.nn again.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch

import modkit.nn
from tests.integration.lightzero.networks import lightzero_networks


@contextlib.contextmanager
def swapped() -> Iterator[None]:
    """Let ``torch.nn`` be ``modkit.nn`` for the length of the block."""
    original = torch.nn
    torch.nn = sys.modules["torch.nn"] = modkit.nn
    try:
        yield
    finally:
        torch.nn = sys.modules["torch.nn"] = original


if any(name.split(".")[0] in {"ding", "lzero"} for name in sys.modules):
    raise RuntimeError("LightZero was imported before torch.nn was swapped")
with swapped():
    NETWORKS = lightzero_networks()


def pytest_runtest_call() -> None:
    """Make sure of the swap before each test: no part of a network may be torch's own."""
    network = NETWORKS.DynamicsNetwork((1, 3, 3))
    strangers = {type(part) for part in network.modules() if not isinstance(part, modkit.nn.Module)}
    if strangers:
        raise RuntimeError(f"these classes are not modkit's: {strangers}")
