import pytest
import torch

from modkit import nn
from modkit.optim import swa_utils
from modkit.optim.swa_utils import update_bn


def uneven() -> list[torch.Tensor]:
    """Return batches of several sizes."""
    return [torch.randn(count, 2) * count for count in (8, 8, 3)]


def test_pooling_can_be_asked_for_in_batches_of_one_size() -> None:
    """With ``pooled=True`` what differs between batches is part of the variance."""
    layer = nn.BatchNorm1d(1)
    data = [torch.zeros(4, 1), torch.ones(4, 1)]
    update_bn(data, layer, pooled=True)

    torch.testing.assert_close(layer.running_var, torch.cat(data).var(0))


def test_pooling_can_be_declined() -> None:
    """With ``pooled=False`` each batch weighs the same, to the bits of torch."""
    ours, theirs = nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    data = uneven()
    update_bn(data, ours, pooled=False)
    torch.optim.swa_utils.update_bn(data, theirs)

    assert torch.equal(ours.running_mean, theirs.running_mean)
    assert torch.equal(ours.running_var, theirs.running_var)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_statistics_have_the_dtype_of_the_layer(dtype: torch.dtype) -> None:
    """Pooled statistics are summed up in double precision and stored in the layer's dtype."""
    layer = nn.BatchNorm1d(2).to(dtype)
    data = [batch.to(dtype) for batch in uneven()]
    update_bn(data, layer)
    together = torch.cat(data).double()

    torch.testing.assert_close(layer.running_mean, together.mean(0).to(dtype))
    torch.testing.assert_close(layer.running_var, together.var(0).to(dtype))


def test_only_so_many_batches_are_used() -> None:
    """The loader is asked for no more than ``max_batches`` batches."""
    layer = nn.BatchNorm1d(2)
    loader = iter(uneven())
    update_bn(loader, layer, max_batches=2)

    assert layer.num_batches_tracked == 2
    assert len(next(loader)) == 3


def test_no_batches_at_all_cannot_be_asked_for() -> None:
    """A ``max_batches`` below one is refused."""
    with pytest.raises(ValueError, match="max_batches must be at least 1, got 0"):
        update_bn(uneven(), nn.BatchNorm1d(2), max_batches=0)


def test_a_shared_layer_pools_all_of_its_calls() -> None:
    """A layer that is called twice for each batch has seen the inputs of both calls."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm(x)
            return self.norm(input=x + 1)

    model = Twice()
    data = uneven()
    update_bn(data, model)
    seen = torch.cat([part for batch in data for part in (batch, batch + 1)])

    torch.testing.assert_close(model.norm.running_mean, seen.mean(0))
    torch.testing.assert_close(model.norm.running_var, seen.var(0))


def test_an_unbatched_instance_counts_as_one() -> None:
    """An input without batch dimension is one instance."""
    layer = nn.InstanceNorm1d(2, track_running_stats=True)
    data = [torch.randn(2, 5), torch.randn(3, 2, 5)]
    update_bn(data, layer)
    instances = torch.cat([data[0][None], data[1]])

    torch.testing.assert_close(layer.running_mean, instances.mean(2).mean(0))
    torch.testing.assert_close(layer.running_var, instances.var(2).mean(0))


def test_layers_that_are_never_called_are_reset() -> None:
    """A layer that the model does not use ends with the statistics of a new one, as in torch."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.unused = nn.BatchNorm1d(2)
    model.unused(torch.randn(8, 2))
    update_bn(uneven(), model, call_fn=lambda whole, batch: whole[0](batch))

    assert model.unused.running_mean.tolist() == [0.0, 0.0]
    assert model.unused.num_batches_tracked == 0


def test_compiled_layers_are_not_pooled() -> None:
    """What compiled code passes by is not guessed: the layer keeps what it has computed."""
    layer, eager = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    compiled = torch.compile(layer, backend="eager")
    data = uneven()
    compiled(data[0])
    update_bn(data, compiled)
    together = torch.cat(data)
    update_bn(data, eager, pooled=False)

    assert any(
        torch.allclose(layer.running_mean, expected)
        for expected in (together.mean(0), eager.running_mean)
    )


@pytest.fixture
def single_process():
    """Let this process be a group of its own."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_a_process_group_pools_what_all_have_seen(single_process) -> None:
    """With a process group, samples are pooled whatever the sizes of the batches are."""
    layer = nn.BatchNorm1d(2)
    data = [torch.randn(4, 2), torch.randn(4, 2) + 5]
    update_bn(data, layer, process_group=single_process)
    together = torch.cat(data)

    torch.testing.assert_close(layer.running_mean, together.mean(0))
    torch.testing.assert_close(layer.running_var, together.var(0))


def test_an_average_is_updated_by_keyword() -> None:
    """The arguments of modkit work on an averaged model, as those of torch do."""
    average = swa_utils.AveragedModel(nn.BatchNorm1d(2))
    data = uneven()
    update_bn([{"batch": x} for x in data], average, call_fn=lambda m, batch: m(batch["batch"]))

    torch.testing.assert_close(average.module.running_mean, torch.cat(data).mean(0))
