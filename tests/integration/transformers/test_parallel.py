import pytest

from tests.distributed.modules.training import assert_same, cases, train_all


pytest.importorskip("transformers", reason="needs transformers: nox -s ecosystem installs it")

pytestmark = pytest.mark.distributed

MODES = (
    *("alone", "ddp static", "ddp accumulates", "ddp recomputes wrapped reentrant"),
    *("ddp compiled eager", "fsdp", "fsdp bf16", "fsdp recomputes wrapped", "fsdp1"),
    *("tp", "tp recomputes"),
)
CASES = cases(("llama",), MODES, ranks=2)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Train all of them on two processes."""
    return train_all(CASES, tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_losses_below_a_users_class_are_those_of_torch(found, case) -> None:
    """20 steps have equal losses, end in equal weights, and exchange as many bytes."""
    assert_same(found, case)
