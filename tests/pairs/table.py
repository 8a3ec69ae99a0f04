"""Expected outcomes: a pair is right, unless a line here says that it is refused, or not sensible."""

from __future__ import annotations

import functools
import importlib.util
import re
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.launcher import launch
from tests.pairs import trainers  # noqa: F401 - it enters rows
from tests.pairs.features import FEATURES
from tests.pairs.situations import SITUATIONS, Situation
from tests.pairs.worlds import meet, silent


if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds that a rank waits for another.
WAIT = 20.0
# The pair of the sample that starts ranks.
ON_RANKS = ("export_average", "FSDP2")
# Situation, features and the text of the refusal.
MISSING = "Missing key.s. in state_dict"
SOUPS = "average_checkpoints, modkit average"
LOADERS = "load_state_dict of Module, modkit.load_state_dict, migrations, state of AveragedModel"
SWA = "AveragedModel, state of AveragedModel"
TENSORS_ONLY = f"convert, diff, modkit migrate, {SOUPS}"
SHARDED = "body.weight' is a tensor without plain memory .torch._utils._rebuild_wrapper_subclass"
REFUSED = [
    ("tensor subclass", "load_checkpoint", "it needs tests.pairs.situations.Tagged, and"),
    (
        "tensor subclass",
        "save_checkpoint, load_checkpoint",
        "Tagged, which load_checkpoint does not",
    ),
    ("tensor subclass", "load_averages", "GLOBAL tests.pairs.situations.Tagged was not an allowed"),
    ("wrapper of the model", LOADERS, MISSING),
    ("DDP", LOADERS, MISSING),
    ("compile", LOADERS, MISSING),
    ("renamed layer", SOUPS, "2 missing: head.weight, head.bias; 2 un"),
    ("grown model", SOUPS, "2 unexpected: tail.weight, tail.bias"),
    ("quantized", "migrations", "Linear was saved as model.body, where its version is not found"),
    (
        "quantized",
        "convert, diff, average_checkpoints, modkit average, modkit migrate",
        "_packed_params.dtype' is not a tensor but a dtype",
    ),
    ("DCP", "load_checkpoint", "Is a directory; `modkit inspect` lists the checkpoint in it"),
    ("old format", "verify", "is unverified: no checksums"),
    (
        "foreign class in the file",
        "load_checkpoint",
        "it needs torch.nn.modules.loss.MSELoss, tests",
    ),
    # Transformers counts elements before the first step.
    ("lazy", "EMACallback of transformers", "Attempted to use an uninitialized parameter"),
    # Torch refuses these.
    ("autocast", "jit", "Cannot insert a Tensor that requires grad as a constant"),
    ("hostile names", "jit", "ill formed octal specifier"),
    ("export", "jit", "Exporting a ScriptModule is not supported"),
    ("functional_call", "jit", "can't be used with Jitted modules"),
    ("vmap", "jit", "Expected all models to be of the same class"),
    ("unfrozen, trainable only", "PostHocEMA", "PostHocEMA has to begin in another directory"),
    ("renamed layer", "PostHocEMA", "PostHocEMA has to begin in another directory"),
    ("renamed layer", SWA, "the model is not the one that is averaged: 2 missing"),
    ("grown model", "PostHocEMA", "PostHocEMA has to begin in another directory"),
    ("second run in the folder", "PostHocEMA", "has snapshots of another run, such as ema-"),
    ("grown model", SWA, "2 unexpected: tail.weight, tail.bias"),
    ("second average", "store, copy_to, restore", "store.. was called inside applied"),
    (
        "tensor subclass",
        "export_average, state of EMA, PostHocEMA",
        "is of type tests.pairs.situations.Tagged, which load_checkpoint does not read; save a plain",
    ),
    # Torch refuses to copy the model.
    (
        "FSDP2",
        f"averaged_model, module, update_bn, {SWA}",
        "FSDP does not support deepcopy",
    ),
    ("FSDP2", TENSORS_ONLY, SHARDED),
    ("TP", TENSORS_ONLY, SHARDED),
    ("FSDP2", "jit", "INTERNAL ASSERT FAILED"),
    ("TP", "jit", "unordered_map::at"),
]
# Reasons why a pair is not sensible: traits of which the situation needs one, and the feature has none.
NEEDED = {
    "block": "nothing is open that could end in another way",
    "model": "it shows no model that could be called",
    "writes": "it writes no file",
    "reads": "it reads no file",
    "loads": "it loads no state dict",
    "saves": "it saves no state dict",
    "state": "it has no state",
    "average": "it has no average",
}
CALLED = "the model of the training is called, which changes it"
ALONE = {
    ("PostHocEMA", "full disk"): "it writes while the model is trained",
    ("load_averages", "full disk"): "torch writes the folder",
    ("state of AveragedModel", "DDP, saver of one rank"): "its names have the wrapper, as with DDP",
    ("fast_inference", "buffers written in forward"): CALLED,
    ("jit", "buffers written in forward"): CALLED,
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
    ("PostHocEMA", "unfrozen, trainable only", "the same in another error"),
    ("fast_inference", "compile", "a child that torch.compile had returned was compiled again"),
    ("PostHocEMA", "pickle", "a run resumed from a pickle kept snapshots that it had given up"),
    ("attach", "FSDP2", "evaluations in a row were taken for steps without an update"),
    (
        "applied",
        "generator left half way",
        "collected while another block began or ended, it lost the training weights",
    ),
    (
        "inspect",
        "tensor subclass",
        "a subclass with a function of its own hid all tensors of its file",
    ),
    ("migrate", "old format", "a file without checksums was not reported as unverified"),
]


def refusal(feature: str, situation: str) -> str | None:
    """Return the text with which a pair is refused, or None."""
    for place, features, text in REFUSED:
        if place == situation and (features == feature or feature in features.split(", ")):
            return text
    return None


def reason(feature: str, situation: str) -> str | None:
    """Return why a pair is not sensible, or None."""
    if (feature, situation) in ALONE:
        return ALONE[feature, situation]
    place = SITUATIONS[situation]
    if "keeps its model" in FEATURES[feature].traits:
        if place.replaces or situation == "spawn":
            return "a Trainer keeps its model"
        if place.ranks > 1:
            return "a Trainer starts its own ranks"
    own_model = type(place).build is not Situation.build
    if feature == "compat" and situation != "plain" and (place.ranks > 1 or not own_model):
        return "it builds models alone"
    if situation == "DDP, saver of one rank" and "ranks together" in FEATURES[feature].traits:
        return "all ranks write the file together"
    needs = place.needs
    if not needs or needs & FEATURES[feature].traits:
        return None
    return " and ".join(NEEDED[need] for need in sorted(needs))


def pairs() -> list[tuple[str, str]]:
    """Return all pairs, situation by situation."""
    return [(feature, situation) for situation in SITUATIONS for feature in FEATURES]


def sample() -> Iterator[tuple[str, str]]:
    """Yield pairs in which each feature, and each situation on one rank, is at least twice.

    Ranks take seconds to start: one pair has them.
    """
    yield ON_RANKS
    counts = Counter(ON_RANKS[:1])
    for situation, each in SITUATIONS.items():
        if each.ranks == 1:
            sensible = [name for name in FEATURES if reason(name, situation) is None]
            if situation == "1,000 entries exactly":
                # Half a minute.
                sensible.remove("compat")
            for name in sorted(sensible, key=counts.__getitem__)[:2]:
                counts[name] += 1
                yield name, situation


@functools.cache
def on_ranks(situation: str, features: tuple[str, ...]) -> dict[str, list[str]]:
    """Run features in a situation on its ranks; return "right" or the error of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = SITUATIONS[situation].ranks
        options = {"folder": Path(folder), "limit": 250.0, "timeout": WAIT}
        outcomes = launch(ranks, on_rank, situation, features, folder, **options)
    assert all(each.result for each in outcomes), [each.error for each in outcomes]
    return outcomes[0].result


def on_rank(situation: str, features: tuple[str, ...], folder: str) -> dict[str, list[str]]:
    """Run features on one rank; all ranks return the same."""
    found = {}
    for number, name in enumerate(features):
        rank, ranks = torch.distributed.get_rank(), SITUATIONS[situation].ranks
        own = Path(folder, str(number), str(rank))
        own.mkdir(parents=True)
        # Ranks that have lost step meet in a group of its own, which waits for longer.
        meeting = torch.distributed.new_group(timeout=timedelta(seconds=3 * WAIT))
        try:
            with silent():
                meet(FEATURES[name], SITUATIONS[situation], own)
            results = ["right"] * ranks
        except (Exception, CheckpointException) as error:
            results = [f"{type(error).__name__}: {error}"] * ranks
        torch.distributed.all_gather_object(results, results[rank], group=meeting)
        found[name] = results
        # Messages that the ranks of a failed feature wait for must not meet the next feature.
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group(
            "gloo",
            init_method=own.parent.joinpath("group").as_uri(),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=WAIT),
        )
    return found


def outcome(feature: str, situation: str, folder: Path, together: tuple[str, ...] = ()) -> str:
    """Run a pair; return "right", "refused", "not sensible" or "not installed".

    Args:
        feature: The row.
        situation: The column.
        folder: An empty folder.
        together: Features that run in the same start of the ranks, which is once for all of them.

    Raises:
        AssertionError: The outcome is another one than the table says.
    """
    if reason(feature, situation) is not None:
        return "not sensible"
    libraries = FEATURES[feature].libraries + SITUATIONS[situation].libraries
    if any(importlib.util.find_spec(name) is None for name in libraries):
        return "not installed"

    text = refusal(feature, situation)
    if SITUATIONS[situation].ranks > 1:
        found = on_ranks(situation, together or (feature,))[feature]
        assert all(re.search(text or "^right$", each) for each in found), found
        return "refused" if text else "right"
    try:
        with silent():
            meet(FEATURES[feature], SITUATIONS[situation], folder)
    except AssertionError:
        raise
    except (Exception, CheckpointException) as error:
        if text is None or not re.search(text, str(error)):
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        return "refused"
    assert text is None, "it is not refused any more"
    return "right"
