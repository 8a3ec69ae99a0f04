from collections import namedtuple
from collections.abc import Iterator

import pytest
import torch

from tests.helpers import Implementation, freeze


class Inputs(torch.nn.Module):
    """Normalizes the sum of two inputs, as a model with several inputs would."""

    def __init__(self, impl: Implementation) -> None:
        super().__init__()
        self.norm = impl.own.BatchNorm1d(2)

    def forward(self, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        """Add the two and normalize."""
        return self.norm(x + offset)


def dropping_net(impl: Implementation) -> torch.nn.Module:
    """Build a network in training mode whose dropout and inner normalization are frozen."""
    model = impl.own.Sequential(
        impl.own.Dropout(0.5), impl.own.BatchNorm1d(2), impl.own.BatchNorm1d(2)
    )
    model(torch.randn(8, 2))
    model[0].eval()
    model[2].eval()
    return model


def everything(model: torch.nn.Module) -> object:
    """Freeze all that a pass over data may change."""
    return [
        (module.training, getattr(module, "momentum", None), freeze(dict(module.state_dict())))
        for module in model.modules()
    ]


def as_dict(x: torch.Tensor, offset: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a batch of two named inputs."""
    return {"x": x, "offset": offset}


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_mapping_holds_keyword_arguments(impl: Implementation, device: str | None) -> None:
    """A batch that is a mapping, alone or as first element, is unpacked for the model."""
    model = Inputs(impl)
    x = torch.randn(8, 2)
    impl.update_bn([as_dict(x, x), (as_dict(x, x), "label")], model, device)

    torch.testing.assert_close(model.norm.running_mean, 2 * x.mean(0))


def test_a_function_calls_the_model_with_the_moved_batch(impl: Implementation) -> None:
    """``call_fn`` gets the model and the whole batch, whose tensors were moved, however nested."""
    pair = namedtuple("pair", ["first", "rest"])
    x = torch.randn(8, 2)
    batch = pair(x, [(x, "text"), {"deep": x}])
    seen = []

    def call(model, moved) -> None:
        seen.append(moved)
        model(moved.first.float(), moved.rest[1]["deep"].float())

    model = Inputs(impl)
    impl.update_bn([batch], model, "cpu", call_fn=call)

    assert type(seen[0]) is pair
    assert seen[0].rest[0][1] == "text"
    torch.testing.assert_close(model.norm.running_mean, 2 * x.mean(0))


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_a_failing_loader_leaves_every_module_as_it_was(impl, error: type[BaseException]) -> None:
    """If the pass fails, statistics, modes, momenta and hooks are those of before."""

    def failing() -> Iterator[torch.Tensor]:
        yield torch.randn(8, 2)
        raise error

    model = dropping_net(impl)
    before = everything(model)
    with pytest.raises(error):
        impl.update_bn(failing(), model)

    assert everything(model) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_failing_model_leaves_every_module_as_it_was(impl: Implementation) -> None:
    """A batch that the model refuses leaves it as it was."""
    model = dropping_net(impl)
    before = everything(model)
    with pytest.raises(RuntimeError):
        impl.update_bn([torch.randn(8, 2), torch.randn(8, 3)], model)

    assert everything(model) == before


def test_an_empty_loader_is_an_error(impl: Implementation) -> None:
    """Without any batch the statistics stay, and an error tells why."""
    model = dropping_net(impl)
    before = everything(model)
    with pytest.raises(ValueError, match="the loader is empty"):
        impl.update_bn([], model)

    assert everything(model) == before


def test_samples_weigh_the_same_in_batches_of_several_sizes(impl: Implementation) -> None:
    """A hundred zeros and two tens have the mean and the variance of these 102 numbers."""
    layer = impl.own.BatchNorm1d(1)
    data = [torch.zeros(100, 1), torch.full((2, 1), 10.0)]
    impl.update_bn(data, layer)

    torch.testing.assert_close(layer.running_mean, torch.cat(data).mean(0))
    torch.testing.assert_close(layer.running_var, torch.cat(data).var(0))


def test_pixels_weigh_the_same_in_images_of_several_sizes(impl: Implementation) -> None:
    """In images, everything but the channel counts as a sample."""
    layer = impl.own.BatchNorm2d(3)
    data = [torch.randn(4, 3, 5, 5) + 2, torch.randn(2, 3, 9, 7) - 1]
    impl.update_bn(data, layer)
    pixels = torch.cat([batch.transpose(0, 1).flatten(1) for batch in data], 1)

    torch.testing.assert_close(layer.running_mean, pixels.mean(1))
    torch.testing.assert_close(layer.running_var, pixels.var(1))


def test_only_normalization_runs_in_training_mode(impl: Implementation) -> None:
    """Dropout is off in the pass, so the statistics are those of the data alone."""
    model = impl.own.Sequential(impl.own.Dropout(0.9), impl.own.BatchNorm1d(2)).train()
    data = torch.randn(64, 2) + 3
    impl.update_bn([data], model)

    torch.testing.assert_close(model[1].running_mean, data.mean(0))
    torch.testing.assert_close(model[1].running_var, data.var(0))


def test_every_module_gets_its_own_mode_back(impl: Implementation) -> None:
    """Layers that are frozen in a training model are frozen afterwards."""
    model = dropping_net(impl)
    impl.update_bn([torch.randn(8, 2)], model)

    assert [module.training for module in model.modules()] == [True, False, True, False]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_instance_normalization_gets_statistics_too(impl: Implementation, dimensions: int) -> None:
    """Such a layer that tracks statistics ends with the means over all instances."""
    layer = getattr(impl.own, f"InstanceNorm{dimensions}d")(3, track_running_stats=True)
    data = [torch.randn(count, 3, *[4] * dimensions) + count for count in (6, 2)]
    impl.update_bn([*data], layer)
    instances = torch.cat(data).flatten(2)

    torch.testing.assert_close(layer.running_mean, instances.mean(2).mean(0))
    torch.testing.assert_close(layer.running_var, instances.var(2).mean(0))
    assert layer.momentum == 0.1
