"""Expected outcomes: a pair is right, unless a line here says that it is refused, or not sensible."""

from __future__ import annotations

import functools
import importlib.util
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.distributed.launcher import launch
from tests.pairs.features import FEATURES
from tests.pairs.situations import SITUATIONS
from tests.pairs.worlds import meet, silent


if TYPE_CHECKING:
    from collections.abc import Iterator

# Situation, features and the text of the refusal.
MISSING = "Missing key.s. in state_dict"
LOADERS = "load_state_dict of Module, modkit.load_state_dict, migrations"
REFUSED = [
    ("tensor subclass", "load_checkpoint", "it needs tests.pairs.situations.Tagged, and"),
    (
        "tensor subclass",
        "save_checkpoint, load_checkpoint",
        "Tagged, which load_checkpoint does not",
    ),
    ("wrapper of the model", LOADERS, MISSING),
    ("compile", LOADERS, MISSING),
    (
        "renamed layer",
        "average_checkpoints, modkit average",
        "2 missing: head.weight, head.bias; 2 un",
    ),
    ("grown model", "average_checkpoints, modkit average", "2 unexpected: tail.weight, tail.bias"),
    ("quantized", "migrations", "Linear was saved as model.body, where its version is not found"),
    (
        "quantized",
        "convert, diff, average_checkpoints, modkit average, modkit migrate",
        "_packed_params.dtype' is not a tensor but Constant",
    ),
    ("DCP", "load_checkpoint", "Is a directory; `modkit inspect` lists the checkpoint in it"),
    ("old format", "verify", "is unverified: no checksums"),
    (
        "foreign class in the file",
        "load_checkpoint",
        "it needs torch.nn.modules.loss.MSELoss, tests",
    ),
    # Torch refuses these.
    ("autocast", "jit", "Cannot insert a Tensor that requires grad as a constant"),
    ("hostile names", "jit", "ill formed octal specifier"),
    ("export", "jit", "Exporting a ScriptModule is not supported"),
    ("functional_call", "jit", "can't be used with Jitted modules"),
    ("vmap", "jit", "Expected all models to be of the same class"),
    ("renamed layer", "PostHocEMA", "PostHocEMA has to begin in another directory"),
    ("renamed layer", "AveragedModel", "the model is not the one that is averaged: 2 missing"),
    ("grown model", "PostHocEMA", "PostHocEMA has to begin in another directory"),
    ("grown model", "AveragedModel", "2 unexpected: tail.weight, tail.bias"),
    ("second average", "store, copy_to, restore", "store.. was called inside applied"),
    (
        "tensor subclass",
        "export_average, state of EMA, PostHocEMA",
        "is of type tests.pairs.situations.Tagged, which load_checkpoint does not read; save a plain",
    ),
]
# Reasons why a pair is not sensible: a trait that the situation needs, and the feature lacks.
NEEDED = {
    "block": "nothing is open that could end in another way",
    "model": "it shows values, not a model that could be called",
    "rebinds": "it has no rebind()",
    "writes": "it writes no file",
    "reads": "it reads no file",
    "loads": "it loads no state dict",
    "average": "it has no average",
}
# Found by a pair, and repaired: the feature, the situation, and what was wrong.
FAULTS = [
    ("inspect", "DCP", "folders of torch.distributed.checkpoint were not read"),
    ("state of EMACallback", "inference mode", "a block failed for a model of inference tensors"),
    (
        "export_average",
        "hostile names",
        "a child called module lost its name in averages and files",
    ),
    ("convert", "quantized", "the error named a class that users do not have"),
    ("PostHocEMA", "renamed layer", "the error told the user to call a method that it has not"),
]


def refusal(feature: str, situation: str) -> str | None:
    """Return the text with which a pair is refused, or None."""
    for place, features, text in REFUSED:
        if place == situation and (features == feature or feature in features.split(", ")):
            return text
    return None


def reason(feature: str, situation: str) -> str | None:
    """Return why a pair is not sensible, or None."""
    if (feature, situation) == ("PostHocEMA", "full disk"):
        return "it writes while the model is trained"
    missing = SITUATIONS[situation].needs - FEATURES[feature].traits
    return NEEDED[min(missing)] if missing else None


def pairs() -> list[tuple[str, str]]:
    """Return all pairs, situation by situation."""
    return [(feature, situation) for situation in SITUATIONS for feature in FEATURES]


def sample() -> Iterator[tuple[str, str]]:
    """Yield sensible pairs in which each feature, and each situation, is at least twice."""
    features = [*FEATURES]
    for row, situation in enumerate(SITUATIONS):
        sensible = [name for name in features if reason(name, situation) is None]
        # Each situation begins elsewhere, so that the features take turns.
        for step in range(2):
            yield sensible[(2 * row + step) % len(sensible)], situation


@functools.cache
def on_ranks(situation: str) -> dict[str, str]:
    """Run all features of a situation on its ranks; return "right", or what is wrong on one."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = SITUATIONS[situation].ranks
        outcomes = launch(ranks, on_rank, situation, folder, folder=Path(folder), limit=100.0)
    assert all(each.result for each in outcomes), [each.error for each in outcomes]
    return {
        name: next(
            (each.result[name] for each in outcomes if each.result[name] != "right"), "right"
        )
        for name in outcomes[0].result
    }


def on_rank(situation: str, folder: str) -> dict[str, str]:
    """Run the sensible features on one rank."""
    found = {}
    for number, name in enumerate(FEATURES):
        if reason(name, situation) is None:
            own = Path(folder, str(number), str(torch.distributed.get_rank()))
            own.mkdir(parents=True)
            torch.distributed.barrier()
            try:
                with silent():
                    meet(FEATURES[name], SITUATIONS[situation], own)
                found[name] = "right"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def outcome(feature: str, situation: str, folder: Path) -> str:
    """Run a pair; return "right", "refused", "not sensible" or "not run".

    Raises:
        AssertionError: The outcome is another one than the table says.
    """
    if reason(feature, situation) is not None:
        return "not sensible"
    libraries = FEATURES[feature].libraries + SITUATIONS[situation].libraries
    if any(importlib.util.find_spec(name) is None for name in libraries):
        return "not run"

    if SITUATIONS[situation].ranks > 1:
        found = on_ranks(situation)[feature]
        assert found == "right", found
        return "right"
    text = refusal(feature, situation)
    try:
        with silent():
            meet(FEATURES[feature], SITUATIONS[situation], folder)
    except AssertionError:
        raise
    except Exception as error:
        if text is None or not re.search(text, str(error)):
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        return "refused"
    assert text is None, "it is not refused any more"
    return "right"
