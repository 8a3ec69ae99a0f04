"""Networks of modkit beside those of torch, on ranks: losses, weights and exchanges are bitwise equal."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cases import for_each
from tests.distributed.modules.modes import MODES
from tests.distributed.modules.training import assert_same, cases, train_all
from tests.helpers import Implementation


TASK_NAMES = ("layers", "classes", "held")
TALKING = ("alone", "ddp", "fsdp", "tp")
# Those that a run of all tests looks at; `nox -s distributed` takes each of them.
SHORT = [
    *cases(("classes",), TALKING, ranks=2),
    *cases(("layers",), ("fsdp",), ranks=2),
    *cases(("held",), ("ddp",), ranks=2),
]
EAGER = tuple(name for name, mode in MODES.items() if not mode.compiled)
COMPILED = tuple(name for name, mode in MODES.items() if mode.compiled)
# The number of ranks, and the cases that run on them; 7 and 8 rows cannot be divided by 3.
GROUPS = {
    "two": (2, cases(TASK_NAMES, EAGER, ranks=2)),
    "three": (3, cases(TASK_NAMES, ("alone", "ddp", "fsdp"), ranks=3)),
    "mesh": (4, cases(TASK_NAMES, ("tp and fsdp",), ranks=4)),
    "compiled": (2, cases(TASK_NAMES, COMPILED, ranks=2)),
}


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Train the short ones on two processes."""
    return train_all(SHORT, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Train all cases of a group in the same processes."""
    ranks, which = GROUPS[request.param]
    return train_all(which, tmp_path_factory.mktemp(request.param), ranks)


@for_each("case", SHORT, ids="-".join)
def test_a_few_are_those_of_torch(short, case) -> None:
    """20 steps have equal losses, end in equal weights, and exchange as many bytes."""
    assert_same(short, case)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("found", "case"),
    [
        pytest.param(group, case, id=f"{group}-{'-'.join(case)}")
        for group, (_, which) in GROUPS.items()
        for case in which
    ],
    indirect=["found"],
)
def test_all_are_those_of_torch(found, case) -> None:
    """In each mode, on two ranks, on three, on a mesh, and compiled before or after it is spread."""
    assert_same(found, case)


def test_nothing_is_exchanged_but_what_the_mode_needs(short) -> None:
    """One rank does not communicate; copies reduce gradients, and shards are gathered and reduced."""
    talk = {mode: short[0]["classes", mode]["modkit"]["talk"] for mode in TALKING}

    assert talk["alone"] == {}
    # The buffers, by type, and the gradients.
    assert talk["ddp"] == {"broadcast": 2, "all_reduce": 1}
    # The root once, each of two blocks twice; each of the three has gradients.
    assert talk["fsdp"] == {"all_gather": 5, "reduce_scatter": 3}
    # Once in the forward and once in the backward of each block.
    assert talk["tp"] == {"all_reduce": 4}


@pytest.fixture
def mesh():
    """Return the mesh of one process, which is a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_hooks_of_registration_do_not_run_when_shards_become_whole(
    impl: Implementation, mesh
) -> None:
    """A parameter that takes the place of its shards is not registered anew."""
    seen: list[str] = []
    net = fully_shard(impl.own.Linear(2, 3), mesh=mesh)
    handle = impl.register_module_parameter_registration_hook(
        lambda module, name, parameter: seen.append(name)
    )
    try:
        net(torch.ones(1, 2)).sum().backward()
    finally:
        handle.remove()

    assert seen == []
