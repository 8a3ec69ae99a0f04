"""Pytest plugin: run a sample of large files, and limit the memory of the process.

``SUITE_SAMPLE`` has the start of ids of which one test in so many runs, chosen by the test's id.
"""

import json
import os
import resource
import zlib

from modkit.compat.pytest_plugin import neutral


SAMPLE = json.loads(os.environ.get("SUITE_SAMPLE", "{}"))
# A test that needs more memory fails alone. CUDA reserves far more addresses than it uses.
if os.environ.get("SUITE_DEVICE", "cpu") == "cpu":
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))


def pytest_collection_modifyitems(config, items):
    """Sample the tests of files that take too long."""
    kept = [i for i in items if not zlib.crc32(neutral(i.nodeid).encode()) % _rate(i.nodeid)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _rate(nodeid: str) -> int:
    return next((rate for start, rate in SAMPLE.items() if nodeid.startswith(start)), 1)
