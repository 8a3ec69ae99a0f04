import pytest

from tests.distributed.modules.checks import assert_is_the_whole, assert_same, train_all
from tests.distributed.modules.modes import MODES
from tests.distributed.modules.tasks import TASKS
from tests.distributed.modules.training import cases


pytestmark = pytest.mark.distributed

TASK_NAMES = ("layers", "classes", "held")
EAGER = tuple(name for name, mode in MODES.items() if not mode.compiled)
CASES = cases(TASK_NAMES, EAGER, ranks=2)
ON_THREE = cases(TASK_NAMES, ("alone", "ddp", "fsdp", "fsdp stays whole"), ranks=3)
ON_FOUR = cases(TASK_NAMES, ("tp and fsdp",), ranks=4)


def to_be_whole(which):
    """Return the cases whose losses can be told from those of one process."""
    return [
        case
        for case in which
        if TASKS[case[0]].rows_are_independent and case[1] not in {"alone", "ddp unused not found"}
    ]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """Train all of them on two processes."""
    return train_all(CASES, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def on_three(tmp_path_factory):
    """Train some of them on three processes, by which 7 and 8 rows cannot be divided."""
    return train_all(ON_THREE, tmp_path_factory.mktemp("three"), ranks=3)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    """Train some of them on a mesh of two by two processes."""
    return train_all(ON_FOUR, tmp_path_factory.mktemp("four"), ranks=4)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_losses_on_two_are_those_of_torch(on_two, case) -> None:
    """20 steps have equal losses, end in equal weights, and exchange as many bytes."""
    assert_same(on_two, case)


@pytest.mark.parametrize("case", to_be_whole(CASES), ids="-".join)
def test_losses_on_two_are_those_of_one_process(on_two, case) -> None:
    """The mean of the losses is that of a single process with the batches of all."""
    assert_is_the_whole(on_two, case)


@pytest.mark.parametrize("case", ON_THREE, ids="-".join)
def test_losses_on_three_are_those_of_torch(on_three, case) -> None:
    """Likewise on three."""
    assert_same(on_three, case)


@pytest.mark.parametrize("case", to_be_whole(ON_THREE), ids="-".join)
def test_losses_on_three_are_those_of_one_process(on_three, case) -> None:
    """Likewise on three."""
    assert_is_the_whole(on_three, case)


@pytest.mark.parametrize("case", ON_FOUR, ids="-".join)
def test_losses_on_a_mesh_are_those_of_torch(on_four, case) -> None:
    """Layers are sharded, and the rest of the parameters along the other dimension."""
    assert_same(on_four, case)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_what_exchanges_nothing_in_between_has_the_gradients_of_the_whole(on_two, task) -> None:
    """Two halves of a batch, of which the first exchanges nothing, talk as often as one whole."""
    whole, halves = (on_two[0][task, mode]["modkit"] for mode in ("ddp", "ddp accumulates"))

    assert halves["talk"] == whole["talk"]
    assert halves["nbytes"] == whole["nbytes"]
