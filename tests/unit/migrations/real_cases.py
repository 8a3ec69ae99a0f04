"""Eight changes of names and layouts that libraries have made, each with the documented conversion.

Names and shapes of layers are the libraries', with smaller widths. ``expected`` says in plain code what
the library's own conversion returns.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from modkit import migrations as mig
from modkit.models import DynamicsNetwork
from tests import efficientzero


class Case(NamedTuple):
    """A model that declares a migration, an old state dict, and what it becomes.

    Attributes:
        model: The model.
        old: The old state dict, with the versions of modules.
        expected: The new entries.
        declared: The classes that declare something.
        lossy: Whether there is no way back.
        loaded: The state dict of the library's model that has loaded the old one, where it was run.
    """

    model: nn.Module
    old: OrderedDict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    declared: tuple[type, ...]
    lossy: bool = False
    loaded: dict[str, torch.Tensor] | None = None


def state_of(shapes, *paths):
    """Return random tensors of these shapes, of modules that were saved in version 1."""
    state: Any = OrderedDict((name, torch.randn(shape)) for name, shape in shapes.items())
    state._metadata = OrderedDict((path, {"version": 1}) for path in paths)
    return state


def linear(name, inputs, outputs):
    """Return the shapes of a linear layer."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def wrap(**children):
    """Return a module with these children."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def retinanet():
    """The convolutions of torchvision's RetinaNet head moved from every second place into blocks."""
    steps = [mig.rename(f"conv.{2 * number}.*", f"conv.{number}.0.*") for number in range(4)]

    @mig.declare({2: steps})
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = (nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU()) for _ in range(4))
            self.conv = nn.Sequential(*blocks)

    shapes = {}
    for number in (0, 2, 4, 6):
        shapes |= {f"head.conv.{number}.weight": (2, 2, 3, 3), f"head.conv.{number}.bias": (2,)}
    old = state_of(shapes, "head")
    expected = {}
    for number in range(4):
        for end in ("weight", "bias"):
            expected[f"head.conv.{number}.0.{end}"] = old[f"head.conv.{2 * number}.{end}"]
    return Case(wrap(head=Head()), old, expected, (Head,))


def separate_projections():
    """MultiheadAttention's joined projection became three layers, as in fairseq."""

    @mig.declare(
        {
            2: [
                mig.split(f"in_proj_{end}", [f"{part}_proj.{end}" for part in "qkv"])
                for end in ("weight", "bias")
            ]
        }
    )
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                self.add_module(name, nn.Linear(4, 4))

    reference = nn.MultiheadAttention(4, 2)
    old = state_of({f"attn.{k}": v.shape for k, v in reference.state_dict().items()}, "attn")
    expected = {name: value for name, value in old.items() if "in_proj" not in name}
    for end in ("weight", "bias"):
        parts = old[f"attn.in_proj_{end}"].chunk(3)
        expected |= {f"attn.{k}_proj.{end}": part for k, part in zip("qkv", parts, strict=True)}
    return Case(wrap(attn=Attention()), old, expected, (Attention,))


def fused_projections():
    """Separate projections became one, in every layer."""

    @mig.declare({2: [mig.merge([f"{part}_proj.*" for part in "qkv"], "qkv_proj.*")]})
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv_proj = nn.Linear(4, 12)

    shapes = {}
    for layer in range(2):
        for part in "qkv":
            shapes |= linear(f"layers.{layer}.{part}_proj", 4, 4)
    old = state_of(shapes, "layers.0", "layers.1")
    expected = {}
    for layer in range(2):
        for end in ("weight", "bias"):
            parts = [old[f"layers.{layer}.{part}_proj.{end}"] for part in "qkv"]
            expected[f"layers.{layer}.qkv_proj.{end}"] = torch.cat(parts)
    layers = nn.ModuleList([Attention(), Attention()])
    return Case(wrap(layers=layers), old, expected, (Attention,))


def bert_norms():
    """TensorFlow's names of BERT's norms; the gamma of LayerScale is another tensor and stays."""

    class LayerScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.zeros(4))

    @mig.declare(
        {
            2: [
                mig.rename("**.LayerNorm.gamma", "**.LayerNorm.weight"),
                mig.rename("**.LayerNorm.beta", "**.LayerNorm.bias"),
            ]
        }
    )
    class Bert(nn.Module):
        def __init__(self):
            super().__init__()
            self.embeddings = wrap(LayerNorm=nn.LayerNorm(4))
            self.layer = nn.ModuleList(
                [wrap(LayerNorm=nn.LayerNorm(4), dense=nn.Linear(4, 4), scale=LayerScale())]
            )

    shapes = {f"embeddings.LayerNorm.{end}": (4,) for end in ("gamma", "beta")}
    shapes |= {f"layer.0.LayerNorm.{end}": (4,) for end in ("gamma", "beta")}
    shapes |= {**linear("layer.0.dense", 4, 4), "layer.0.scale.gamma": (4,)}
    old = state_of(shapes, "")
    expected = {}
    for name, value in old.items():
        owner, _, leaf = name.rpartition(".")
        leaves = {"gamma": "weight", "beta": "bias"} if owner.endswith("LayerNorm") else {}
        expected[f"{owner}.{leaves.get(leaf, leaf)}"] = value
    return Case(Bert(), old, expected, (Bert,))


def mixtral_experts():
    """The experts of Mixtral became stacked tensors, and two of their layers one: transformers 5."""

    @mig.declare(
        {
            2: [
                mig.merge("experts.*.w1.weight", "gate", dim=None),
                mig.merge("experts.*.w3.weight", "up", dim=None),
                mig.merge(["gate", "up"], "experts.gate_up_proj", dim=1),
                mig.merge("experts.*.w2.weight", "experts.down_proj", dim=None),
            ]
        }
    )
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Module()
            self.experts.gate_up_proj = nn.Parameter(torch.zeros(12, 6, 4))
            self.experts.down_proj = nn.Parameter(torch.zeros(12, 4, 3))

    shapes = {}
    for number in range(12):
        path = f"mlp.experts.{number}"
        shapes |= {f"{path}.w{part}.weight": (3, 4) for part in (1, 3)}
        shapes[f"{path}.w2.weight"] = (4, 3)
    old = state_of(shapes, "mlp")
    weights = {
        part: [old[f"mlp.experts.{number}.w{part}.weight"] for number in range(12)]
        for part in (1, 2, 3)
    }
    joined = [torch.cat(pair) for pair in zip(weights[1], weights[3], strict=True)]
    expected = {
        "mlp.experts.gate_up_proj": torch.stack(joined),
        "mlp.experts.down_proj": torch.stack(weights[2]),
    }
    return Case(wrap(mlp=Mixture()), old, expected, (Mixture,))


def gpt2_conv1d():
    """GPT-2's Conv1D stores transposed weights; its square ones have the shape of the new ones."""

    @mig.declare(
        {2: [mig.convert(f"c_{name}.weight", torch.t, torch.t) for name in ("attn", "proj")]}
    )
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(4, 12), nn.Linear(4, 4)

    shapes = {
        "h.0.c_attn.weight": (4, 12),
        "h.0.c_attn.bias": (12,),
        "h.0.c_proj.weight": (4, 4),
        "h.0.c_proj.bias": (4,),
    }
    old = state_of(shapes, "h.0")
    expected = {name: value.T if value.dim() == 2 else value for name, value in old.items()}
    return Case(wrap(h=nn.ModuleList([Attention()])), old, expected, (Attention,))


def neox_interleaved():
    """GPT-NeoX interleaves query, key and value by head: a plain split gives other weights."""
    heads, width = 3, 2

    def apart(joined):
        by_head = joined.reshape(heads, 3, width, *joined.shape[1:])
        return [by_head[:, part].flatten(0, 1) for part in range(3)]

    def together(*parts):
        by_head = [part.reshape(heads, width, *part.shape[1:]) for part in parts]
        return torch.stack(by_head, 1).flatten(0, 2)

    names = [f"{part}_proj.*" for part in "qkv"]

    @mig.declare({2: [mig.convert("query_key_value.*", apart, together, names)]})
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj"):
                self.add_module(name, nn.Linear(6, 6))

    old = state_of(linear("attention.query_key_value", 6, 18), "attention")
    expected = {}
    for place, part in enumerate("qkv"):
        rows = [(head * 3 + place) * width + row for head in range(heads) for row in range(width)]
        for end in ("weight", "bias"):
            expected[f"attention.{part}_proj.{end}"] = old[f"attention.query_key_value.{end}"][rows]
    return Case(wrap(attention=Attention()), old, expected, (Attention,))


def lightzero_dynamics():
    """LightZero's dynamics network: a recorded file, with blocks of a version that had more."""

    @mig.declare({2: [mig.drop("reward_resblocks.**")]})
    class Dynamics(DynamicsNetwork):
        pass

    file = Path(__file__).resolve().parents[2] / "data" / "efficientzero.pt"
    recorded = torch.load(file, weights_only=False)["trained"]["state"]
    model = efficientzero.CASES["BN"].build()
    model.__class__ = Dynamics
    old: Any = OrderedDict(recorded)
    old["reward_resblocks.0.conv1.0.weight"] = torch.randn(4, 4, 3, 3)
    old["reward_resblocks.0.conv1.1.bias"] = torch.randn(4)
    old._metadata = OrderedDict({"": {"version": 1}})
    return Case(model, old, dict(recorded), (Dynamics,), lossy=True)


CASES = [
    *(retinanet, separate_projections, fused_projections, bert_norms, mixtral_experts),
    *(gpt2_conv1d, neox_interleaved, lightzero_dynamics),
]
