"""Docstrings of what is public around averages state arguments, errors and an example."""

import dataclasses
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import modkit
from modkit.optim import swa_utils
from tests.cases import for_each
from tests.unit.test_public_face import functions_of, public_objects


NAMESPACES = ["modkit.distributed", "modkit.optim.swa_utils", "modkit.posthoc", "modkit.schedules"]
ABOUT = [
    *(found for path in NAMESPACES for _, found in public_objects(path)),
    *(modkit.PostHocEMA, modkit.average_checkpoints),
]


def members() -> Iterator[tuple[str, Any]]:
    """Yield public functions, classes and methods by their public names."""
    for found in ABOUT:
        yield found.__qualname__, found
        for method in functions_of(found) if isinstance(found, type) else ():
            if not method.__name__.startswith("_"):
                # Methods that a subclass implements have the docstring of the base class.
                yield method.__qualname__, getattr(found, method.__name__)


MEMBERS = dict(members())


def takes_arguments(found: Any) -> bool:
    """Return True if a caller may pass something besides ``self``."""
    return bool(inspect.signature(found).parameters.keys() - {"self"})


@for_each("name", [name for name, found in MEMBERS.items() if takes_arguments(found)])
def test_arguments_are_described(name: str) -> None:
    """Each parameter is named below ``Args`` or, for results that are classes, ``Attributes``."""
    shown = inspect.getdoc(MEMBERS[name])
    original = inspect.getdoc(getattr(torch.optim.swa_utils, name, None)) or ""
    if name in vars(torch.optim.swa_utils) and "Args:" not in original:
        pytest.skip("the text is that of this torch, which has no arguments in it")
    parameters = inspect.signature(MEMBERS[name]).parameters.keys() - {"self"}

    assert "Args:" in shown or (dataclasses.is_dataclass(MEMBERS[name]) and "Attributes:" in shown)
    assert [each for each in sorted(parameters) if f"{each}:" not in shown.replace(" (", ":")] == []


def raises(found: Any) -> bool:
    """Return True if the body of a function, or of the constructor of a class, raises by itself."""
    if isinstance(found, type):
        constructors = [vars(found).get(name) for name in ("__init__", "__post_init__")]
        return any(raises(each) for each in constructors if isinstance(each, types.FunctionType))
    # Functions that dataclasses generate have no source.
    code = found.__code__.co_filename
    return not code.startswith("<") and " raise " in inspect.getsource(found)


@for_each("name", [name for name, found in MEMBERS.items() if raises(found)])
def test_errors_are_described(name: str) -> None:
    """A function that raises by itself states the conditions below ``Raises``."""
    assert "Raises:" in inspect.getdoc(MEMBERS[name])


@for_each("name", sorted(found.__qualname__ for found in ABOUT))
def test_each_has_an_example(name: str) -> None:
    """Functions and classes show how they are used; the examples are run as tests."""
    results = {"Fit", "Reconstruction", "Snapshot"}
    drawn = {"plot"}  # needs matplotlib

    assert name in results | drawn or "Example:" in inspect.getdoc(MEMBERS[name])


def test_formulas_name_their_sources() -> None:
    """Schedules that follow a paper or a library link to it."""
    linked = {name for name, found in MEMBERS.items() if "https://" in inspect.getdoc(found)}
    expected = {"CountWarmup", "Equal", "HalfLife", "InverseGamma", "PerUpdate", "Power"}

    assert expected | {"gamma_of", "sigma_rel_of", "fit_power", "average_checkpoints"} <= linked
    assert "arxiv.org" in inspect.getdoc(swa_utils.AveragedModel)
