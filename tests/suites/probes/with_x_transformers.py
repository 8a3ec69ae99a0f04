import copy

import torch
from x_transformers import (
    AutoregressiveWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
)


def _decoder():
    return TransformerWrapper(
        num_tokens=11, max_seq_len=8, attn_layers=Decoder(dim=16, depth=2, heads=2)
    )


def _tokens():
    return torch.randint(0, 11, (2, 8))


def _user_model(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = _decoder()
            self.head = nn.Linear(11, 3)

        def forward(self, x):
            return self.head(self.body(x))

    return Net()


def decoder_in_a_user_module(nn):
    net = _user_model(nn)
    out = net(_tokens())
    out.sum().backward()
    return out, [p.grad for p in net.parameters() if p.grad is not None], repr(net)


def deepcopy(nn):
    net = _user_model(nn)
    return copy.deepcopy(net)(_tokens())


def user_token_embedding(nn):
    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 16)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.table(x) * self.scale

    net = TransformerWrapper(
        num_tokens=11,
        max_seq_len=8,
        token_emb=Embed(),
        attn_layers=Encoder(dim=16, depth=1, heads=2),
    )
    return net(_tokens()), net


def autoregressive(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapped = AutoregressiveWrapper(_decoder())

        def forward(self, x):
            return self.wrapped(x)

    net = Net()
    loss = net(_tokens())
    return loss, net.eval().wrapped.generate(
        torch.zeros(1, 1, dtype=torch.long), 4, temperature=0.0
    )


def hooks(nn):
    net, seen = _user_model(nn), []
    for name, module in net.named_modules():
        module.register_forward_hook(lambda m, a, o, name=name: seen.append(name))
    net(_tokens())
    return seen
