"""Checkpoints that do not fit, as names and shapes, each with the cause that a note has to name.

``KINDS`` has one case for each kind of mismatch that users report. ``LIBRARIES`` has the names of real
libraries, shortened to a few layers and narrowed to a few channels. They were written before the
function that they test ran on them, and ``FRESH`` after it had been improved with the others.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Mismatch:
    """One checkpoint that does not fit.

    ``causes`` are patterns that the first three lines have to match, each. ``truth`` maps names of the
    checkpoint to those of the model, where they are the same tensor: a rename that is stated without
    doubt has to be among them.
    """

    name: str
    model: Shapes
    checkpoint: dict[str, Any]
    causes: tuple[str, ...]
    truth: dict[str, str] = field(default_factory=dict)


def linear(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Shapes:
    """Return the tensors of a linear layer."""
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def norm(name: str, width: int) -> Shapes:
    """Return the tensors of a LayerNorm or GroupNorm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def batch_norm(name: str, width: int) -> Shapes:
    """Return the tensors of a BatchNorm."""
    statistics = {f"{name}.running_mean": (width,), f"{name}.running_var": (width,)}
    return norm(name, width) | statistics | {f"{name}.num_batches_tracked": ()}


def conv(name: str, outputs: int, inputs: int, kernel: int, *, bias: bool = False) -> Shapes:
    """Return the tensors of a 2d convolution."""
    weight = {f"{name}.weight": (outputs, inputs, kernel, kernel)}
    return weight | ({f"{name}.bias": (outputs,)} if bias else {})


def vit(depth: int = 3, width: int = 8, classes: int = 10, tokens: int = 5) -> Shapes:
    """Return a vision transformer with timm's names."""
    shapes: Shapes = {"cls_token": (1, 1, width), "pos_embed": (1, tokens, width)}
    shapes |= conv("patch_embed.proj", width, 3, 4, bias=True)
    for i in range(depth):
        shapes |= norm(f"blocks.{i}.norm1", width)
        shapes |= linear(f"blocks.{i}.attn.qkv", 3 * width, width)
        shapes |= linear(f"blocks.{i}.attn.proj", width, width)
        shapes |= norm(f"blocks.{i}.norm2", width)
        shapes |= linear(f"blocks.{i}.mlp.fc1", 4 * width, width)
        shapes |= linear(f"blocks.{i}.mlp.fc2", width, 4 * width)
    return shapes | norm("norm", width) | linear("head", classes, width)


def resnet(classes: int = 10, width: int = 8, channels: int = 3) -> Shapes:
    """Return a small ResNet with torchvision's names."""
    shapes = conv("conv1", width, channels, 7) | batch_norm("bn1", width)
    for stage in (1, 2):
        for block in (0, 1):
            inputs = width * stage // (2 if stage == 2 and block == 0 else 1)
            home, outputs = f"layer{stage}.{block}", width * stage
            shapes |= conv(f"{home}.conv1", outputs, inputs, 3) | batch_norm(f"{home}.bn1", outputs)
            shapes |= conv(f"{home}.conv2", outputs, outputs, 3)
            shapes |= batch_norm(f"{home}.bn2", outputs)
    return shapes | linear("fc", classes, 2 * width)


def bert(depth: int = 2, width: int = 8, vocabulary: int = 30, prefix: str = "") -> Shapes:
    """Return ``transformers.BertModel``."""
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (vocabulary, width),
        "embeddings.position_embeddings.weight": (16, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    shapes |= norm("embeddings.LayerNorm", width)
    for i in range(depth):
        home = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            shapes |= linear(f"{home}.attention.self.{name}", width, width)
        shapes |= linear(f"{home}.attention.output.dense", width, width)
        shapes |= norm(f"{home}.attention.output.LayerNorm", width)
        shapes |= linear(f"{home}.intermediate.dense", 4 * width, width)
        shapes |= linear(f"{home}.output.dense", width, 4 * width)
        shapes |= norm(f"{home}.output.LayerNorm", width)
    shapes |= linear("pooler.dense", width, width)
    return {prefix + name: shape for name, shape in shapes.items()}


def llama(depth: int = 2, width: int = 8) -> Shapes:
    """Return ``transformers.LlamaForCausalLM`` with grouped queries."""
    shapes: Shapes = {"model.embed_tokens.weight": (32, width)}
    for i in range(depth):
        home = f"model.layers.{i}"
        shapes |= linear(f"{home}.self_attn.q_proj", width, width, bias=False)
        shapes |= linear(f"{home}.self_attn.k_proj", width // 2, width, bias=False)
        shapes |= linear(f"{home}.self_attn.v_proj", width // 2, width, bias=False)
        shapes |= linear(f"{home}.self_attn.o_proj", width, width, bias=False)
        shapes |= linear(f"{home}.mlp.gate_proj", 3 * width, width, bias=False)
        shapes |= linear(f"{home}.mlp.up_proj", 3 * width, width, bias=False)
        shapes |= linear(f"{home}.mlp.down_proj", width, 3 * width, bias=False)
        shapes |= {f"{home}.input_layernorm.weight": (width,)}
        shapes |= {f"{home}.post_attention_layernorm.weight": (width,)}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (32, width)}


def gpt2(depth: int = 2, width: int = 8, *, turned: bool = False) -> Shapes:
    """Return GPT-2 with the names of nanoGPT; turned, with the weights of ``Conv1D``."""
    shapes: Shapes = {"transformer.wte.weight": (30, width), "transformer.wpe.weight": (16, width)}
    for i in range(depth):
        home = f"transformer.h.{i}"
        shapes |= norm(f"{home}.ln_1", width) | linear(f"{home}.attn.c_attn", 3 * width, width)
        shapes |= linear(f"{home}.attn.c_proj", width, width) | norm(f"{home}.ln_2", width)
        shapes |= linear(f"{home}.mlp.c_fc", 4 * width, width)
        shapes |= linear(f"{home}.mlp.c_proj", width, 4 * width)
    shapes |= norm("transformer.ln_f", width) | {"lm_head.weight": (30, width)}
    if turned:
        shapes = {name: shape[::-1] if ".c_" in name else shape for name, shape in shapes.items()}
    return shapes


def without(shapes: Shapes, pattern: str) -> Shapes:
    """Return the shapes whose names do not match."""
    return {name: shape for name, shape in shapes.items() if not re.search(pattern, name)}


def only(shapes: Shapes, pattern: str) -> Shapes:
    """Return the shapes whose names match."""
    return {name: shape for name, shape in shapes.items() if re.search(pattern, name)}


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    """Return the shapes with a prefix."""
    return {prefix + name: shape for name, shape in shapes.items()}


def case(
    name: str,
    model: Shapes,
    rename: Callable[[str], str],
    *causes: str,
    more: dict[str, Any] | None = None,
    less: str = r"(?!)",
    wrap: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> Mismatch:
    """Return a case whose checkpoint has the model's tensors under other names, and some more."""
    truth = {rename(each): each for each in without(model, less)}
    checkpoint = {old: model[new] for old, new in truth.items()} | (more or {})
    return Mismatch(name, model, wrap(checkpoint), causes, truth)


def sub(*rules: tuple[str, str]) -> Callable[[str], str]:
    """Return a function that substitutes patterns, one after the other."""

    def rename(name: str) -> str:
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        return name

    return rename


def same(name: str) -> str:
    """Return the name."""
    return name


class Object:
    """An object in a checkpoint that is not a state dict."""


_mlp = linear("0", 6, 4) | linear("2", 6, 6) | linear("5", 3, 6)
_net = linear("body", 6, 4) | linear("head", 3, 6)
_two_norms = {
    f"blocks.{i}.{name}": (8,) for i in range(3) for name in ("norm1.weight", "norm2.weight")
} | {f"blocks.{i}.fc.weight": (16, 8) for i in range(3)}
_separate = without(vit(), r"qkv") | {
    name: shape
    for i in range(3)
    for part in "qkv"
    for name, shape in linear(f"blocks.{i}.attn.{part}", 8, 8).items()
}
_optimizer = {"state": {0: {"step": (), "exp_avg": (8, 8)}}, "param_groups": [{"lr": 0.1}]}

KINDS = [
    case("DDP", vit(), lambda n: f"module.{n}", r"'module\.'"),
    case("compiled", vit(), lambda n: f"_orig_mod.{n}", r"'_orig_mod\.'"),
    case("Lightning", vit(), lambda n: f"model.{n}", r"'model\.'", more={"loss.weight": (10,)}),
    case("a student", vit(), lambda n: f"student.backbone.{n}", r"'student\.backbone\.'"),
    case("a prefix is lacking", prefixed("model.", vit()), lambda n: n[6:], r"lack.*'model\.'"),
    Mismatch(
        "counters",
        resnet(),
        without(resnet(), "num_batches_tracked"),
        (r"num_batches_tracked",),
    ),
    case(
        "nested",
        vit(),
        same,
        r"checkpoint\['state_dict'\]",
        wrap=lambda state: {"epoch": 3, "state_dict": state, "optimizer": _optimizer},
    ),
    case(
        "nested twice",
        vit(),
        same,
        r"checkpoint\['state'\]\['model'\]",
        wrap=lambda state: {"state": {"model": state, "optimizer": _optimizer}, "step": 5},
    ),
    case(
        "nested, with a prefix",
        vit(),
        lambda n: f"module.{n}",
        r"checkpoint\['model'\]",
        r"'module\.'",
        wrap=lambda state: {"model": state, "epoch": 1},
    ),
    Mismatch("an optimizer", vit(), _optimizer, (r"optimizer",)),
    Mismatch(
        "training state without weights",
        vit(),
        {"optimizer": _optimizer, "epoch": 3, "rng": (4,)},
        (r"optimizer", r"no state dict|not .*state dict|none"),
    ),
    case(
        "gamma and beta",
        bert(),
        sub((r"LayerNorm\.weight", "LayerNorm.gamma"), (r"LayerNorm\.bias", "LayerNorm.beta")),
        r"gamma",
        r"beta",
    ),
    case("one layer renamed", vit(), sub((r"attn\.proj", "attn.out")), r"attn.out'.*attn.proj'"),
    Mismatch(
        "two norms of equal shape",
        _two_norms,
        {
            name.replace("norm1", "layer_norms.0").replace("norm2", "layer_norms.1"): shape
            for name, shape in _two_norms.items()
        },
        (r"norm1.*norm2|norm2.*norm1", r"layer_norms"),
    ),
    case("a number moved", _mlp, sub((r"^5\.", "4.")), r"checkpoint .*'4'", r"model .*'5'"),
    Mismatch(
        "q, k, v joined by the model", vit(), _separate, (r"'blocks\.\*\.attn\.q'", r"\.qkv'")
    ),
    Mismatch("Conv1D", gpt2(), gpt2(turned=True), (r"transposed",)),
    Mismatch("more layers", vit(depth=4), vit(depth=2), (r"'blocks'.*\b[24]\b.*\b[24]\b",)),
    Mismatch("width", vit(width=16), vit(width=8), (r"width.*\b8\b.*\b16\b",)),
    Mismatch("classes", resnet(classes=5), resnet(), (r"classes.*\b10\b.*\b5\b",)),
    Mismatch("vocabulary", bert(vocabulary=31), bert(), (r"words.*\b30\b.*\b31\b",)),
    Mismatch("positions", vit(tokens=10), vit(), (r"sizes: 'pos_embed'",)),
    case(
        "LoRA",
        vit(),
        same,
        r"LoRA",
        more={
            f"blocks.{i}.attn.qkv.lora_{part}": shape
            for i in range(3)
            for part, shape in (("A", (2, 8)), ("B", (24, 2)))
        },
    ),
    Mismatch(
        "weight_norm",
        _net,
        without(_net, r"body\.weight") | {"body.weight_g": (6, 1), "body.weight_v": (6, 4)},
        (r"weight_norm",),
    ),
    Mismatch(
        "BatchNorm and GroupNorm",
        resnet(),
        without(resnet(), r"running_|num_batches"),
        (r"BatchNorm",),
    ),
]

_densenet = {
    name: shape
    for i in (1, 2)
    for home in [f"features.denseblock1.denselayer{i}"]
    for name, shape in (
        batch_norm(f"{home}.norm1", 8 * i)
        | conv(f"{home}.conv1", 16, 8 * i, 1)
        | batch_norm(f"{home}.norm2", 16)
        | conv(f"{home}.conv2", 8, 16, 3)
    ).items()
}
_vgg = conv("features.0", 8, 3, 3, bias=True) | conv("features.2", 8, 8, 3, bias=True)
_vgg |= conv("features.5", 16, 8, 3, bias=True) | conv("features.7", 16, 16, 3, bias=True)
_vgg_bn: Shapes = {}
for _index, _outputs, _inputs in ((0, 8, 3), (3, 8, 8), (7, 16, 8), (10, 16, 16)):
    _vgg_bn |= conv(f"features.{_index}", _outputs, _inputs, 3, bias=True)
    _vgg_bn |= batch_norm(f"features.{_index + 1}", _outputs)
_vgg |= linear("classifier.0", 10, 16)
_vgg_bn |= linear("classifier.0", 10, 16)

_hf_vit = {
    "vit.embeddings.cls_token": (1, 1, 8),
    "vit.embeddings.position_embeddings": (1, 5, 8),
    **conv("vit.embeddings.patch_embeddings.projection", 8, 3, 4, bias=True),
    **norm("vit.layernorm", 8),
    **linear("classifier", 10, 8),
}
for _i in range(3):
    _home = f"vit.encoder.layer.{_i}"
    for _part in ("query", "key", "value"):
        _hf_vit |= linear(f"{_home}.attention.attention.{_part}", 8, 8)
    _hf_vit |= linear(f"{_home}.attention.output.dense", 8, 8)
    _hf_vit |= linear(f"{_home}.intermediate.dense", 32, 8) | linear(f"{_home}.output.dense", 8, 32)
    _hf_vit |= norm(f"{_home}.layernorm_before", 8) | norm(f"{_home}.layernorm_after", 8)

_mae_decoder = {
    "mask_token": (1, 1, 6),
    "decoder_pos_embed": (1, 5, 6),
    **linear("decoder_embed", 6, 8),
    **linear("decoder_blocks.0.attn.qkv", 18, 6),
    **norm("decoder_norm", 6),
    **linear("decoder_pred", 48, 6),
}
_lora = {
    f"model.layers.{i}.self_attn.q_proj.lora_{part}.default.weight": shape
    for i in range(2)
    for part, shape in (("A", (2, 8)), ("B", (8, 2)))
}
_vocoder: Shapes = {}
_vocoder_file: Shapes = {}
for _i in range(3):
    _vocoder |= {f"ups.{_i}.bias": (4,), f"ups.{_i}.parametrizations.weight.original0": (8, 1, 1)}
    _vocoder |= {f"ups.{_i}.parametrizations.weight.original1": (8, 4, 3)}
    _vocoder_file |= {f"ups.{_i}.bias": (4,), f"ups.{_i}.weight_g": (8, 1, 1)}
    _vocoder_file |= {f"ups.{_i}.weight_v": (8, 4, 3)}

LIBRARIES = [
    case(
        "torchvision: a classifier for a detector's backbone",
        prefixed("backbone.body.", without(resnet(), "fc")) | linear("rpn.head.conv", 8, 8),
        lambda n: n.removeprefix("backbone.body."),
        r"lack.*'backbone\.body\.'",
        less="rpn",
        more=linear("fc", 10, 16),
    ),
    case(
        "torchvision: DenseNet before 0.3",
        _densenet,
        sub((r"(norm|conv)([12])\.", r"\1.\2.")),
        r"another library.*norm\.1\.weight.*norm1\.weight",
    ),
    Mismatch(
        "torchvision: VGG for VGG with BatchNorm",
        _vgg_bn,
        _vgg,
        (r"BatchNorm",),
        {
            f"features.{old}.{leaf}": f"features.{new}.{leaf}"
            for old, new in ((2, 3), (5, 7), (7, 10))
            for leaf in ("weight", "bias")
        },
    ),
    Mismatch(
        "transformers to timm: ViT",
        vit(),
        _hf_vit,
        (r"another library",),
        {
            "vit.embeddings.cls_token": "cls_token",
            "vit.embeddings.position_embeddings": "pos_embed",
            "vit.embeddings.patch_embeddings.projection.weight": "patch_embed.proj.weight",
            "vit.embeddings.patch_embeddings.projection.bias": "patch_embed.proj.bias",
            "classifier.weight": "head.weight",
            "classifier.bias": "head.bias",
            "vit.layernorm.weight": "norm.weight",
            "vit.layernorm.bias": "norm.bias",
        }
        | {
            f"vit.encoder.layer.{i}.{old}.{leaf}": f"blocks.{i}.{new}.{leaf}"
            for i in range(3)
            for leaf in ("weight", "bias")
            for old, new in (
                ("attention.output.dense", "attn.proj"),
                ("intermediate.dense", "mlp.fc1"),
                ("output.dense", "mlp.fc2"),
                ("layernorm_before", "norm1"),
                ("layernorm_after", "norm2"),
            )
        },
    ),
    case(
        "MAE: a pre-trained encoder",
        vit(),
        same,
        r"checkpoint\['model'\]",
        r"decoder",
        less="head",
        more=_mae_decoder,
        wrap=lambda state: {"model": state},
    ),
    case(
        "MoCo: two encoders",
        resnet(),
        lambda n: f"module.encoder_q.{n}",
        r"checkpoint\['state_dict'\]",
        r"'module\.encoder_[qk]\.'",
        more=prefixed("module.encoder_k.", resnet()) | {"module.queue": (8, 64)},
        wrap=lambda state: {"epoch": 200, "arch": "resnet50", "state_dict": state},
    ),
    Mismatch(
        "ultralytics: a pickled module",
        resnet(),
        {"epoch": -1, "model": Object(), "ema": None, "train_args": {"lr0": 0.01}},
        (r"'model'.*Object|'model'", r"not .*state dict|no state dict"),
    ),
    case(
        "transformers: BERT from TensorFlow",
        bert(),
        sub(
            (r"LayerNorm\.weight", "LayerNorm.gamma"),
            (r"LayerNorm\.bias", "LayerNorm.beta"),
            (r"^", "bert."),
        ),
        r"'bert\.'",
        r"gamma",
    ),
    Mismatch(
        "transformers to nanoGPT: GPT-2",
        gpt2(),
        gpt2(turned=True)
        | {f"transformer.h.{i}.attn.bias": (1, 1, 16, 16) for i in range(2)}
        | {f"transformer.h.{i}.attn.masked_bias": () for i in range(2)},
        (r"transposed", r"attn\.bias|masked_bias"),
    ),
    case(
        "PEFT: a saved wrapper",
        llama(),
        lambda n: f"base_model.model.{re.sub(r'q_proj.weight', 'q_proj.base_layer.weight', n)}",
        r"'base_model\.model\.'",
        r"LoRA",
        more=prefixed("base_model.model.", _lora),
    ),
    Mismatch(
        "PEFT: an adapter alone",
        llama(),
        {f"base_model.model.{name.replace('.default', '')}": s for name, s in _lora.items()},
        (r"LoRA",),
    ),
    case(
        "torch: AveragedModel",
        resnet(),
        lambda n: f"module.{n}",
        r"'module\.'",
        r"n_averaged|average",
        more={"n_averaged": ()},
    ),
    Mismatch(
        "HiFi-GAN: weight_norm and parametrizations",
        _vocoder,
        _vocoder_file,
        (r"weight_norm|weight_g.*original0",),
        {
            f"ups.{i}.weight_{old}": f"ups.{i}.parametrizations.weight.original{new}"
            for i in range(3)
            for old, new in (("g", 0), ("v", 1))
        },
    ),
    case(
        "FSDP with activation checkpointing",
        vit(),
        sub((r"(blocks\.\d)", r"\1._checkpoint_wrapped_module"), (r"^", "_fsdp_wrapped_module.")),
        r"_fsdp_wrapped_module",
        r"_checkpoint_wrapped_module",
    ),
]

_clip: Shapes = {}
_clip_file: Shapes = {}
for _i in range(2):
    for _part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        _clip |= linear(f"vision_model.encoder.layers.{_i}.self_attn.{_part}", 8, 8)
    _home = f"visual.transformer.resblocks.{_i}.attn"
    _clip_file |= {f"{_home}.in_proj_weight": (24, 8), f"{_home}.in_proj_bias": (24,)}
    _clip_file |= linear(f"{_home}.out_proj", 8, 8)
_quantized = {
    name: shape
    for whole, size in llama().items()
    for name, shape in (
        {
            whole.replace("weight", "qweight"): (1, size[0]),
            whole.replace("weight", "qzeros"): (1, 1),
            whole.replace("weight", "scales"): (1, size[0]),
        }
        if "_proj" in whole
        else {whole: size}
    ).items()
}

FRESH = [
    Mismatch("BERT for GPT-2", gpt2(), bert(), (r"another model",)),
    Mismatch(
        "OpenAI to transformers: CLIP's image encoder",
        _clip,
        _clip_file,
        (r"in_proj_weight.*q_proj",),
        {
            name: name.replace(
                "visual.transformer.resblocks", "vision_model.encoder.layers"
            ).replace("attn.", "self_attn.")
            for name in only(_clip_file, "out_proj")
        },
    ),
    Mismatch(
        "JAX: kernels",
        _net,
        {"params.body.kernel": (4, 6), "params.body.bias": (6,)}
        | {"params.head.kernel": (6, 3), "params.head.bias": (3,)},
        (r"'params\.'|kernel",),
        {"params.body.bias": "body.bias", "params.head.bias": "head.bias"},
    ),
    case(
        "model and average in one file",
        vit(),
        same,
        r"checkpoint\['model'\]",
        r"checkpoint\['model_ema'\]",
        wrap=lambda state: {"model": state, "model_ema": {**state}, "epoch": 1},
    ),
    Mismatch("GPTQ", llama(), _quantized, (r"quantized",)),
    case(
        "DDP around a submodule",
        prefixed("encoder.", vit()) | linear("decoder", 3, 8),
        sub((r"^encoder\.", "encoder.module.")),
        r"'module\.' \(added by DataParallel",
    ),
]
