"""Output of commands that pages show, and that takes too long to be a picture of the terminal."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


PAGE = Path(__file__).resolve().parents[3] / "docs" / "prove_it.md"
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.body(x))
"""


def rows(text):
    """Return the cells of each row of a table that rich has drawn, without its heading."""
    return [tuple(map(str.strip, row)) for row in re.findall(r"│([^│]+)│([^│]+)│", text)]


@pytest.mark.slow
def test_the_checks_of_a_model(tmp_path):
    """The page shows the checks of `modkit compat train.py:Net`, in order and with their results."""
    pytest.importorskip("rich")
    (tmp_path / "train.py").write_text(NET)
    command = [sys.executable, "-m", "modkit", "compat", "train.py:Net"]
    shown = PAGE.read_text("utf-8").partition("$ modkit compat train.py:Net")[2].partition("```")[0]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert len(rows(shown)) > 10
    assert rows(done.stdout) == rows(shown)
