import copy
import pickle

import torch
from torchmetrics import Accuracy, MeanMetric, Metric, MetricCollection


def _with_metric(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 3)
            self.accuracy = Accuracy("multiclass", num_classes=3)
            self.losses = nn.ModuleDict({"fit": MeanMetric(), "val": MeanMetric()})

        def forward(self, x, y):
            logits = self.body(x)
            self.losses["fit"].update(nn.functional.cross_entropy(logits, y))
            return self.accuracy(logits, y)

    return Net()


def _batch():
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


def _own_metric(nn):
    class Weighted(Metric):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
            self.add_state("seen", [], dist_reduce_fx="cat")

        def update(self, x):
            self.total += self.net(x).sum().detach()
            self.seen.append(x)

        def compute(self):
            return self.total, torch.cat(self.seen)

    return Weighted()


def metric_as_a_child(nn):
    net = _with_metric(nn)
    return [net(*_batch()) for _ in range(3)], net.accuracy.compute(), net.losses["fit"].compute()


def text_and_names(nn):
    net = _with_metric(nn)
    return repr(net), [n for n, _ in net.named_modules()], [*net.state_dict()]


def persistent_states(nn):
    net = _with_metric(nn)
    net.accuracy.persistent(True)
    net(*_batch())
    other = _with_metric(nn)
    other.accuracy.persistent(True)
    return net.state_dict(), other.load_state_dict(net.state_dict()), other.accuracy.compute()


def deepcopy(nn):
    net = _with_metric(nn)
    net(*_batch())
    return copy.deepcopy(net), copy.deepcopy(net).accuracy.compute()


def collection(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            kinds = {
                name: Accuracy("multiclass", num_classes=3, average=name)
                for name in ("micro", "macro")
            }
            self.metrics = MetricCollection(kinds, prefix="val_")
            self.test = self.metrics.clone(prefix="test_")

        def forward(self, x, y):
            return self.metrics(x, y)

    net = Net()
    x, y = torch.randn(6, 3), torch.randint(0, 3, (6,))
    return net(x, y), net, [n for n, _ in net.named_children()], net.test.state_dict()


def own_metric(nn):
    metric = _own_metric(nn)
    for _ in range(2):
        metric(torch.randn(3, 4))
    return metric.compute(), repr(metric), [n for n, _ in metric.named_parameters()]


def pickled(nn):
    net = _with_metric(nn)
    net(*_batch())
    return pickle.loads(pickle.dumps(net.accuracy)).compute()
