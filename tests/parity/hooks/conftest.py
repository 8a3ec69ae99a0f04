"""Every hook test starts and ends with empty global hook tables."""

from collections.abc import Iterator

import pytest

from tests.helpers import clean_global_hooks


@pytest.fixture(autouse=True)
def _clean_global_hooks() -> Iterator[None]:
    """Leave no global hook behind."""
    with clean_global_hooks():
        yield
