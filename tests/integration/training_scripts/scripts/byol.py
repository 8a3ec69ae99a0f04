"""Self-supervised with a momentum teacher: lucidrains/byol-pytorch, with its forward hook."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class NetWrapper(nn.Module):
    """Takes the output of a hidden layer by a hook, and makes the projector at the first call."""

    def __init__(self, net, layer: str) -> None:
        super().__init__()
        self.net = net
        self.hidden = {}
        self.projector = None
        dict(self.net.named_modules())[layer].register_forward_hook(self._hook)

    def _hook(self, _, _input, output):
        self.hidden["output"] = output.flatten(1)

    def forward(self, x):
        self.net(x)
        features = self.hidden.pop("output")
        if self.projector is None:
            self.projector = nn.Sequential(
                nn.Linear(features.shape[1], 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
            )
        return self.projector(features)


class BYOL(nn.Module):
    """Online and target networks."""

    def __init__(self, net) -> None:
        super().__init__()
        self.online_encoder = NetWrapper(net, "1")
        self.online_predictor = nn.Linear(8, 8)
        self.target_encoder = None
        self.forward(torch.randn(2, 1, 8, 8))

    def forward(self, x):
        one, two = x + 0.1 * torch.randn_like(x), x.flip(-1)
        prediction_one, prediction_two = (
            self.online_predictor(self.online_encoder(view)) for view in (one, two)
        )
        if self.target_encoder is None:
            self.target_encoder = copy.deepcopy(self.online_encoder).requires_grad_(False)
        with torch.no_grad():
            target_one, target_two = (self.target_encoder(view) for view in (one, two))
        return (
            4
            - 2 * F.cosine_similarity(prediction_one, target_two).mean()
            - 2 * F.cosine_similarity(prediction_two, target_one).mean()
        )

    def update_moving_average(self):
        """Move the teacher towards the student."""
        encoders = (self.target_encoder, self.online_encoder)
        for target, online in zip(*(each.parameters() for each in encoders), strict=True):
            target.data = target.data * 0.99 + online.data * 0.01


def train():
    """Return the losses and the models."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    )
    learner = BYOL(net)
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = learner(torch.randn(6, 1, 8, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.update_moving_average()
        losses.append(loss.item())
    return losses, [learner]
