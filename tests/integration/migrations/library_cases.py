"""Changes of names and layouts, on models of the libraries that made them and against their own conversions.

The classes that declare the steps are those of `tests.unit.migrations.real_cases` where the layout is the library's:
a module of the library becomes one of them. Each case but one has an oracle in the installed versions:

- torchvision converts DenseNet's files when it loads its own weights, and ViT and RetinaNet in `_load_from_state_dict`;
- timm's `checkpoint_filter_fn` reads the files of OpenAI's CLIP;
- transformers' `from_pretrained` renames BERT's norms, stacks Mixtral's experts and splits the `in_proj` of TIPS;
- transformers' GPT-2 and GPT-NeoX have no conversion: what their layers compute says which weights are meant;
- diffusers renames its first attention blocks, and fuses projections.

LightZero converts nothing: for it, `real_cases` has a recorded file.
"""

import re
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from modkit import migrations as mig
from tests.unit.migrations import real_cases
from tests.unit.migrations.real_cases import Case, wrap


def library(name):
    """Import a module of a library, or skip."""
    return pytest.importorskip(name, reason=f"needs {name}: nox -s ecosystem installs it")


def random_state(model, *, integers=False):
    """Return random values for a model; computing with small integers is exact."""
    values = {}
    for name, value in model.state_dict().items():
        shape = value.shape
        values[name] = torch.randint(-9, 10, shape).float() if integers else torch.randn(shape)
    return values


def saved_in_version_1(entries):
    """Return entries as a state dict whose modules all have version 1."""
    state: Any = OrderedDict(entries)
    paths = {name.rpartition(".")[0] for name in entries}
    paths |= {path[: dot.start()] for path in paths for dot in re.finditer(r"\.", path)}
    state._metadata = OrderedDict((path, {"version": 1}) for path in sorted({"", *paths}))
    return state


def redeclared(model, *classes):
    """Return a model whose modules of some classes are of others: `(old class, new class)`."""
    for module in model.modules():
        module.__class__ = dict(classes).get(type(module), type(module))
    return model


def renamed(entries, *pairs):
    """Return entries whose names regular expressions have changed: `(pattern, replacement)`."""
    result = {}
    for name, value in entries.items():
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        result[name] = value
    return result


def densenet():
    """DenseNet's layers are renamed by torchvision before it loads a file of its own."""
    found = library("torchvision.models.densenet")
    options = {"growth_rate": 2, "block_config": (2, 1), "num_init_features": 4, "num_classes": 3}
    reference = found.DenseNet(**options)
    # The files are from before BatchNorm counted its batches.
    values = random_state(reference)
    values = {name: value for name, value in values.items() if "num_batches" not in name}
    old = saved_in_version_1(renamed(values, (r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2")))

    weights = SimpleNamespace(get_state_dict=lambda **options: dict(old))
    expected: dict[str, torch.Tensor] = {}
    found._load_state_dict(SimpleNamespace(load_state_dict=expected.update), weights, False)
    found._load_state_dict(reference, weights, False)

    (declared,) = real_cases.densenet().declared
    model = redeclared(found.DenseNet(**options), (found._DenseLayer, declared))
    return Case(model, old, expected, (declared,), loaded=reference.state_dict())


def vit_mlp():
    """The MLPBlock of torchvision moves its two layers when it loads version 1."""
    found = library("torchvision.models.vision_transformer")
    sizes = {"image_size": 4, "patch_size": 2, "num_layers": 2, "num_heads": 2, "hidden_dim": 4}
    reference, model = (found.VisionTransformer(**sizes, mlp_dim=6) for _ in range(2))
    names = (r"mlp\.0\.", "mlp.linear_1."), (r"mlp\.3\.", "mlp.linear_2.")
    old = saved_in_version_1(renamed(random_state(reference), *names))
    reference.load_state_dict(old)

    (declared,) = real_cases.vit_mlp().declared
    model = redeclared(model, (found.MLPBlock, declared))
    new = reference.state_dict()
    return Case(model, old, new, (declared,), loaded=new)


def retinanet():
    """The heads of torchvision's RetinaNet move their convolutions when they load version 1."""
    found = library("torchvision.models.detection.retinanet")
    reference, model = (found.RetinaNetHead(2, num_anchors=3, num_classes=4) for _ in range(2))
    values = random_state(reference)
    for number in range(4):
        values = renamed(values, (rf"conv\.{number}\.0\.", f"convolution.{2 * number}."))
    old = saved_in_version_1(renamed(values, ("convolution", "conv")))
    reference.load_state_dict(old)

    (declared,) = real_cases.retinanet().declared
    heads = found.RetinaNetClassificationHead, found.RetinaNetRegressionHead
    model = redeclared(model, *((head, declared) for head in heads))
    new = reference.state_dict()
    return Case(model, old, new, (declared,), loaded=new)


def openai_clip():
    """The image tower of OpenAI's CLIP is read by timm, and the text tower dropped."""
    found = library("timm.models.vision_transformer")
    case = real_cases.openai_clip()
    sizes = {"img_size": 4, "patch_size": 2, "embed_dim": 4, "depth": 2, "num_heads": 2}
    reference, model = (
        found.VisionTransformer(**sizes, mlp_ratio=2, pre_norm=True, num_classes=3)
        for _ in range(2)
    )
    expected = found.checkpoint_filter_fn(dict(case.old), reference)
    reference.load_state_dict(expected)

    redeclared(model, (found.VisionTransformer, *case.declared))
    loaded = reference.state_dict()
    return Case(model, case.old, expected, case.declared, lossy=True, loaded=loaded)


def bert_norms():
    """TensorFlow's names of norms are read by transformers, which leaves LayerScale's gamma alone."""
    transformers = library("transformers")

    class ScaledBert(transformers.BertModel):
        def __init__(self, config):
            super().__init__(config)
            self.scale = nn.Module()
            self.scale.gamma = nn.Parameter(torch.zeros(4))

    sizes = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6, "vocab_size": 8}
    config = transformers.BertConfig(**sizes, num_hidden_layers=2, max_position_embeddings=8)
    model = ScaledBert(config)
    names = ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")
    old = saved_in_version_1(renamed(random_state(model), *names))
    new = ScaledBert.from_pretrained(None, config=config, state_dict=dict(old)).state_dict()

    (declared,) = real_cases.bert_norms().declared
    return Case(redeclared(model, (ScaledBert, declared)), old, new, (declared,), loaded=new)


def mixtral_experts():
    """Mixtral's experts are stacked when transformers loads, and taken apart when it saves."""
    transformers = library("transformers")
    found = library("transformers.models.mixtral.modeling_mixtral")

    @mig.declare({2: [mig.rename("block_sparse_moe.**", "mlp.**")]})
    class DecoderLayer(nn.Module):
        pass

    sizes = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 3, "vocab_size": 8}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=2, num_key_value_heads=1, num_local_experts=12
    )
    model = found.MixtralForCausalLM(config)
    old, new = both_ways(model, found.MixtralForCausalLM)

    (mixture,) = real_cases.mixtral_experts().declared
    redeclared(
        model, (found.MixtralDecoderLayer, DecoderLayer), (found.MixtralSparseMoeBlock, mixture)
    )
    return Case(model, old, new, (DecoderLayer, mixture), loaded=new)


def both_ways(model, cls):
    """Return a random state dict as transformers saves it, and what its model holds after a load."""
    loading = library("transformers.core_model_loading")
    old = saved_in_version_1(loading.revert_weight_conversion(model, random_state(model)))
    loaded = cls.from_pretrained(None, config=model.config, state_dict=dict(old))
    return old, loaded.state_dict()


def separate_projections():
    """The joined projections of torch's MultiheadAttention, in files of TIPS, are split by transformers."""
    found = library("transformers.models.tipsv2.modeling_tipsv2")
    config = library("transformers.models.tipsv2.configuration_tipsv2").Tipsv2TextConfig
    layer, new_layer = "transformer.resblocks.*", "encoder.layers.*"

    @mig.declare(
        {
            2: [
                mig.rename("token_embedding.*", "embeddings.token_embedding.*"),
                mig.rename("ln_final.*", "final_layer_norm.*"),
                mig.rename(f"{layer}.attn.**", f"{new_layer}.self_attn.**"),
                mig.rename(f"{layer}.ln_1.*", f"{new_layer}.layer_norm1.*"),
                mig.rename(f"{layer}.ln_2.*", f"{new_layer}.layer_norm2.*"),
                mig.rename(f"{layer}.mlp.c_fc.*", f"{new_layer}.mlp.fc1.*"),
                mig.rename(f"{layer}.mlp.c_proj.*", f"{new_layer}.mlp.fc2.*"),
            ]
        }
    )
    class TextModel(nn.Module):
        pass

    sizes = {"hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6, "vocab_size": 8}
    model = found.Tipsv2TextModel(config(**sizes, num_hidden_layers=2, max_position_embeddings=8))
    old, new = both_ways(model, found.Tipsv2TextModel)

    (attention,) = real_cases.separate_projections().declared
    redeclared(model, (found.Tipsv2TextModel, TextModel), (found.Tipsv2TextAttention, attention))
    return Case(model, old, new, (TextModel, attention), loaded=new)


def linear_layer(function, width):
    """Return weight and bias of the linear layer that a function computes, exact for small integers."""
    bias, *columns = function(torch.cat([torch.zeros(1, width), torch.eye(width)])[None])[0]
    return {"weight": torch.stack([column - bias for column in columns], 1), "bias": bias}


def gpt2_conv1d():
    """The layers of transformers' GPT-2 compute what linear layers with these weights compute."""
    found = library("transformers.models.gpt2.modeling_gpt2")
    sizes = {"n_embd": 4, "n_head": 2, "n_layer": 2, "n_positions": 8, "vocab_size": 8}
    model = found.GPT2Model(library("transformers").GPT2Config(**sizes))
    old = saved_in_version_1(random_state(model, integers=True))
    model.load_state_dict(old)

    (declared,) = real_cases.gpt2_conv1d().declared
    expected = dict(old)
    for number, block in enumerate(model.h):
        for name in ("c_attn", "c_proj"):
            conv = block.attn.get_submodule(name)
            with torch.no_grad():
                values = linear_layer(conv, 4)
            expected |= {f"h.{number}.attn.{name}.{end}": values[end] for end in values}
            block.attn.add_module(name, nn.Linear(4, conv.nf))
    return Case(redeclared(model, (found.GPT2Attention, declared)), old, expected, (declared,))


def neox_interleaved():
    """The attention of transformers' GPT-NeoX computes what three layers with these weights compute."""
    found = library("transformers.models.gpt_neox.modeling_gpt_neox")
    config = library("transformers").GPTNeoXConfig(hidden_size=6, num_attention_heads=3)
    config._attn_implementation = "eager"
    attention = found.GPTNeoXAttention(config, layer_idx=0)
    values = random_state(attention, integers=True)
    attention.load_state_dict(values)
    # Those of the first position turn nothing.
    positions = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)

    def projection(number):
        def project(hidden):
            seen = []

            def record(module, query, key, value, *others, **options):
                seen.extend((query, key, value))
                return query.transpose(1, 2), None

            with mock.patch.object(found, "eager_attention_forward", record), torch.no_grad():
                attention(hidden, None, position_embeddings=positions)
            return seen[number].transpose(1, 2).flatten(2)

        return project

    joined = {name: values[name] for name in values if name.startswith("query_key_value.")}
    old = saved_in_version_1({f"attention.{name}": value for name, value in joined.items()})
    expected = {}
    for number, part in enumerate("qkv"):
        layer = linear_layer(projection(number), 6)
        expected |= {f"attention.{part}_proj.{end}": layer[end] for end in layer}
    case = real_cases.neox_interleaved()
    return Case(case.model, old, expected, case.declared)


def diffusers_attention():
    """Attention blocks from before diffusers 0.14 had other names of projections."""
    found = library("diffusers")
    channels = {"in_channels": 2, "out_channels": 2, "block_out_channels": (4,)}
    options = {
        **channels,
        "down_block_types": ("AttnDownBlock2D",),
        "up_block_types": ("AttnUpBlock2D",),
        "norm_num_groups": 2,
        "attention_head_dim": 2,
        "layers_per_block": 1,
    }
    model = found.UNet2DModel(**options)
    names = [("to_q", "query"), ("to_k", "key"), ("to_v", "value"), (r"to_out\.0", "proj_attn")]
    old = saved_in_version_1(renamed(random_state(model), *names))
    expected = model._fix_state_dict_keys_on_load(dict(old))
    reference = found.UNet2DModel(**options)
    reference.load_state_dict(expected)

    (declared,) = real_cases.diffusers_attention().declared
    attention = library("diffusers.models.attention_processor").Attention
    loaded = reference.state_dict()
    return Case(redeclared(model, (attention, declared)), old, expected, (declared,), loaded=loaded)


def fused_projections():
    """Attention blocks of diffusers fuse their projections on demand."""
    found = library("diffusers.models.attention_processor")

    @mig.declare({2: [mig.merge(["to_q.*", "to_k.*", "to_v.*"], "to_qkv.*")]})
    class Attention(nn.Module):
        pass

    blocks = [found.Attention(query_dim=4, heads=2, dim_head=2, bias=True) for _ in range(2)]
    model = wrap(blocks=nn.ModuleList(blocks))
    old = saved_in_version_1(random_state(model))
    model.load_state_dict(old)
    for block in blocks:
        block.fuse_projections()
        for name in ("to_q", "to_k", "to_v"):
            delattr(block, name)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    return Case(redeclared(model, (found.Attention, Attention)), old, expected, (Attention,))


CASES = [
    *(densenet, vit_mlp, retinanet, openai_clip, separate_projections, fused_projections),
    *(bert_norms, mixtral_experts, gpt2_conv1d, neox_interleaved, diffusers_attention),
]
