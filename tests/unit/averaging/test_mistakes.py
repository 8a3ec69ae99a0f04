"""Options and arguments that would have no effect, or another one, are refused where they are given."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import modkit
from modkit.averaging.callback import check_options
from modkit.distributed import export_average
from modkit.optim.swa_utils import AveragedModel
from tests.cases import for_each
from tests.unit.averaging.recipes import model_of, network


FACES = [modkit.EMA, modkit.EMACallback, AveragedModel]


def update(average: Any, model: nn.Module) -> None:
    if isinstance(average, AveragedModel):
        average.update_parameters(model)
    else:
        getattr(average, "ema", average).update()


# --- globs -------------------------------------------------------------------------------------------

UNUSED: list[tuple[dict[str, Any], str]] = [
    ({"include": ["0.*", "haed.*"]}, "include='haed.*'"),
    ({"exclude": "haed.*"}, "exclude='haed.*'"),
    ({"exclude": ["a.*", "*.bias", "b.*"]}, "exclude='a.*', exclude='b.*'"),
    ({"include": ["0.*", "c"], "exclude": ["d"]}, "include='c', exclude='d'"),
    ({"buffers": {"*.runing_*": "average"}}, "buffers='*.runing_*'"),
    ({"buffers": {"1.weight": "average", "1.running_mean": "copy"}}, "buffers='1.weight'"),
    ({"exclude": "1.running_mean"}, "exclude='1.running_mean'"),
]


@for_each("face", FACES)
@for_each(("options", "unused"), UNUSED)
def test_globs_that_match_nothing(face: Any, options: dict[str, Any], unused: str) -> None:
    """The error names each of them, and names of the model."""
    model = network()
    names = "The names of its tensors begin with 0.weight, 0.bias, 1.weight, "
    message = re.escape(f"no name of Sequential matches {unused}. {names}")
    with pytest.raises(ValueError, match=message):
        face(model, **options)


@for_each("face", FACES)
def test_globs_of_buffers_that_are_none(face: Any) -> None:
    """They are tensors later, under the same names."""
    model = model_of(torch.ones(2))
    model.register_buffer("cache", None)
    update(face(model, buffers={"cache": "ignore"}), model)


def test_globs_of_a_lazy_model() -> None:
    """Its tensors are not all known before its first call, and so the first update looks."""
    for face in (modkit.EMA, AveragedModel):
        model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
        average, right = face(model, exclude=["9.*", "1.*"]), face(model, exclude="0.*")
        model(torch.ones(1, 3))
        with pytest.raises(ValueError, match=r"no name of Sequential matches exclude='9\.\*'\."):
            update(average, model)
        update(right, model)


def test_globs_of_a_second_name() -> None:
    """A tied parameter is averaged under its first name, which the error tells."""
    model: Any = nn.Module()
    model.embedding, model.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    model.head.weight = model.embedding.weight
    for face in FACES:
        with pytest.raises(ValueError, match=r"head\.weight is tied to embedding\.weight"):
            face(model, exclude="head.*")


def test_globs_of_callbacks_without_a_model() -> None:
    """The trainers' callbacks check options before there is a model, whose names they cannot know."""
    check_options(0.9, 0, {"include": "net.*", "buffers": {"net.*": "average"}})
    with pytest.raises(ValueError, match="buffers must be one of"):
        check_options(0.9, 0, {"buffers": {"net.*": "drop"}})  # type: ignore[dict-item]


# --- decays -------------------------------------------------------------------------------------------


@for_each("face", [modkit.EMA, modkit.EMACallback, lambda _, **options: check_options(0.01, 0, {})])
def test_a_decay_that_is_a_momentum_elsewhere(face: Any) -> None:
    """It is a warning at the line of the user; a decay of 0 is the model itself."""
    message = "EMA: decay=0.01 keeps 1.00% of the average in each update. If that is a momentum, "
    with pytest.warns(UserWarning, match=re.escape(f"{message}pass decay=0.99.") + "$") as warned:
        face(network(), decay=0.01)
    assert [one.filename for one in warned] == [__file__]
    for decay in (0.0, 0.1, 1):
        modkit.EMA(network(), decay)


# --- indices ------------------------------------------------------------------------------------------


def apply(ema: "modkit.EMA[Any]", index: Any) -> None:
    """Enter a block with one of the averages."""
    with ema.applied(index=index):
        pass


READS = [
    apply,
    lambda ema, index: ema.copy_to(index=index),
    lambda ema, index: ema.averaged_model(index),
    lambda ema, index: ema.named_averages(index),
    lambda ema, index: export_average(ema, "no-folder/never-written.pt", index=index),
    lambda ema, index: modkit.EMACallback(ema.model, decay=[0.5, 0.9], index=index),
    lambda ema, index: check_options([0.5, 0.9], index, {}),
]


@for_each("read", READS)
@for_each("begun", [False, True])
@for_each(
    ("index", "error", "message"),
    [
        (-1, IndexError, "EMA: index is -1, and there are 2 averages, numbered from 0"),
        (2, IndexError, "EMA: index is 2, and there are 2 averages, numbered from 0"),
        ("0", TypeError, "EMA: index must be an int, got '0'"),
        (0.0, TypeError, "EMA: index must be an int, got 0.0"),
        (True, TypeError, "EMA: index must be an int, got True"),
    ],
)
def test_an_index_that_no_average_has(
    read: Any, begun: bool, index: Any, error: type[Exception], message: str
) -> None:
    """Each method raises the same error, before and after the first update."""
    ema = modkit.EMA(network(), decay=[0.5, 0.9])
    if begun:
        ema.update()
    with pytest.raises(error, match=message):
        read(ema, index)


# --- walks over the names ------------------------------------------------------------------------------


def test_a_model_that_contains_itself_is_named():
    """The walk over the names ends at once, and not in a bare overflow of the stack."""
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].back = model

    with pytest.raises(RecursionError, match="the module Sequential contains itself"):
        modkit.EMA(model)


def test_a_model_deeper_than_the_recursion_limit_has_an_average():
    """Depth is not limited: the walk over the names does not recurse."""
    model = nn.Linear(1, 1)
    for _ in range(3000):
        model = nn.Sequential(model)
    ema = modkit.EMA(model)
    ema.update()

    assert len(list(ema.named_averages())) == 2


# --- the wrong class ---------------------------------------------------------------------------------


def test_callbacks_of_trainers_do_not_take_the_model() -> None:
    """The error names the class for hand-written loops."""
    with pytest.raises(
        TypeError, match=r"decay must be a number.* the model Sequential \(see modkit\.EMA\)"
    ):
        check_options(network(), 0, {})


def test_the_callback_for_loops_takes_the_model() -> None:
    """It is an EMA's, which says so."""
    message = "model must be a torch.nn.Module, got float. Pass the model"
    with pytest.raises(TypeError, match=message):
        modkit.EMACallback(0.999)
