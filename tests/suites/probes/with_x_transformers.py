import copy

import torch
from x_transformers import (
    AutoregressiveWrapper,
    ContinuousTransformerWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)
from x_transformers.x_transformers import Attention, FeedForward


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


def names_and_state(nn):
    net = _user_model(nn)
    return net.state_dict(), [n for n, _ in net.named_modules()]


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


def user_logits(nn):
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(16, 5, bias=False)

        def forward(self, x):
            return self.out(x).log_softmax(-1)

    net = TransformerWrapper(
        num_tokens=11,
        max_seq_len=8,
        to_logits=Logits(),
        attn_layers=Decoder(dim=16, depth=1, heads=2),
    )
    return net(_tokens())


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


def cross_attention(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.read = nn.Linear(4, 16)
            self.body = Decoder(dim=16, depth=1, heads=2, cross_attend=True, use_rmsnorm=True)

        def forward(self, x, context):
            return self.body(self.read(x), context=self.read(context))

    net = Net()
    return (
        net(torch.randn(2, 3, 4), torch.randn(2, 5, 4)),
        [n for n, _ in net.named_parameters()],
        net,
    )


def images(nn):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = ViTransformerWrapper(
                image_size=8,
                patch_size=4,
                num_classes=3,
                attn_layers=Encoder(dim=16, depth=1, heads=2),
            )

        def forward(self, x):
            return self.vit(x)

    return Net().eval()(torch.randn(2, 3, 8, 8)), Net()


def continuous(nn):
    net = ContinuousTransformerWrapper(
        dim_in=4, dim_out=3, max_seq_len=8, attn_layers=Encoder(dim=16, depth=1, heads=2)
    )
    net.head = nn.Linear(3, 2)
    return net.head(net(torch.randn(2, 8, 4))), net.state_dict()


def encoder_and_decoder(nn):
    options = {"num_tokens": 11, "depth": 1, "heads": 2, "max_seq_len": 8}
    parts = {f"{side}_{k}": v for side in ("enc", "dec") for k, v in options.items()}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = XTransformer(dim=16, tie_token_emb=True, **parts)

        def forward(self, x, y):
            return self.both(x, y)

    net = Net()
    return net(_tokens(), _tokens()), len([*net.parameters()]), len(net.state_dict())


def single_layers(nn):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend, self.feed = Attention(16, heads=2), FeedForward(16)

        def forward(self, x):
            out, _ = self.attend(x)
            return self.feed(x + out)

    return Block()(torch.randn(2, 4, 16)), Block()


def hooks(nn):
    net, seen = _user_model(nn), []
    for name, module in net.named_modules():
        module.register_forward_hook(lambda m, a, o, name=name: seen.append(name))
    net(_tokens())
    return seen
