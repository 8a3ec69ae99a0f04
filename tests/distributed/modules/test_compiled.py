import pytest

from tests.distributed.modules.checks import assert_same, train_all
from tests.distributed.modules.modes import MODES
from tests.distributed.modules.training import cases


pytestmark = pytest.mark.distributed

COMPILED = tuple(name for name, mode in MODES.items() if mode.compiled and "inductor" not in name)
CASES = [
    *cases(("layers", "classes", "adopted"), COMPILED, ranks=2),
    ("classes", "ddp compiled inductor"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Train all of them on two processes."""
    return train_all(CASES, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_losses_are_those_of_torch(found, case) -> None:
    """A network that is compiled before it is spread, or after that, learns the same."""
    assert_same(found, case)
