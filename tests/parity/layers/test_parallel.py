import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel.replicate import _replicatable_module

import modkit.nn
from tests.helpers import MODKIT, TORCH, freeze, seed_everything


def _net(impl):
    seed_everything()
    return impl.nn.Sequential(impl.nn.Linear(3, 4), impl.nn.BatchNorm1d(4), impl.nn.Linear(4, 2))


@pytest.fixture
def process_group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_data_parallel_without_devices_runs_the_module(impl):
    """On a machine without accelerators the wrapper hands the call on; its state has a prefix."""
    wrapped = impl.nn.DataParallel(_net(impl))
    x = torch.randn(5, 3)

    assert freeze(wrapped.eval()(x)) == freeze(_net(impl).eval()(x))
    assert next(iter(wrapped.state_dict())) == "module.0.weight"
    assert isinstance(wrapped, impl.nn.Module)
    assert wrapped.__module__ == "torch.nn.parallel.data_parallel"
    assert type(pickle.loads(pickle.dumps(wrapped))) is impl.nn.DataParallel


def test_replication_protocol_for_data_parallel(impl):
    """A replica is a new object of the same class, with tables of its own and no parameters."""
    net = _net(impl)
    replicas = [module._replicate_for_data_parallel() for module in net.modules()]

    assert [type(replica) for replica in replicas] == [type(module) for module in net.modules()]
    assert all(not replica._parameters for replica in replicas)
    assert all(replica._buffers is not m._buffers for replica, m in zip(replicas, net.modules()))
    assert all(replica._is_replica for replica in replicas)
    assert _replicatable_module(net)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_distributed_wrapper_trains_as_torch(process_group):
    """Training in the distributed wrapper gives torch's losses and weights."""

    def outcome(impl):
        wrapped = impl.submodule("nn.parallel").DistributedDataParallel(_net(impl))
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        seed_everything(1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = wrapped(torch.randn(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, freeze(dict(wrapped.state_dict())), isinstance(wrapped, impl.nn.Module)

    assert outcome(MODKIT) == outcome(TORCH)
    assert outcome(MODKIT)[2]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_distributed_wrapper_can_be_copied(impl, process_group):
    """The wrapper is pickled without its process group, and restored by class and state."""
    wrapped = impl.submodule("nn.parallel").DistributedDataParallel(_net(impl))
    loaded = pickle.loads(pickle.dumps(wrapped))

    assert type(loaded) is type(wrapped)
    assert freeze(dict(loaded.state_dict())) == freeze(dict(wrapped.state_dict()))


def test_conversion_to_synchronized_batch_norm(impl):
    """Converted layers are of the library that converts, and keep parameters and statistics."""
    net = impl.nn.ModuleDict(
        {"a": impl.nn.Sequential(impl.nn.BatchNorm2d(3)), "b": impl.nn.BatchNorm1d(2, affine=False)}
    )
    net["a"][0].running_mean.fill_(0.5)
    weight = net["a"][0].weight
    linear = impl.nn.Linear(1, 1)
    converted = impl.nn.SyncBatchNorm.convert_sync_batchnorm(net)
    layer = converted["a"][0]

    assert converted is net
    assert [type(module).__name__ for module in net.modules()].count("SyncBatchNorm") == 2
    assert type(layer) is type(net["b"]) is impl.nn.SyncBatchNorm
    assert layer.weight is weight
    assert layer.running_mean.tolist() == [0.5] * 3
    assert layer.__module__ == "torch.nn.modules.batchnorm"
    assert impl.nn.SyncBatchNorm.convert_sync_batchnorm(linear) is linear
    assert (
        type(impl.nn.SyncBatchNorm.convert_sync_batchnorm(impl.nn.BatchNorm3d(1)))
        is impl.nn.SyncBatchNorm
    )


def test_conversion_takes_torch_layers_too():
    """In a mixed tree every batch normalization becomes modkit's; the other layers stay."""
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), modkit.nn.BatchNorm1d(2), torch.nn.ReLU())
    converted = modkit.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net))

    assert [type(m) for m in converted] == [modkit.nn.SyncBatchNorm] * 2 + [torch.nn.ReLU]
    assert type(converted) is torch.nn.Sequential
