"""Tests of modkit, with torch as the oracle."""

import pytest


# Without this, the assert inside `same` would not show what differs.
pytest.register_assert_rewrite("tests.helpers")
