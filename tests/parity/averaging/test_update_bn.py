from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import for_each
from tests.helpers import Implementation, freeze, same
from tests.models import normed_net, one_weight


def batches(count: int = 3, width: int = 3) -> list[torch.Tensor]:
    """Return batches of eight inputs."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, width, generator=generator) for _ in range(count)]


class Untouchable:
    """A loader that must not be read."""

    def __iter__(self):
        raise AssertionError("the loader was read")


def loaders(kind: str):
    """Return the same batches in the form that a loader of this kind yields."""
    data = batches()
    labels = torch.zeros(24)
    dataset = torch.utils.data.TensorDataset(torch.cat(data), labels)
    return {
        "tensors": data,
        "tuples": [(batch, "label") for batch in data],
        "lists": [[batch, "label", 3] for batch in data],
        "lists of one": [[batch] for batch in data],
        "generator": (batch for batch in data),
        "DataLoader": torch.utils.data.DataLoader(dataset, batch_size=8),
    }[kind]


@for_each("kind", ["tensors", "tuples", "lists", "lists of one", "generator", "DataLoader"])
def test_kinds_of_loaders(kind: str) -> None:
    """Batches are tensors, or lists and tuples that start with one; the bits equal torch's."""

    def scenario(impl: Implementation):
        model = normed_net(impl)
        impl.update_bn(loaders(kind), model)
        return model

    expected = same(scenario)
    reference = same(lambda impl: (m := normed_net(impl), impl.update_bn(batches(), m))[0])

    assert expected == reference


def test_batches_are_moved_to_the_device(impl: Implementation) -> None:
    """With a device, each batch is moved there before the model is called."""

    class Recorder(torch.Tensor):
        moves = []

        def to(self, *args):
            self.moves.append(args)
            return self.as_subclass(torch.Tensor)

    data = [batch.as_subclass(Recorder) for batch in batches(2)]
    device = torch.device("cpu")
    impl.update_bn([[data[0]], data[1]], normed_net(impl), device=device)

    assert Recorder.moves == [(device,), (device,)]


def test_model_without_batch_norm_leaves_the_loader_alone(impl: Implementation) -> None:
    """Without such a layer nothing is read, called or changed."""
    model = impl.nn.Sequential(one_weight(impl), impl.nn.InstanceNorm1d(3), impl.nn.LayerNorm(3))
    model[0].register_forward_hook(lambda *_: pytest.fail("the model was called"))
    model.eval()
    before = freeze(model)
    impl.update_bn(Untouchable(), model)

    assert freeze(model) == before
    assert not model.training


def momenta(impl: Implementation) -> Any:
    """Each layer's momentum is None during the pass and has its value afterwards."""
    seen = []
    for momentum in 0.1, 0.9, 0.0, None:
        model = normed_net(impl)
        model.append(impl.nn.BatchNorm1d(2, momentum=momentum))
        model.register_forward_hook(lambda m, *_: seen.append((m[1].momentum, m[4].momentum)))
        impl.update_bn(batches(1), model)
        seen.append((model[1].momentum, model[4].momentum))
    return seen


def gradients(impl: Implementation) -> Any:
    """The pass runs without autograd, and the caller's gradient mode is untouched."""
    model = normed_net(impl)
    modes = []
    model.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    return impl.update_bn(batches(1), model), modes, torch.is_grad_enabled()


def kinds(impl: Implementation) -> Any:
    """One-, two- and three-dimensional layers count, and subclasses of them."""

    class Own(impl.nn.BatchNorm2d):
        pass

    layers = []
    shapes = {impl.nn.BatchNorm1d: (8, 2), Own: (8, 2, 3, 3), impl.nn.BatchNorm3d: (8, 2, 3, 3, 3)}
    for kind, shape in shapes.items():
        layers.append(kind(2))
        impl.update_bn([torch.randn(shape) + 5], layers[-1])
    return layers


def without_statistics(impl: Implementation) -> Any:
    """A layer that tracks no statistics is passed through."""
    layer = impl.nn.BatchNorm1d(3, track_running_stats=False)
    impl.update_bn(batches(1), layer)
    return layer.running_mean, layer.momentum


def shared_layer(impl: Implementation) -> Any:
    """A layer that the model holds twice is reset and restored once."""
    layer = impl.nn.BatchNorm1d(3)
    impl.update_bn(batches(1), impl.nn.Sequential(layer, layer))
    return layer, layer.momentum


def averages(impl: Implementation) -> Any:
    """The statistics of an average are renewed for its weights."""
    found = []
    for function in impl.get_swa_avg_fn(), impl.get_ema_avg_fn(0.9):
        model = normed_net(impl)
        averaged = impl.AveragedModel(model, avg_fn=function)
        averaged.update_parameters(model)
        impl.update_bn(batches(), averaged)
        found.append((averaged, averaged.eval()(torch.ones(2, 3))))
    return found


SCENARIOS = [momenta, gradients, kinds, without_statistics, shared_layer, averages]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_outcomes_are_those_of_torch(scenario: Callable[[Implementation], Any]) -> None:
    """The pass leaves the same statistics, modes and momenta as torch's."""
    assert same(scenario)[0] == "returned"


def test_lazy_layers_are_refused_before_anything_changes() -> None:
    """A layer that has not seen data yet raises torch's error, and the model stays as it was."""

    def scenario(impl: Implementation):
        model = impl.nn.Sequential(impl.nn.LazyBatchNorm1d()).eval()
        with pytest.raises(ValueError, match="uninitialized parameter") as caught:
            impl.update_bn(Untouchable(), model)
        return str(caught.value), model.training, model[0].momentum

    assert same(scenario)[0] == "returned"
