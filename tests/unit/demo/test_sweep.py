import runpy
import sys
from pathlib import Path

import pytest
import torch


SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "decay_sweep.py"


@pytest.fixture(autouse=True)
def threads():
    """The script sets the number of threads; it is restored."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_sweep_prints_a_table_and_draws_pictures(tmp_path, monkeypatch, capsys):
    """Short runs of one task: a loss for the training weights, the default and each window."""
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["STEPS"], "digits", (40, 80))
    monkeypatch.setattr(
        sys, "argv", ["decay_sweep.py", "--task", "digits", "--seeds", "1", "--out", str(tmp_path)]
    )

    script["main"]()

    printed = capsys.readouterr().out
    assert "digits, cosine learning rate, 80 steps" in printed
    assert printed.count("training weights") == printed.count("default") == 4
    for name in "sweep.svg", "average.svg", "weights.svg":
        assert "</svg>" in (tmp_path / name).read_text(encoding="utf-8")
