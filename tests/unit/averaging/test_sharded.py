import copy
import sys
import warnings
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard

import modkit
from modkit.averaging.sharding import has_shards, is_sharded
from modkit.distributed import FullState, export_average
from modkit.errors import FileError
from modkit.optim.swa_utils import AveragedModel
from tests.cases import for_each
from tests.distributed.averages.networks import whole
from tests.helpers import Implementation, freeze, same
from tests.unit.averaging.recipes import averaged, network, train


@pytest.fixture
def mesh():
    """Return the mesh of one process, which is a group of its own."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def trained(net: nn.Module, **options) -> "modkit.EMA":
    """Return the average of a network that has taken three steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = modkit.EMA(net, decay=0.5, **options).attach(optimizer)
    train(net, optimizer, 0, 3)
    ema.detach()
    return ema


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_average_of_shards_is_applied(mesh, reshard, precision, mode) -> None:
    """A forward inside uses the average, one after it the training weights, resharded or not."""
    net, reference = network(), network()
    for part in net[0], net:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    ema, plain = trained(net, precision=precision), trained(reference, precision=precision)
    batch = torch.randn(8, 4)
    seen = []
    for model, average in (net, ema), (reference, plain):
        model.eval()
        with mode():
            before = model(batch)
            with average.applied():
                with average.applied():
                    inner = model(batch)
                inside = model(batch)
            average.store()
            average.copy_to()
            copied = model(batch)
            average.restore()
            seen.append([before, inner, inside, copied, model(batch)])
        model(batch).sum().backward()

    assert all(map(torch.equal, *seen))
    assert not torch.equal(seen[0][0], seen[0][1])
    assert torch.equal(seen[0][1], seen[0][3])
    assert torch.equal(seen[0][0], seen[0][4])


def test_a_copy_of_the_full_model_does_not_follow_its_shards(mesh) -> None:
    """An AveragedModel that was made before the model was sharded raises torch's error."""

    def update(impl: Implementation) -> None:
        net = network()
        average = impl.AveragedModel(net)
        fully_shard(net, mesh=mesh)
        average.update_parameters(net)

    same(update)


WRITES = {
    "an operation": lambda net: net[0].weight.add_(1),
    "the shard": lambda net: net[0].weight.to_local().add_(1),
    "a state": lambda net: net[0].load_state_dict(
        {k: v + 1 for k, v in net[0].state_dict().items()}
    ),
}


def test_full_and_sharded_models_are_averaged_in_turn(mesh) -> None:
    """The average that is resharded for one model is the one that the other updates, too."""
    net, sharded = nn.Linear(2, 2), nn.Linear(2, 2)
    fully_shard(sharded, mesh=mesh)
    ema = modkit.EMA(net, 0.5)
    expected = 1.0
    for model, value in ((net, 1.0), (net, 1.0), (sharded, 3.0), (net, 4.0), (sharded, 5.0)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        ema.update(model)
        expected = (expected + value) / 2

        assert (whole(averaged(ema)) == expected).all()


@for_each("way", WRITES)
def test_a_write_to_shards_in_a_block_is_lost_with_an_error(mesh, way: str) -> None:
    """The error is that of other tensors, and training weights and average are as before."""
    net = network()
    fully_shard(net, mesh=mesh)
    ema = trained(net)
    expected = freeze([whole(dict(net.state_dict())), whole(ema.state_dict())])

    with (
        pytest.raises(RuntimeError, match=r"0\.weight was written to inside applied"),
        ema.applied(),
        torch.no_grad(),
    ):
        WRITES[way](net)

    assert freeze([whole(dict(net.state_dict())), whole(ema.state_dict())]) == expected


def test_evaluations_of_shards_are_not_training(mesh) -> None:
    """They write to the shards, of which no warning says that an update is missing."""
    net = network()
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    ema = modkit.EMA(net, [0.5, 0.9]).attach(optimizer)
    train(net, optimizer, 0, 3)
    for index in [0, 1] * 6:
        with ema.applied(index=index):
            pass

    assert ema.step == 3


def test_an_update_after_another_optimizer_of_shards_has_no_warning(mesh) -> None:
    """A step of an optimizer that is not attached is a change of the weights."""
    net = network()
    fully_shard(net, mesh=mesh)
    attached, other = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    ema = modkit.EMA(net, decay=0.5).attach(attached)
    for optimizer in attached, other:
        train(net, optimizer, 0, 1)
    ema.update()

    assert ema.n_averaged == 2
    train(net, attached, 0, 1)
    with pytest.warns(UserWarning, match="counts twice"):
        ema.update()


@pytest.mark.parametrize("reshard", [True, False])
def test_a_sharded_model_is_planned_once(mesh, reshard, monkeypatch) -> None:
    """Shards that are looked at again are not a change: they are new tensors with the same memory."""
    from modkit.averaging.engine import Engine

    plans = []
    plan = Engine._plan
    monkeypatch.setattr(Engine, "_plan", lambda *given: plans.append(1) or plan(*given))
    net = network()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = modkit.EMA(net, decay=0.5).attach(optimizer)
    train(net, optimizer, 0, 100)

    assert ema.n_averaged == 100
    assert len(plans) == 1


def flattened(net: nn.Module, original: bool) -> nn.Module:
    """Return the network with flat parameters, and the parameters as views of them if ``original``."""
    with warnings.catch_warnings():
        # One process cannot shard, and FSDP warns about each way to say so.
        warnings.simplefilter("ignore")
        device = torch.device("cpu")
        return FullyShardedDataParallel(net, device_id=device, use_orig_params=original)


@pytest.mark.parametrize("original", [False, True])
def test_flattened_parameters_are_refused(mesh, original) -> None:
    """FSDP1 is named, with what to use instead, wherever it enters, and nothing changes."""
    message = r"EMA: FullyShardedDataParallel flattens parameters.*fully_shard.*Nothing has been"
    with pytest.raises(TypeError, match=message):
        modkit.EMA(flattened(network(), original))
    model = network()
    ema = modkit.EMA(model, decay=0.5)
    ema.update()
    before = freeze(ema.state_dict())
    wrapped = flattened(network(), original)
    model[3] = flattened(nn.Linear(6, 2), original)
    calls = [
        lambda: ema.update(wrapped),
        lambda: ema.applied(wrapped).__enter__(),
        lambda: ema.copy_to(wrapped),
        ema.update,
        ema.rebind,
        lambda: ema.applied().__enter__(),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call()

    assert freeze(ema.state_dict()) == before
    model[3] = nn.Linear(6, 2)
    ema.rebind()
    ema.update()
    assert ema.n_averaged == 2


def partition(net: nn.Module) -> nn.Module:
    """Leave a model as DeepSpeed's ZeRO-3 leaves it between two steps: parameters are empty."""
    for number, parameter in enumerate(net.parameters()):
        parameter.ds_id = number
        parameter.data = torch.empty(0)
    return net


def test_partitioned_parameters_are_refused(tmp_path) -> None:
    """DeepSpeed ZeRO-3 is named wherever it enters, and averages and files stay as they are."""
    message = r"DeepSpeed ZeRO-3 partitions parameters.*Nothing has been changed"
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = modkit.EMA(model, decay=0.5).attach(optimizer)
    averaged_model = AveragedModel(model)
    ema.update()
    before = freeze(ema.state_dict())
    for parameter in partition(model).parameters():
        parameter.grad = torch.zeros_like(parameter)
    calls = [
        lambda: modkit.EMA(model),
        lambda: modkit.EMACallback(model),
        lambda: AveragedModel(model),
        lambda: averaged_model.update_parameters(model),
        lambda: export_average(ema, tmp_path / "average.pt"),
        lambda: ema.applied().__enter__(),
        ema.update,
        ema.rebind,
        optimizer.step,
    ]
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call()

    assert freeze(ema.state_dict()) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("original", [False, True])
def test_an_averaged_model_of_flattened_parameters(mesh, original) -> None:
    """The error is torch's, which cannot copy the model either."""

    def scenario(impl: Implementation) -> object:
        return impl.AveragedModel(flattened(network(), original))

    assert same(scenario)[0] == "raised"


def test_fsdp1_is_looked_for_without_importing_it(monkeypatch) -> None:
    """Where nothing has imported the package, no model can contain it."""
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    ema = modkit.EMA(network())
    ema.update()

    assert "torch.distributed.fsdp" not in sys.modules


def test_a_state_from_inside_has_the_raw_shards(mesh) -> None:
    """Even if the parameters are whole at that moment, as they are after a forward."""
    net = network()
    fully_shard(net, mesh=mesh)
    ema = trained(net)
    raw = whole(dict(net.state_dict()))
    with torch.no_grad(), ema.applied():
        net.eval()(torch.randn(8, 4))
        state = whole(ema.state_dict())

    assert state["raw"].keys() == raw.keys()
    assert all(torch.equal(value, raw[name]) for name, value in state["raw"].items())
    assert not torch.equal(raw["0.weight"], state["averages"][0]["tensors"]["0.weight"])


def test_states_become_whole_and_split_up_again(mesh) -> None:
    """The state of a plain model's average loads into the average of shards, and back."""
    net, reference = network(), network()
    fully_shard(net, mesh=mesh)
    plain, ema = trained(reference), modkit.EMA(net)
    state = copy.deepcopy(plain.state_dict())
    with pytest.warns(UserWarning, match="the schedule is"):
        FullState(ema).load_state_dict(state)
    again = FullState(ema).state_dict()

    assert has_shards(net)
    assert not has_shards(reference)
    assert is_sharded(averaged(ema, "0.weight"))
    found, expected = again["averages"][0]["tensors"], state["averages"][0]["tensors"]
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_state_of_other_placements_is_loaded(mesh) -> None:
    """The averages of a model that is sharded by rows go on in one that is sharded by columns."""
    rows, columns = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    fully_shard(rows, mesh=mesh)
    fully_shard(columns, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    source, ema = modkit.EMA(rows, decay=0.5), modkit.EMA(columns, decay=0.5)
    source.update()
    ema.load_state_dict(source.state_dict())
    found = averaged(ema)

    assert found.placements == (Shard(1),)
    assert torch.equal(found.full_tensor(), averaged(source).full_tensor())


def test_another_thread_imports_the_module(monkeypatch):
    """While `torch.distributed.tensor` is being imported it has no class yet, and no tensor is sharded."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("partial"))

    assert not is_sharded(torch.ones(1))


def test_a_file_with_shards_names_the_import_that_it_needs(mesh, tmp_path) -> None:
    """Only then does torch allow the classes of sharded tensors in a file."""
    net = network()
    fully_shard(net, mesh=mesh)
    modkit.save_checkpoint(trained(net).state_dict(), tmp_path / "last.pt")
    assert modkit.load_checkpoint(tmp_path / "last.pt")["n_averaged"] == 3
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with pytest.raises(FileError, match="to read them, import torch"):
            modkit.load_checkpoint(tmp_path / "last.pt")
    finally:
        torch.serialization.add_safe_globals(allowed)
