"""Diffusion: the training loop of lucidrains/denoising-diffusion-pytorch, with its average."""

import copy
import math

import torch
from torch import nn


class Residual(nn.Module):
    """Adds the input of a module to its output."""

    def __init__(self, fn) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x, *args):
        return self.fn(x, *args) + x


class Time(nn.Module):
    """Sinusoidal embedding of the time step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, time):
        half = self.width // 2
        scale = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
        angles = time[:, None] * scale
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class UNet(nn.Module):
    """One level down and up, with the time added in the middle."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(Time(width), nn.Linear(width, width), nn.SiLU())
        self.down = nn.Conv2d(1, width, 4, stride=2, padding=1)
        self.mid = Residual(
            nn.Sequential(nn.GroupNorm(2, width), nn.Conv2d(width, width, 3, padding=1))
        )
        self.up = nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1)

    def forward(self, x, time):
        skip = self.down(x)
        x = self.mid(skip + self.time(time)[:, :, None, None])
        return self.up(torch.cat((x, skip), dim=1))


class Diffusion(nn.Module):
    """The schedule as buffers, and the loss of the predicted noise."""

    def __init__(self, model, steps: int = 20) -> None:
        super().__init__()
        self.model = model
        alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), dim=0)
        self.register_buffer("sqrt_alphas", alphas.sqrt(), persistent=False)
        self.register_buffer("sqrt_one_minus", (1 - alphas).sqrt())

    def forward(self, images):
        time = torch.randint(len(self.sqrt_alphas), (len(images),))
        noise = torch.randn_like(images)
        signal, sigma = (
            table[time, None, None, None] for table in (self.sqrt_alphas, self.sqrt_one_minus)
        )
        return (self.model(signal * images + sigma * noise, time) - noise).square().mean()


def train():
    """Return the losses and the models."""
    diffusion = Diffusion(UNet())
    average = copy.deepcopy(diffusion)
    optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-3, betas=(0.9, 0.99))
    losses = []
    for _ in range(12):
        loss = diffusion(torch.rand(4, 1, 8, 8) * 2 - 1)
        loss.backward()
        nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            for mean, value in zip(average.parameters(), diffusion.parameters(), strict=True):
                mean.lerp_(value, 0.005)
    return losses, [diffusion, average]
