"""Measured memory and communication of ranks, to be compared with the formulas."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import modkit
from modkit import nn
from modkit.averaging.precision import PRECISIONS
from tests.distributed.launcher import run
from tests.distributed.modules.talk import Talk


pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[3]
WIDTH, HIDDEN, BATCH = 7, 12, 5
COUNTS = (1, 3)
DTYPES = (torch.float32, torch.bfloat16)


def formulas() -> dict[str, Any]:
    """Return the formulas of docs/distributed.md."""
    return vars(runpy.run_path(str(ROOT / "docs" / "render.py"))["sharded_memory"])


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return two blocks and a head; 7 rows do not divide by 2 or 3."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        for _ in range(2)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1)).to(dtype)


def units(net: nn.Sequential) -> list[Any]:
    """Return the tensors that ``split`` shards, in the terms of the formulas."""
    make = formulas()["Unit"]
    shapes = [tuple(tuple(one.shape) for one in part.parameters()) for part in net]
    return [make(shapes[0]), make(shapes[1]), make(shapes[2], root=True)]


def split(net: nn.Sequential, **options: Any) -> nn.Sequential:
    """Shard each block, and then the rest."""
    for block in net[:2]:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def nbytes(value: Any) -> int:
    """Add up the bytes that are in this process."""
    found = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return sum(one.to_local().nbytes if isinstance(one, DTensor) else one.nbytes for one in found)


def backward(net: torch.nn.Module, dtype: torch.dtype) -> None:
    """Calculate the gradients of one batch."""
    # As if there were something before it that learns, too.
    inputs = torch.ones(BATCH, WIDTH, dtype=dtype, requires_grad=True)
    net(inputs).square().mean().backward()


def held(net: nn.Sequential, dtype: torch.dtype, precision: Any, count: int) -> dict[str, int]:
    """Return the bytes of each kind after a step, those of the averages without what is raw."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    ema = modkit.EMA(net, decay=[0.9] * count, precision=precision)
    for _ in range(2):
        backward(net, dtype)
        optimizer.step()
        ema.update()
    parameters = list(net.parameters())
    moments = [
        state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    kept = [(one.tensors, one.errors) for one in ema._engine.averages]
    return {
        "parameters": nbytes(parameters),
        "gradients": nbytes([parameter.grad for parameter in parameters]),
        "moments": nbytes(moments),
        "averages": nbytes(kept),
    }


def exchanged(net: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Return the bytes of the tensors in the collectives of a step."""
    # In the second step, DDP agrees on the order of gradients.
    for _ in range(2):
        backward(net, dtype)
    with Talk() as talk:
        backward(net, dtype)
    return {kind: number for kind, number in talk.nbytes.items() if number}


def measure() -> dict[str, Any]:
    """Run in each process: measure all of it."""
    memory = {
        (str(dtype), precision, count): held(split(network(dtype)), dtype, precision, count)
        for dtype in DTYPES
        for precision in PRECISIONS
        for count in COUNTS
    }
    copies = held(network(), torch.float32, "fp32", 1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        f"{block}.{layer}": style()
        for block in "01"
        for layer, style in (("0", ColwiseParallel), ("2", RowwiseParallel))
    }
    averaged = split(network())
    ema = modkit.EMA(averaged, decay=[0.9, 0.99])
    with Talk() as updates:
        ema.update()
    return {
        "memory": memory,
        "copies": copies,
        "fsdp": exchanged(split(network())),
        "fsdp bf16": exchanged(split(network(), mp_policy=policy)),
        "ddp": exchanged(DistributedDataParallel(network())),
        "tp": exchanged(parallelize_module(network(), mesh, plan)),
        "update": dict(updates.counts),
    }


@pytest.fixture(scope="module", params=[1, 2, 3])
def measured(request, tmp_path_factory):
    """Measure on one, two and three processes."""
    folder = tmp_path_factory.mktemp("planning")
    return run(request.param, measure, folder=folder, limit=120.0)


def compare(found: dict[str, int], planned) -> None:
    """Assert that what was exchanged is what was planned."""
    assert found == {kind: number for kind, number in vars(planned).items() if number}


def test_each_process_holds_what_was_planned(measured) -> None:
    """Parameters, gradients, moments and averages of each precision have that many bytes."""
    for rank, found in enumerate(measured):
        shard = sum(unit.shard(len(measured), rank) for unit in units(network()))
        for (dtype, precision, averages), held in found["memory"].items():
            kind = getattr(torch, dtype.removeprefix("torch."))

            assert held == vars(formulas()["memory"](shard, kind, precision, averages))


def test_no_process_holds_more_than_the_first(measured) -> None:
    """The formula for the first rank is that for the largest, and all shards are the whole."""
    parts = [units(network()), range(len(measured))]
    shards = [sum(unit.shard(len(measured), rank) for unit in parts[0]) for rank in parts[1]]

    assert max(shards) == shards[0]
    assert sum(shards) == sum(unit.numel for unit in parts[0])


def test_copies_hold_what_was_planned(measured) -> None:
    """Each process of DDP has all of it."""
    whole = sum(unit.numel for unit in units(network()))
    for found in measured:
        assert found["copies"] == vars(formulas()["memory"](whole, averages=1))


def test_steps_exchange_what_was_planned(measured) -> None:
    """The collectives of FSDP2, DDP and tensor parallelism carry that many bytes."""
    ranks = len(measured)
    for found in measured:
        compare(found["ddp"], formulas()["ddp"](units(network())))
        if ranks > 1:
            narrow = formulas()["fsdp"](units(network()), ranks, param_dtype=torch.bfloat16)
            compare(found["fsdp"], formulas()["fsdp"](units(network()), ranks))
            compare(found["fsdp bf16"], narrow)
            compare(found["tp"], formulas()["tensor_parallel"](2, BATCH, WIDTH))


def test_updates_of_averages_exchange_nothing(measured) -> None:
    """The formulas hold for any world size and any number of averages."""
    assert [found["update"] for found in measured] == [{}] * len(measured)
