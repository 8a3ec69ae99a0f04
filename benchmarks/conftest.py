"""The two implementations as one fixture, as in the tests."""

import pytest

from tests.helpers import MODKIT, TORCH, Implementation


@pytest.fixture(params=[TORCH, MODKIT], ids=str)
def impl(request: pytest.FixtureRequest) -> Implementation:
    """Return the implementation that is timed."""
    implementation: Implementation = request.param
    return implementation
