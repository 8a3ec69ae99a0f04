"""Fixtures of several commands."""

import pytest

from modkit.compat import model
from tests.processes import context


@pytest.fixture
def forked_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes in which ``compat`` builds models from one that has imported torch."""
    monkeypatch.setattr(model.multiprocessing, "get_context", lambda _: context())
