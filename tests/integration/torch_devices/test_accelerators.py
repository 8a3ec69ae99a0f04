"""Networks on an accelerator: moves, shards, and memory that runs out, with the bits of torch."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import Implementation
from tests.integration.networks import NETWORKS, agree, make_batch, make_net, train


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def on(device: str, impl: Implementation, name: str = "nested") -> tuple[torch.nn.Module, Tensor]:
    """Return the network of that name and its batch, on a device."""
    return make_net(impl.nn, name).to(device), make_batch(name).to(device)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Let cuDNN choose kernels whose sums have one order."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """Start a group of one process, with NCCL where there is a GPU."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# --- on any device --------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("error")
def test_moves_and_casts(name: str, device: str) -> None:
    """A network goes to the device, through dtypes and the meta device, and computes as in torch.

    No warning of cuDNN says that the weights of the LSTM are in pieces.
    """

    def scenario(impl: Implementation) -> Any:
        net, batch = on(device, impl, name)
        seen = [net(batch)]
        saved = copy.deepcopy(net.state_dict())
        for move in (
            lambda: net.half().float(),
            lambda: net.cpu().to(device, non_blocking=True),
            lambda: net.to("meta").to_empty(device=device).load_state_dict(saved),
            lambda: net.load_state_dict({key: t.cpu() for key, t in saved.items()}),
        ):
            move()
            seen += [net(batch), [(p.device.type, p.dtype, p.stride()) for p in net.parameters()]]
        return seen, net.state_dict()

    agree(scenario)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic", "process_group")
def test_shards_on_nccl() -> None:
    """FSDP2 with float32, with mixed precision and with offloaded parameters."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policies: list[dict[str, Any]] = [
        {},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": CPUOffloadPolicy()},
    ]

    def scenario(impl: Implementation) -> Any:
        seen: list[Any] = []
        for policy in policies:
            net, batch = on("cpu" if "offload_policy" in policy else "cuda", impl)
            for block in net.blocks:
                fully_shard(block, **policy)
            fully_shard(net, **policy)
            seen += [train(net, batch.cuda()), type(net).__name__]
            seen.append({key: t.to_local() for key, t in net.state_dict().items()})
        return seen

    agree(scenario)


@pytest.mark.gpu
def test_memory_runs_out_while_a_network_is_moved() -> None:
    """The parameters that did not fit are where they were, and a later move completes it."""

    def scenario(impl: Implementation) -> Any:
        class Large(impl.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = impl.nn.Linear(8, 8)
                self.large = impl.nn.Linear(2**14, 2**14, bias=False)
                self.last = impl.nn.Linear(8, 8)

        net = Large()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        allowed = torch.cuda.memory_reserved() + 2**28
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                net.cuda()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        before = [parameter.device.type for parameter in net.parameters()]
        net.cuda()
        return before, [parameter.device.type for parameter in net.parameters()]

    agree(scenario)
