"""The two implementations as one fixture, and the differences table as strict xfails."""

from __future__ import annotations

import gc
import platform
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.divergences import DIVERGENCES
from tests.helpers import MODKIT, TORCH, Implementation, clean_global_hooks, seed_everything


if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=[TORCH, MODKIT], ids=str)
def impl(request: pytest.FixtureRequest) -> Implementation:
    """The implementation under test: every test that takes it runs on torch and on modkit."""
    implementation: Implementation = request.param
    return implementation


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state."""
    seed_everything()


@pytest.fixture
def clean_hooks() -> Iterator[None]:
    """Remove the global hooks of a case of `for_each` that is an item of its own."""
    with clean_global_hooks():
        yield


# First, so that the tests which the default marks deselect are still there.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rows of the differences table, and skip what needs a device that is not there.

    A row that matches no test is an error.
    """
    matched = set()
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_gpu)
        key = item.nodeid.split("[", 1)[0]
        row = DIVERGENCES.get(key)
        if row is None:
            continue
        matched.add(key)
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if str(parameters.get("impl")) == row.fails_on and row.applies_to(
            torch.__version__, platform.python_version()
        ):
            item.add_marker(pytest.mark.xfail(reason=f"{row.reason} ({row.upstream})", strict=True))
    whole_run = config.args == config.getini("testpaths") and not config.option.keyword
    unmatched = set(DIVERGENCES) - matched
    if whole_run and unmatched:
        raise pytest.UsageError(f"rows of tests/divergences.py without a test: {sorted(unmatched)}")


@pytest.fixture(autouse=True, scope="session")
def unmeasured_guards() -> Iterator[None]:
    """Compile without the time of the guards, for which torch empties the caches, and which it logs."""
    guards = sys.modules.get("torch._dynamo.guards")
    with pytest.MonkeyPatch.context() as patch:
        if guards is not None:
            patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Leave what is there before the tests of a file out of their collections, which it would slow."""
    gc.collect()
    gc.freeze()
