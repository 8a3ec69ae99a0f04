"""The device of torch_xla, on which every test of this folder runs."""

import warnings

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device; its default client is the CPU, which has memory and compiled graphs of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_xla = pytest.importorskip(
            "torch_xla", reason="needs torch_xla: nox -s xla installs it"
        )
        return torch_xla.device()
