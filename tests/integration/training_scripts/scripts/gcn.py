"""Graph network: tkipf/pygcn (layers.py, train.py), on a random graph."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import Module
from torch.nn.parameter import Parameter


class GraphConvolution(Module):
    """Simple GCN layer."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(in_features, out_features))
        self.bias = Parameter(torch.empty(out_features))
        self.register_parameter("scale", None)
        self.reset_parameters()

    def reset_parameters(self):
        bound = 1.0 / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-bound, bound)
        self.bias.data.uniform_(-bound, bound)

    def forward(self, x, adjacency):
        return torch.spmm(adjacency, torch.mm(x, self.weight)) + self.bias


class GCN(nn.Module):
    """Two layers with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(8, 16), GraphConvolution(16, 3)

    def forward(self, x, adjacency):
        x = F.dropout(F.relu(self.gc1(x, adjacency)), 0.5, training=self.training)
        return F.log_softmax(self.gc2(x, adjacency), dim=1)


def train():
    """Return the losses and the models."""
    edges = (torch.rand(20, 20) < 0.2).float() + torch.eye(20)
    adjacency = (edges / edges.sum(1, keepdim=True)).to_sparse()
    x, labels = torch.randn(20, 8), torch.randint(3, (20,))
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(15):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, adjacency)[:12], labels[:12])
        loss.backward()
        optimizer.step()
        model.eval()
        losses += [loss.item(), F.nll_loss(model(x, adjacency)[12:], labels[12:]).item()]
    return losses, [model]
