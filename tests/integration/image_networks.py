"""The networks that the tests of this folder hand to libraries, built from a given ``nn``."""

from types import ModuleType

import torch
from torch import Tensor


def image_net(nn: ModuleType) -> torch.nn.Module:
    """Build a user's classifier of 10 x 10 images on the layers of ``nn``."""

    class ImageNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.bn = nn.BatchNorm2d(8)
            self.relu = nn.ReLU()
            self.pool = nn.MaxPool2d(2)
            self.body = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU())
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.pool(self.relu(self.bn(self.conv(x))))
            return self.head(self.body(x).flatten(1))

    return ImageNet()


def scaled_net(nn: ModuleType) -> torch.nn.Module:
    """Build a user's classifier that has a parameter and a buffer of its own beside the layers."""

    class ScaledNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = image_net(nn)
            self.scale = nn.Parameter(torch.rand(3) + 0.5)
            self.register_buffer("shift", torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.scale + self.shift

    return ScaledNet()


def images(count: int = 2) -> Tensor:
    """Draw a batch of 10 x 10 images."""
    return torch.randn(count, 3, 10, 10)
