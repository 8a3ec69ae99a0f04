from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import freeze
from tests.integration.torchtune.recipe import Recipe


def run(folder: Path, epochs: int, *, resume: bool = False, every: int = 2) -> Any:
    """Run a recipe to the end."""
    config = {
        "output_dir": folder,
        "seed": 0,
        "epochs": epochs,
        "ema_decay": 0.9,
        "gradient_accumulation_steps": every,
        "resume_from_checkpoint": resume,
    }
    one = Recipe(config)
    one.setup()
    one.train()
    return one


def ends(one: Any) -> Any:
    """Return what a run ends with: weights, averages, counts and the loss of the average."""
    return freeze([dict(one.model.state_dict()), one.ema.state_dict(), one.loss])


@pytest.mark.parametrize(("every", "steps"), [(1, 16), (2, 8), (4, 4)])
def test_one_update_for_each_step(tmp_path: Path, every: int, steps: int) -> None:
    """Gradients that are accumulated give one update, and users get the average."""
    one = run(tmp_path, 2, every=every)

    assert one.ema.n_averaged == one.ema.step == steps
    saved = torch.load(tmp_path / "epoch_1" / "model.pt", weights_only=True)
    assert freeze(dict(saved)) == freeze(dict(one.ema.averaged_model().state_dict()))
    state = torch.load(tmp_path / "recipe_state.pt", weights_only=True)
    assert freeze(dict(state["model"])) == freeze(dict(one.model.state_dict()))
    assert not torch.equal(saved["0.weight"], state["model"]["0.weight"])


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("epochs", [1, 2])
def test_resume(tmp_path: Path, epochs: int, every: int) -> None:
    """A resumed recipe ends in the bits of one that was not interrupted."""
    whole = run(tmp_path / "whole", 3, every=every)
    run(tmp_path / "parts", epochs, every=every)

    resumed = run(tmp_path / "parts", 3, resume=True, every=every)

    assert ends(resumed) == ends(whole)


def test_an_error_in_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while the average is in the model restores the training weights."""

    def fail(self: Any) -> None:
        raise KeyboardInterrupt

    whole = run(tmp_path / "whole", 1)
    monkeypatch.setattr(Recipe, "evaluate", fail)
    config = {**whole.config, "output_dir": tmp_path}
    one = Recipe(config)
    one.setup()
    with pytest.raises(KeyboardInterrupt):
        one.train()

    assert freeze(dict(one.model.state_dict())) == freeze(dict(whole.model.state_dict()))
