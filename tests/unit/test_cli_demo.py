from pathlib import Path

import click.testing
import matplotlib.image
import pytest

from modkit.cli import demo
from modkit.cli._commands import commands


def run(*arguments: object) -> click.testing.Result:
    """Run the command line."""
    return click.testing.CliRunner().invoke(commands, ["demo", *map(str, arguments)])


def test_the_demo_draws_and_tells(tmp_path: Path) -> None:
    """The table has a line for the weights and each average, and the figure is an image."""
    out = tmp_path / "figure.png"
    done = run("--epochs", 2, "-o", out)
    image = matplotlib.image.imread(out)

    assert done.exit_code == 0
    assert all(name in done.output for name in (demo.RAW, *demo.AVERAGES))
    assert image.shape == (510, 1350, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_an_average_is_better_than_the_noisy_weights() -> None:
    """After a few epochs at a high rate, the power average has a lower loss than the raw weights."""
    curves = demo.train(12, 0)

    assert curves["power, sigma_rel 0.1"][-1] < curves[demo.RAW][-1] < curves[demo.RAW][0]
    assert {len(losses) for losses in curves.values()} == {12}


def test_a_seed_says_all() -> None:
    """The same seed gives the same losses."""
    assert demo.train(1, 3) == demo.train(1, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["-o", "no/where.png"], "no directory no"), (["--epochs", 0], "0 is not in the range")],
)
def test_bad_arguments_are_refused(arguments: list[object], message: str) -> None:
    """What is wrong is said."""
    done = run(*arguments)

    assert done.exit_code != 0
    assert message in done.output


def test_a_format_that_is_not_known_leaves_nothing(tmp_path: Path) -> None:
    """The name of the figure chooses its format, and an unknown one is an error."""
    done = run("--epochs", 1, "-o", tmp_path / "figure.xyz")

    assert done.exit_code == 1
    assert "xyz" in done.output
    assert list(tmp_path.iterdir()) == []
