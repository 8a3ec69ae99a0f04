"""Docstrings of what is public around averages have an example and a source."""

import inspect

import modkit
from tests.unit.test_public_face import public_objects


NAMESPACES = ["modkit.distributed", "modkit.optim.swa_utils", "modkit.posthoc", "modkit.schedules"]
PUBLIC = [
    *(value for path in NAMESPACES for _, value in public_objects(path)),
    *(modkit.PostHocEMA, modkit.average_checkpoints),
]
# Results, and what needs matplotlib.
WITHOUT_EXAMPLE = {"Fit", "Reconstruction", "Snapshot", "plot"}


def test_each_has_an_example() -> None:
    """Functions and classes show how they are used; the examples are run as tests."""
    without = {value.__qualname__ for value in PUBLIC if "Example:" not in inspect.getdoc(value)}

    assert without <= WITHOUT_EXAMPLE
