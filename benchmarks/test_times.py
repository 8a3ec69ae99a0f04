"""Absolute times of each operation, on torch and on modkit.

    pytest benchmarks --benchmark-group-by=param:row     # needs pytest-benchmark

This is for a close look at one operation: pytest-benchmark measures one implementation to the end
before it begins with the other. For ratios and budgets use `python -m benchmarks`, which interleaves.
"""

from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.measure import Code, Row, quiet
from benchmarks.rows import TIMES
from tests.helpers import Implementation


pytest.importorskip("pytest_benchmark")


@pytest.mark.parametrize("row", TIMES, ids=[row.name for row in TIMES])
def test_time(impl: Implementation, row: Row, benchmark: Any) -> None:
    """Time one operation."""
    with quiet(), ExitStack() as stack:
        arm = row.arms(stack)[impl.name]
        assert isinstance(arm, Code)
        benchmark(exec, compile(arm.statement, row.name, "exec"), dict(arm.names))
