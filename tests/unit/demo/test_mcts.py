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


def played(demo, *squares):
    """A board after these moves, and what the last of them came to."""
    board, result = demo.Board(), None
    for square in squares:
        result = board.play(square)
    return board, result


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


def test_wrong_usage():
    """A number below 1 is one line, and the status of wrong usage."""
    done = run("--games", "-1")

    assert done.returncode == 2
    assert done.stderr == "efficientzero_mcts.py: error: argument --games: -1 is less than 1\n"


def test_search_finds_the_better_move(demo):
    """A search follows the values of its model, which are those of the player to move."""

    class Known:
        """A model in which square 7 wins at once; its latent state is the prefix and the depth."""

        def initial_inference(self, observations):
            return self.answer(torch.zeros(1, 2), (torch.zeros(1, 1, 1),) * 2)

        def recurrent_inference(self, latent, hidden, actions):
            prefix, depth = latent.unbind(1)
            wins = (actions == 7) & (depth == 0)
            return self.answer(torch.stack([prefix + wins, depth + 1], 1), hidden)

        def answer(self, latent, hidden):
            even = torch.tensor([[0.0, 100.0, 0.0]])
            prefix = latent[:, 0]
            sure = torch.stack([0 * prefix, 100 * (1 - prefix), 100 * prefix], 1)
            return models.EZNetworkOutput(even, sure, torch.zeros(1, 9), latent, hidden)

    (root,) = demo.search(Known(), [demo.Board()], 40)

    assert demo.most_visited(root) == 7
    assert root.children[7].reward == pytest.approx(1)
    assert root.total / root.visits > 0.4


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
