"""GAN: pytorch/examples (dcgan/main.py), on random images."""

import torch
import torch.nn as nn


def weights_init(m):
    """Initialize by the name of the class, as the example does."""
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    """Noise to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(5, 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    """Image to a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1, 1).squeeze(1)


def train():
    """Return the losses and the models."""
    generator, discriminator = Generator(), Discriminator()
    generator.apply(weights_init)
    discriminator.apply(weights_init)
    criterion = nn.BCELoss()
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    real, fake = torch.ones(4), torch.zeros(4)
    losses = []
    for _ in range(8):
        discriminator.zero_grad()
        error_real = criterion(discriminator(torch.randn(4, 1, 8, 8)), real)
        error_real.backward()
        images = generator(torch.randn(4, 5, 1, 1))
        error_fake = criterion(discriminator(images.detach()), fake)
        error_fake.backward()
        of_d.step()
        generator.zero_grad()
        error_g = criterion(discriminator(images), real)
        error_g.backward()
        of_g.step()
        losses += [error_real.item(), error_fake.item(), error_g.item()]
    return losses, [generator, discriminator]
