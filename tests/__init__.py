"""Tests: torch is the oracle, and modkit has to give the same answers."""

import pytest


# Without this, the assert inside `same` would not show what differs.
pytest.register_assert_rewrite("tests.helpers")
