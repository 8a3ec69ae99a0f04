import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.modules.checks import assert_same, mark_of, started_by, train_all
from tests.distributed.modules.modes import MODES
from tests.distributed.modules.training import MARK, cases


pytestmark = pytest.mark.distributed

COMPILED = tuple(name for name, mode in MODES.items() if mode.compiled and "inductor" not in name)
CASES = [
    *cases(("layers", "classes", "held"), COMPILED, ranks=2),
    ("classes", "ddp compiled inductor"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return where the processes meet."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def found(folder):
    """Train all of them on two processes."""
    return train_all(CASES, folder)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_losses_are_those_of_torch(found, case) -> None:
    """A network that is compiled before it is spread, or after that, learns the same."""
    assert_same(found, case)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")
def test_no_process_of_a_compiler_is_left(found, folder) -> None:
    """Compilations end together with the processes that started them."""
    marked = {**os.environ, MARK: mark_of(folder)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, env=marked) as other:
        assert other.pid in started_by(folder)
        other.communicate(b"\n")
    end = time.monotonic() + 10
    while started_by(folder) and time.monotonic() < end:
        time.sleep(0.1)

    assert started_by(folder) == []
