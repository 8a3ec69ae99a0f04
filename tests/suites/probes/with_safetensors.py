import tempfile
from pathlib import Path

import torch
from safetensors.torch import load, load_model, save, save_model

from tests.integration.networks import conv_net, free_net, lstm_net


def _file():
    return Path(tempfile.mkdtemp()) / "model.safetensors"


def _tied(nn):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    return Tied()


def _round_trip(build, nn):
    file = _file()
    net, other = build(nn), build(nn)
    save_model(net, str(file))
    return load_model(other, str(file)), other, file.read_bytes()


def convolutions(nn):
    return _round_trip(conv_net, nn)


def tied(nn):
    return _round_trip(_tied, nn)


def tied_state_dict_is_refused(nn):
    try:
        save(_tied(nn).state_dict())
    except RuntimeError as error:
        return str(error)


def missing_keys_are_refused(nn):
    file = _file()
    save_model(conv_net(nn), str(file))
    try:
        load_model(free_net(nn), str(file))
    except RuntimeError as error:
        return str(error)


def not_contiguous(nn):
    net = conv_net(nn).to(memory_format=torch.channels_last)
    return sorted(load(save({k: v.contiguous() for k, v in net.state_dict().items()})).items())


def assigned(nn):
    net = lstm_net(nn)
    found = net.load_state_dict(load(save(lstm_net(nn).state_dict())), assign=True)
    return found, net(torch.ones(1, 3, dtype=torch.long))
