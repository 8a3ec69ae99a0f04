import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import modkit.nn
from tests.helpers import Implementation, same
from tests.integration.networks import agree


REASON: Final = "needs opacus: nox -s ecosystem installs it"
# Opacus warns that its random numbers are not secure, and torch that the first layer of a network
# has an input without gradients.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed"),
]


class TorchHolder(torch.nn.Module):
    """A user's network with one layer; opacus clones it with pickle, which must import it."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer


class ModkitHolder(modkit.nn.Module):
    """A user's network with one layer on ``modkit.nn``, which pickle can import as well."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer


HOLDERS: Final[dict[str, type[torch.nn.Module]]] = {"torch": TorchHolder, "modkit": ModkitHolder}
LAYERS: Final[dict[str, Callable[[ModuleType], torch.nn.Module]]] = {
    "BatchNorm1d": lambda nn: nn.BatchNorm1d(4),
    "BatchNorm2d": lambda nn: nn.BatchNorm2d(4),
    "BatchNorm2d-untracked": lambda nn: nn.BatchNorm2d(4, track_running_stats=False),
    "SyncBatchNorm": lambda nn: nn.SyncBatchNorm(4),
    "LSTM": lambda nn: nn.LSTM(4, 4, batch_first=True),
    "GRU": lambda nn: nn.GRU(4, 4, batch_first=True),
    "MultiheadAttention": lambda nn: nn.MultiheadAttention(4, 2),
    "InstanceNorm2d": lambda nn: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_validate(layer: str) -> None:
    """The validator refuses layers that mix samples or have no gradient of each sample."""
    validators = pytest.importorskip("opacus.validators", reason=REASON)

    def scenario(impl: Implementation) -> list[tuple[str, str]]:
        net = HOLDERS[impl.name](LAYERS[layer](impl.nn))
        errors = validators.ModuleValidator.validate(net, strict=False)
        return [(type(error).__name__, str(error)) for error in errors]

    assert len(agree(scenario)) == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_fix(layer: str) -> None:
    """Fix replaces such a layer, or the option of it, and leaves a network that is valid."""
    validators = pytest.importorskip("opacus.validators", reason=REASON)

    def scenario(impl: Implementation) -> tuple[str, str, dict[str, Tensor], bool]:
        net = HOLDERS[impl.name](LAYERS[layer](impl.nn))
        fixed = validators.ModuleValidator.fix(net).layer
        valid = validators.ModuleValidator.is_valid(HOLDERS[impl.name](fixed))
        return repr(net.layer), repr(fixed), dict(fixed.state_dict()), valid

    before, after, _, valid = agree(scenario)

    assert before != after
    assert valid


def images_net(nn: ModuleType, norm: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Build a user's classifier of 8 x 8 images with a normalization of choice."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(1, 4, 3), norm(), nn.ReLU()
            self.head = nn.Linear(144, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.relu(self.norm(self.conv(x))).flatten(1))

    return Net()


def make_private(
    opacus: ModuleType, impl: Implementation, net: torch.nn.Module, mode: str
) -> tuple[Any, ...]:
    """Hand a network, an optimizer and 64 images to the privacy engine."""
    data = torch.utils.data.TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(0, 3, (64,)))
    criterion = impl.nn.CrossEntropyLoss()
    engine = opacus.PrivacyEngine()
    model, optimizer, *ghost, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        criterion=criterion,
    )
    return engine, model, optimizer, (ghost[0] if ghost else criterion), loader


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_batch_norm_is_refused(mode: str) -> None:
    """The privacy engine refuses a network whose BatchNorm mixes the samples of a batch."""
    opacus = pytest.importorskip("opacus", reason=REASON)

    def scenario(impl: Implementation) -> object:
        norm = lambda: impl.nn.BatchNorm2d(4, track_running_stats=False)
        return make_private(opacus, impl, images_net(impl.nn, norm), mode)

    kind, error, text = same(scenario)

    assert (kind, error) == ("raised", "UnsupportedModuleError")
    assert "BatchNorm" in text


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_private_training(mode: str) -> None:
    """A valid network trains with clipped gradients and noise, and spends the same privacy."""
    opacus = pytest.importorskip("opacus", reason=REASON)

    def scenario(impl: Implementation) -> tuple[float, bool, dict[str, Tensor]]:
        net = images_net(impl.nn, lambda: impl.nn.GroupNorm(2, 4))
        before = copy.deepcopy(net.state_dict())
        engine, model, optimizer, criterion, loader = make_private(opacus, impl, net, mode)
        for x, target in loader:
            optimizer.zero_grad()
            criterion(model(x), target).backward()
            optimizer.step()
        state = dict(net.state_dict())
        changed = all(not torch.equal(state[name], old) for name, old in before.items())
        return engine.get_epsilon(1e-5), changed, state

    epsilon, changed, _ = agree(scenario)

    assert epsilon > 0
    assert changed


INPUTS: Final[dict[str, tuple[Callable[[ModuleType], torch.nn.Module], Callable[[], Tensor]]]] = {
    "Linear": (lambda nn: nn.Linear(5, 3), lambda: torch.randn(4, 5)),
    "Conv2d": (lambda nn: nn.Conv2d(2, 3, 3, stride=2), lambda: torch.randn(4, 2, 7, 7)),
    "Embedding": (lambda nn: nn.Embedding(9, 3), lambda: torch.randint(0, 9, (4, 6))),
    "EmbeddingBag": (
        lambda nn: nn.EmbeddingBag(9, 3, mode="sum"),
        lambda: torch.randint(0, 9, (6,)),
    ),
    "LayerNorm": (lambda nn: nn.LayerNorm(5), lambda: torch.randn(4, 5)),
    "GroupNorm": (lambda nn: nn.GroupNorm(2, 4), lambda: torch.randn(4, 4, 3)),
}


def counted(table: dict[type, Any], kind: type, calls: list[type]) -> Callable[..., Any]:
    """Wrap the entry of a table of samplers to note its calls."""
    sampler = table[kind]

    def noted(layer: torch.nn.Module, *args: Any) -> Any:
        calls.append(type(layer))
        return sampler(layer, *args)

    return noted


def user_net(nn: ModuleType, layer: torch.nn.Module) -> torch.nn.Module:
    """Build a user's network that calls one layer, an EmbeddingBag with bags of two sizes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.layer, nn.EmbeddingBag):
                return self.layer(x, torch.tensor([0, 2, 5]))
            return self.layer(x)

    return Net()


@pytest.mark.parametrize("layer", INPUTS)
def test_grad_sampler(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of each sample come from the sampler that is written for the layer."""
    grad_sample = pytest.importorskip("opacus.grad_sample", reason=REASON)
    build, draw = INPUTS[layer]

    def scenario(impl: Implementation) -> tuple[list[type], dict[str, Tensor]]:
        calls: list[type] = []
        table, kind = grad_sample.GradSampleModule.GRAD_SAMPLERS, getattr(torch.nn, layer)
        with monkeypatch.context() as patch:
            patch.setitem(table, kind, counted(table, kind, calls))
            model = grad_sample.GradSampleModule(user_net(impl.nn, build(impl.nn)))
            model(draw()).square().sum().backward()
        return calls, {name: p.grad_sample for name, p in model.named_parameters()}

    calls, samples = agree(scenario)

    assert len(calls) == 1
    assert all(sample.count_nonzero() > 0 for sample in samples.values())


@pytest.mark.parametrize("layer", ["Linear", "Embedding"])
def test_norm_sampler(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ghost clipping takes the norm of each gradient from the sampler that is written for it."""
    grad_sample = pytest.importorskip("opacus.grad_sample", reason=REASON)
    build, draw = INPUTS[layer]

    def scenario(impl: Implementation) -> tuple[list[type], Tensor]:
        calls: list[type] = []
        ghost = grad_sample.GradSampleModuleFastGradientClipping
        table, kind = ghost.NORM_SAMPLERS, getattr(torch.nn, layer)
        with monkeypatch.context() as patch:
            patch.setitem(table, kind, counted(table, kind, calls))
            model = ghost(user_net(impl.nn, build(impl.nn)), max_grad_norm=1.0)
            model(draw()).square().sum().backward()
        return calls, model.get_norm_sample()

    calls, norms = agree(scenario)

    assert len(calls) == 1
    assert norms.shape == (4,)
    assert norms.count_nonzero() == 4


def test_sampler_of_a_user_module() -> None:
    """A user's module with parameters has no sampler, so functorch differentiates its forward."""
    grad_sample = pytest.importorskip("opacus.grad_sample", reason=REASON)

    def scenario(impl: Implementation) -> dict[str, Tensor]:
        nn = impl.nn

        class Affine(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale, self.shift = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(5))

            def forward(self, x: Tensor) -> Tensor:
                return x * self.scale + self.shift

        model = grad_sample.GradSampleModule(user_net(nn, nn.Sequential(nn.Linear(5, 5), Affine())))
        model(torch.randn(4, 5)).square().sum().backward()
        return {name: p.grad_sample for name, p in model.named_parameters()}

    samples = agree(scenario)

    assert samples["_module.layer.1.scale"].shape == (4, 5)
    assert all(sample.count_nonzero() > 0 for sample in samples.values())


def test_expanded_weights() -> None:
    """With expanded weights torch itself computes the gradient of each sample."""
    grad_sample = pytest.importorskip("opacus.grad_sample", reason=REASON)

    def scenario(impl: Implementation) -> dict[str, Tensor]:
        net = images_net(impl.nn, lambda: impl.nn.GroupNorm(2, 4))
        model = grad_sample.GradSampleModuleExpandedWeights(net, loss_reduction="sum")
        model(torch.randn(4, 1, 8, 8)).square().sum().backward()
        return {name: p.grad_sample for name, p in model.named_parameters()}

    samples = agree(scenario)

    assert all(len(sample) == 4 for sample in samples.values())
