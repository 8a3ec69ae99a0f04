import random
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import modkit
from modkit import models
from tests.processes import python


SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "efficientzero_mcts.py"


@pytest.fixture(scope="module")
def demo():
    """The functions and classes of the example."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture
def model(demo):
    """A model of the example's size, as it starts out."""
    random.seed(0)
    return models.EfficientZeroModel(**demo.GAME, **demo.SMALL).eval()


def run(*arguments):
    """Run the example as users do, in a process of its own."""
    return python(SCRIPT, *arguments)


def test_quick_run():
    """The quick mode trains, plays and times, and shows both tables."""
    done = run("--quick", "--rounds", "1", "--games", "4", "--simulations", "3")

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Against random moves" in done.stdout
    assert re.search(r"trained\W+4 ", done.stdout)
    assert 2 == len(re.findall(r"│ eager\b", done.stdout))


def test_fast_inference_searches_alike(demo, model):
    """Inside the scope of self-play, a search visits what it visits outside, bit by bit."""
    ema = modkit.EMA(model, decay=0.9)
    ema.update()
    with torch.inference_mode():
        (plain,) = demo.search(model, [demo.Board()], 20)
    with demo.playing(model, ema):
        (fast,) = demo.search(model, [demo.Board()], 20)

    assert demo.visits(plain) == demo.visits(fast)
    assert plain.total == fast.total
