import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers import Implementation


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
