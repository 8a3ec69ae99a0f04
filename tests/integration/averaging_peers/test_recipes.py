import copy
import importlib.util

import pytest
import torch

import modkit
from modkit import schedules
from tests.cases import for_each
from tests.integration.averaging_peers.recipes import (
    LIGHTNING_SETUP,
    PAGE,
    Run,
    recipes,
)


RECIPES = recipes()
TRAINERS = {"lightning": LIGHTNING_SETUP}
PACKAGES = {
    "timm": ("timm",),
    "diffusers": ("diffusers",),
    "ema-pytorch": ("ema_pytorch",),
    "torch_ema": ("torch_ema",),
    "lightning": ("lightning",),
}
TOLERANCE = 1e-9
# Beyond the delays and a few intervals of each recipe.
STEPS = 402


def library_of(name):
    """Return the library of a recipe; a name is the library's, or begins with it."""
    return next((library for library in PACKAGES if name.startswith(library)), "torch")


@pytest.fixture(autouse=True)
def _float64():
    """Compute in float64, so that the difference shows the rule and not its rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def require(name):
    """Skip the test where the library of a recipe is missing."""
    for package in PACKAGES.get(library_of(name), ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import {package!r}")


def execute(code, names):
    """Run the code of one side."""
    exec(compile(code, str(PAGE), "exec"), names)


def difference(theirs, ours):
    """Return the largest absolute difference between two evaluations' tensors."""
    assert theirs.keys() == ours.keys()
    return max((theirs[name] - ours[name]).abs().max().item() for name in theirs)


IN_A_LOOP = [name for name in RECIPES if library_of(name) not in TRAINERS]
IN_A_TRAINER = [name for name in RECIPES if library_of(name) in TRAINERS]


@for_each("name", IN_A_LOOP)
def test_a_loop(name):
    """After a random walk, an evaluation of modkit's average sees the weights of the library's."""
    require(name)
    theirs, ours = Run(STEPS), Run(STEPS)
    start = {key: value.clone() for key, value in theirs.model.state_dict().items()}

    for side, run in (("theirs", theirs), ("ours", ours)):
        execute(RECIPES[name][side], {**run.names(), "modkit": modkit, "schedules": schedules})

    assert difference(theirs.seen[0], ours.seen[0]) <= TOLERANCE
    # The average is neither where the walk began nor where it ended.
    for other in (start, ours.model.state_dict()):
        assert (other["0.weight"] - ours.seen[0]["0.weight"]).abs().max() > 1e-3


@for_each("name", IN_A_TRAINER)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_trainer(name):
    """After a training run, an evaluation of modkit's average sees the weights of the library's."""
    require(name)
    torch.manual_seed(0)
    shared = {**Run(STEPS).names(), "torch": torch, "__name__": "migration"}
    execute(TRAINERS[library_of(name)], shared)
    start = copy.deepcopy(shared["module"].state_dict())

    def run(side, **names):
        run = Run(0)
        torch.manual_seed(1)
        names |= {"module": copy.deepcopy(shared["module"]), "validate": run.validate}
        execute(RECIPES[name][side], {**shared, **names})
        return run.seen[0]

    theirs = run("theirs")
    ours = run("ours", modkit=modkit, schedules=schedules)

    assert difference(theirs, ours) <= TOLERANCE
    assert difference(ours, {key: start[key] for key in ours}) > 1e-3
