"""Idioms of users' scripts that ask for the class of layers, on a backbone built with torch.nn."""

from typing import Final

import torch
from torch import Tensor

from tests.helpers import Implementation
from tests.integration.networks import agree


class Block(torch.nn.Module):
    """A residual block as torchvision writes it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(channels)
        self.relu = torch.nn.ReLU(inplace=True)
        self.conv2 = torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Add two convolutions to the input."""
        return self.relu(x + self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))


class Backbone(torch.nn.Module):
    """A library's residual network, which knows ``torch.nn`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 4, 3)
        self.layers = torch.nn.Sequential(Block(4), Block(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return one vector of four features for each image."""
        return self.layers(self.stem(x)).mean((2, 3))


CONVOLUTIONS: Final = 5
NORMALIZATIONS: Final = 4


def classifier(impl: Implementation) -> torch.nn.Module:
    """Build a user's network that holds the library's backbone."""
    nn = impl.nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = Backbone()
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.backbone(x)))

    return Classifier()


def test_apply_init() -> None:
    """``apply`` with a function for two kinds of layers reaches those of the backbone."""

    def scenario(impl: Implementation) -> tuple[int, dict[str, Tensor]]:
        nn, reached = impl.nn, []

        def init(module: torch.nn.Module) -> None:
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                reached.append(module)

        state = dict(classifier(impl).apply(init).state_dict())
        return len(reached), state

    reached, _ = agree(scenario)

    assert reached == CONVOLUTIONS + 1


def test_freeze_batch_norm() -> None:
    """A loop over ``modules()`` freezes the statistics of the backbone's BatchNorm layers."""

    def scenario(impl: Implementation) -> tuple[int, dict[str, Tensor], list[Tensor | None]]:
        net, frozen = classifier(impl).train(), 0
        for module in net.modules():
            if isinstance(module, impl.nn.BatchNorm2d):
                module.eval().requires_grad_(requires_grad=False)
                frozen += 1
        net(torch.randn(2, 3, 6, 6)).sum().backward()
        return frozen, dict(net.state_dict()), [p.grad for p in net.parameters()]

    frozen, state, _ = agree(scenario)

    assert frozen == NORMALIZATIONS
    counts = [value for name, value in state.items() if name.endswith("num_batches_tracked")]
    assert not any(counts)


def test_parameters_without_weight_decay() -> None:
    """Biases and the weights of normalizations are told from the others by the layer's class."""

    def scenario(impl: Implementation) -> tuple[list[str], list[Tensor]]:
        net, names = classifier(impl), []
        for path, module in net.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                if name == "bias" or isinstance(module, (impl.nn.LayerNorm, impl.nn.BatchNorm2d)):
                    names.append(f"{path}.{name}")
        parameters = dict(net.named_parameters())
        decayed = [p for name, p in parameters.items() if name not in names]
        exempt = [parameters[name] for name in names]
        optimizer = torch.optim.AdamW(
            [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}], weight_decay=0.5
        )
        net(torch.randn(2, 3, 6, 6)).square().sum().backward()
        optimizer.step()
        return names, list(net.parameters())

    names, _ = agree(scenario)

    # Two of each normalization, the LayerNorm among them, and the biases of the stem and the head.
    assert len(names) == 2 * (NORMALIZATIONS + 1) + 2


def test_dispatch_by_class() -> None:
    """A tool that looks up the exact class of each layer finds those of user and library."""

    def scenario(impl: Implementation) -> dict[str, int]:
        table = {torch.nn.Conv2d: "conv", torch.nn.Linear: "linear", torch.nn.LayerNorm: "norm"}
        found = [table.get(type(module)) for module in classifier(impl).modules()]
        return {name: found.count(name) for name in table.values()}

    assert agree(scenario) == {"conv": CONVOLUTIONS, "linear": 1, "norm": 1}


def test_convert_sync_batch_norm() -> None:
    """The conversion for distributed training reaches the backbone's layers."""

    def scenario(impl: Implementation) -> tuple[list[str], dict[str, Tensor]]:
        net = impl.nn.SyncBatchNorm.convert_sync_batchnorm(classifier(impl))
        return [type(module).__name__ for module in net.modules()], dict(net.state_dict())

    found, _ = agree(scenario)

    assert found.count("SyncBatchNorm") == NORMALIZATIONS
