"""Lists of layers that differ by an inserted layer: entries of one number are different layers."""

from itertools import pairwise

import torch
from torch import nn

from modkit import _mismatches
from modkit._renames import find_renames
from tests.cases import for_each
from tests.unit.load.mismatches import vit


def vgg(*sizes, norm=False):
    """Return the layers of VGG: convolutions, with "M" for pooling."""
    layers = []
    channels = 3
    place = (0, 0)
    for size in sizes:
        if size == "M":
            layers.append(nn.MaxPool2d(2))
            place = (place[0] + 1, 0)
        else:
            layers += [nn.Conv2d(channels, size, 3), *([nn.BatchNorm2d(size)] if norm else [])]
            layers.append(nn.ReLU())
            # Networks of several depths have other numbers of layers between two poolings.
            layers[-2 - norm].place = place
            channels = size
            place = (place[0], place[1] + 1)
    return nn.Sequential(*layers)


VGG = {
    13: (64, 64, "M", 128, 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    16: (64, 64, "M", 128, 128, "M", *(256,) * 3, "M", *(512,) * 3, "M", *(512,) * 3, "M"),
}


def mlp(*widths, between=()):
    """Return linear layers with others behind each; these take the width."""
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), *(layer(outputs) for layer in between)]
    return nn.Sequential(*layers)


def act(width):
    """Return a layer without tensors."""
    return nn.ReLU()


def below(path, *modules):
    """Return modules under a path, or in a list under it."""
    model = nn.Module()
    setattr(model, path, modules[0] if len(modules) == 1 else nn.ModuleList(modules))
    return model


def transformer(*, pre_norm):
    """Return a block of a transformer with its norms before the layers, or behind them."""
    attention = [nn.Linear(16, 48), nn.Linear(16, 16)]
    feed_forward = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)]
    if pre_norm:
        return nn.Sequential(nn.LayerNorm(16), *attention, nn.LayerNorm(16), *feed_forward)
    return nn.Sequential(*attention, nn.LayerNorm(16), *feed_forward, nn.LayerNorm(16))


with torch.device("meta"):
    PAIRS = {
        **{f"VGG-{n}": (vgg(*VGG[n]), vgg(*VGG[n], norm=True)) for n in VGG},
        "VGG in another home": (
            below("net", vgg(*VGG[16])),
            below("features", vgg(*VGG[16], norm=True)),
        ),
        "VGG of another depth in another home": (
            below("net", vgg(*VGG[13])),
            below("features", vgg(*VGG[16], norm=True)),
        ),
        "activations": (
            mlp(16, 16, 16, 16, 16),
            mlp(16, 16, 16, 16, 16, between=[act]),
        ),
        "BatchNorm": (
            mlp(8, 16, 16, 32, 32, 4, between=[act]),
            mlp(8, 16, 16, 32, 32, 4, between=[nn.BatchNorm1d, act]),
        ),
        "norms before and behind": (
            below("blocks", *(transformer(pre_norm=True) for _ in range(3))),
            below("blocks", *(transformer(pre_norm=False) for _ in range(3))),
        ),
        "a layer more": (mlp(4, 16, 16, 16, 2), mlp(4, 16, 16, 16, 16, 2)),
    }
BOTH_WAYS = {
    **PAIRS,
    **{f"{name}, backwards": pair[::-1] for name, pair in PAIRS.items()},
}


def places(model, kind):
    """Return the layers of one kind by their place."""
    layers = [(path, each) for path, each in model.named_modules() if isinstance(each, kind)]
    return {getattr(layer, "place", i): (path, layer) for i, (path, layer) in enumerate(layers)}


def truth(old, new):
    """Return which names are one tensor: those of layers of one kind at one place."""
    names = {}
    for kind in (nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm):
        new_layers = places(new, kind)
        for place, (path, layer) in places(old, kind).items():
            if place in new_layers:
                new_path = new_layers[place][0]
                names |= {f"{path}.{name}": f"{new_path}.{name}" for name in layer.state_dict()}
    return names


def recorded(old, new, monkeypatch):
    """Return the lines for a pair, and the names that are certain."""
    results = []

    def find(*args):
        results.append(find_renames(*args))
        return results[-1]

    monkeypatch.setattr(_mismatches, "find_renames", find)
    lines = _mismatches.explain(_mismatches.shapes_of(new.state_dict()), old.state_dict())
    return lines, results[-1].pairs


@for_each("name", [*BOTH_WAYS])
def test_no_layer_is_certainly_another_one(name, monkeypatch):
    """Numbers, and shapes that many layers have, do not make a rename certain."""
    old, new = BOTH_WAYS[name]
    lines, pairs = recorded(old, new, monkeypatch)

    assert lines
    assert pairs.items() <= truth(old, new).items()


def test_behind_a_prefix():
    """The prefix is named, and layers beside the list keep their pairs."""
    heads = {f"head.{name}": (4, 4) for name in "abcdefgh"}
    features = _mismatches.shapes_of(below("features", vgg(*VGG[16])).state_dict())
    with_norm = _mismatches.shapes_of(below("features", vgg(*VGG[16], norm=True)).state_dict())
    file = {f"module.{name}": shape for name, shape in (features | heads).items()}
    pairs = find_renames(file, with_norm | heads).pairs

    assert "'module.'" in _mismatches.compare(with_norm | heads, file)[0]
    assert {f"module.{name}": name for name in heads}.items() <= pairs.items()


def test_a_prefix_and_another_width():
    """The names say it where no shape fits."""
    file = {f"module.{name}": shape for name, shape in vit(width=16).items()}
    lines = _mismatches.compare(vit(), file)

    assert "have the extra prefix 'module.'" in lines[0]
    assert lines[1].startswith("another width")
