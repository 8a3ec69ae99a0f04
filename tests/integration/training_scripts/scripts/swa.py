"""Averaging: the recipe of torch's page on SWA (docs/source/optim.md), then batch statistics."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn


def train():
    """Return the losses and the models."""
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    swa_model = AveragedModel(model)
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    loader = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
    losses = []
    for epoch in range(8):
        for x, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            ema_model.update_parameters(model)
            losses.append(loss.item())
        if epoch > 4:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(loader, swa_model)
    losses += [averaged.eval()(loader[0][0]).sum().item() for averaged in (swa_model, ema_model)]
    return losses, [model, swa_model, ema_model]
