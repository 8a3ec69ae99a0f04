"""Absolute times of each operation that has a budget, on torch and on modkit.

    pytest benchmarks --benchmark-group-by=param:row     # needs pytest-benchmark

This is for looking at one operation closely: pytest-benchmark measures one implementation to the
end before it begins with the other, so that whatever else the machine does meets only one of them.
The ratios, and the verdicts on the budgets, come from `python -m modkit bench`, which takes turns.
"""

from typing import Any

import pytest

from modkit.cli._bench_rows import TIMES
from modkit.cli._measure import quiet
from modkit.cli._row_kinds import Time
from tests.helpers import Implementation


pytest.importorskip("pytest_benchmark")


@pytest.mark.parametrize("row", TIMES, ids=[row.name for row in TIMES])
def test_time(impl: Implementation, row: Time, benchmark: Any) -> None:
    """Time one operation."""
    names = row.names(impl.nn)
    code = compile(row.statement, row.name, "exec")

    with quiet(), row.context():
        benchmark(exec, code, names)
