import pytest

from tests.distributed.modules.checks import assert_is_the_whole, assert_same, train_all
from tests.distributed.modules.training import cases


pytest.importorskip("transformers", reason="needs transformers: nox -s ecosystem installs it")

pytestmark = pytest.mark.distributed

MODES = (
    "ddp unused",
    "ddp static",
    "ddp accumulates",
    "ddp recomputes",
    "ddp recomputes wrapped reentrant",
    "ddp compiled eager",
    "fsdp",
    "fsdp bf16",
    "fsdp recomputes wrapped",
    "fsdp1",
)
CASES = cases(("gpt2", "llama"), MODES, ranks=2)
WITH_LINEAR = [("llama", mode) for mode in ("alone", "tp", "tp recomputes")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Train all of them on two processes."""
    return train_all([*CASES, *WITH_LINEAR], tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("case", [*CASES, *WITH_LINEAR], ids="-".join)
def test_losses_below_a_users_class_are_those_of_torch(found, case) -> None:
    """20 steps have equal losses, end in equal weights, and exchange as many bytes."""
    assert_same(found, case)


@pytest.mark.parametrize("mode", ["ddp unused", "fsdp", "fsdp bf16", "tp"])
def test_losses_of_llama_are_those_of_one_process(found, mode) -> None:
    """The mean of the losses is that of a single process with the batches of all."""
    assert_is_the_whole(found, ("llama", mode))
