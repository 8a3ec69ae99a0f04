from itertools import pairwise
from pathlib import Path

import click.testing
import matplotlib.image
import pytest
import torch

import modkit
from modkit import schedules
from modkit.averaging import _plots
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


def test_the_plot_of_an_average_shows_its_profiles() -> None:
    """Each average has a line, whose heights are its weights relative to the plain mean."""
    model = torch.nn.Linear(1, 1)
    ema = modkit.EMA(model, schedule=[schedules.Constant(0.5), schedules.Equal()])
    for _ in range(4):
        ema.update()
    (axes,) = ema.plot().axes
    constant, equal = axes.lines

    assert [line.get_label() for line in axes.lines] == ["Constant(decay=0.5)", "Equal()"]
    assert constant.get_ydata().tolist() == [0.5, 0.5, 1.0, 2.0]
    assert equal.get_ydata().tolist() == [1.0, 1.0, 1.0, 1.0]
    assert constant.get_xdata().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_long_run_is_drawn_with_a_thousand_points() -> None:
    """However many steps there are, the line stays short and the area below it is that of the mean."""
    steps, weights = _plots.points(schedules.Power(sigma_rel=0.1), 1_000_000, 10)
    widths = [end - start for start, end in pairwise([-10, *steps])]

    assert 1000 <= len(steps) <= 2000
    assert steps[-1] == 1_000_000
    area = sum(weight * width for weight, width in zip(weights, widths, strict=True))
    assert area == pytest.approx(sum(widths))


def test_a_number_of_steps_is_needed() -> None:
    """There is nothing to draw for less than one step."""
    with pytest.raises(ValueError, match="n must be 1 or more, got 0"):
        modkit.EMA(torch.nn.Linear(1, 1)).plot(0)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no matplotlib is told what to install."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"modkit\[plot\]"):
        modkit.EMA(torch.nn.Linear(1, 1)).plot()


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "schedule", [schedules.Constant(0.999), schedules.Window(50), schedules.BEMA()], ids=repr
)
def test_a_long_run_is_drawn_in_fewer_points(schedule: schedules.Schedule, every: int) -> None:
    """Each of the points is the mean of the updates up to it, and none is lost or drawn twice."""
    n = 10_002 * every
    weights = torch.tensor(schedules.profile(schedule, n, every), dtype=torch.float64) * 10_003
    steps, heights = _plots.points(schedule, n, every)

    ends = [int(step) // every + 1 for step in steps]
    means = [weights[a:b].mean() for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert len(steps) <= 1010
    assert (steps[0], steps[-1]) == (0, n)
    torch.testing.assert_close(torch.tensor(heights), torch.stack(means).float())
