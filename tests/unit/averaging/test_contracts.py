"""Docstrings of what is public around averages have an example and a source."""

import inspect
from typing import Any

import modkit
from modkit.optim import swa_utils
from tests.unit.test_public_face import functions_of, public_objects


NAMESPACES = ["modkit.distributed", "modkit.optim.swa_utils", "modkit.posthoc", "modkit.schedules"]
PUBLIC = [
    *(value for path in NAMESPACES for _, value in public_objects(path)),
    *(modkit.PostHocEMA, modkit.average_checkpoints),
]
# Results, and what needs matplotlib.
WITHOUT_EXAMPLE = {"Fit", "Reconstruction", "Snapshot", "plot"}


def text_of(value: Any) -> str:
    """Return the docstrings of an object and of its public methods."""
    members = functions_of(value) if isinstance(value, type) else []
    public = [getattr(value, m.__name__) for m in members if not m.__name__.startswith("_")]
    return "\n".join(inspect.getdoc(part) or "" for part in (value, *public))


def test_each_has_an_example() -> None:
    """Functions and classes show how they are used; the examples are run as tests."""
    without = {value.__qualname__ for value in PUBLIC if "Example:" not in inspect.getdoc(value)}

    assert without <= WITHOUT_EXAMPLE


def test_formulas_name_their_sources() -> None:
    """Schedules that follow a paper or a library link to it."""
    linked = {value.__qualname__ for value in PUBLIC if "https://" in text_of(value)}
    expected = {"CountWarmup", "Equal", "HalfLife", "InverseGamma", "PerUpdate", "Power"}

    assert expected | {"gamma_of", "sigma_rel_of", "fit_power", "average_checkpoints"} <= linked
    assert "arxiv.org" in inspect.getdoc(swa_utils.AveragedModel)
