"""Detection: the ModelEMA of ultralytics/yolov5 (utils/torch_utils.py, train.py), random targets."""

import math
from copy import deepcopy

import torch
from torch import nn


class ModelEMA:
    """Moving average of everything in the state dict, with a decay that ramps up."""

    def __init__(self, model, decay: float = 0.9999, tau: float = 20) -> None:
        self.ema = deepcopy(model).eval()
        self.updates = 0
        self.decay = lambda updates: decay * (1 - math.exp(-updates / tau))
        for parameter in self.ema.parameters():
            parameter.requires_grad_(False)

    def update(self, model):
        """Update the average."""
        self.updates += 1
        decay = self.decay(self.updates)
        state = model.state_dict()
        for name, value in self.ema.state_dict().items():
            if value.dtype.is_floating_point:
                value *= decay
                value += (1 - decay) * state[name].detach()


class Conv(nn.Module):
    """Convolution, normalization and activation."""

    default_act = nn.SiLU()

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(after)
        self.act = self.default_act

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


def train():
    """Return the losses and the models."""
    model = nn.Sequential(Conv(3, 8, 2), Conv(8, 8, 1), nn.Conv2d(8, 6, 1))
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.eps, module.momentum = 1e-3, 0.03
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True)
    optimizer.add_param_group({"params": biases, "weight_decay": 0.0})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / 10)
    ema, criterion = ModelEMA(model), nn.BCEWithLogitsLoss()
    losses = []
    for _ in range(3):
        model.train()
        for _ in range(4):
            loss = criterion(model(torch.rand(2, 3, 8, 8)), torch.rand(2, 6, 4, 4).round())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
            losses.append(loss.item())
        schedule.step()
        with torch.no_grad():
            losses.append(ema.ema(torch.rand(2, 3, 8, 8)).mean().item())
    return losses, [model, ema.ema]
