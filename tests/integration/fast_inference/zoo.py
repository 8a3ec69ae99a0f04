"""Small models of timm, torchvision, transformers and diffusers, with random weights.

``ZOO`` is the list of them. An entry names its model; the library is imported when the model is built.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Final

import pytest
import torch

from tests.helpers import seed_everything


@dataclass(frozen=True)
class Entry:
    """One model: how to build it, and the arguments that it is called with."""

    library: str
    model: str
    make: Callable[[ModuleType], torch.nn.Module] = field(repr=False)
    arguments: Callable[[], dict[str, Any]] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.library}-{self.model}"

    def build(self) -> torch.nn.Module:
        """Build the model in evaluation mode, the same each time, or skip the test."""
        library = pytest.importorskip(
            self.library, reason=f"needs {self.library}: nox -s ecosystem installs it"
        )
        seed_everything()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries say of their own code
            model = self.make(library)
        return stirred(model).eval()

    def inputs(self) -> dict[str, Any]:
        """Draw the arguments of a call, the same each time; positional ones have numbers."""
        seed_everything(1)
        return self.arguments()

    def call(self, model: torch.nn.Module, inputs: dict[str, Any] | None = None) -> Any:
        """Call the model; with dropout in training mode, the same elements are dropped each time."""
        inputs = self.inputs() if inputs is None else inputs
        seed_everything(2)
        positional = [value for name, value in inputs.items() if name.isdecimal()]
        named = {name: value for name, value in inputs.items() if not name.isdecimal()}
        return model(*positional, **named)


@torch.no_grad()
def stirred(model: torch.nn.Module) -> torch.nn.Module:
    """Move all parameters, so that none has the zeros and ones of its initialization."""
    for name, parameter in model.named_parameters():
        spread = 0.02 if parameter.ndim > 1 else 0.1
        if parameter.is_floating_point() and "A_log" not in name:
            parameter.add_(torch.randn(parameter.shape), alpha=spread)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(torch.randn(buffer.shape), alpha=0.1)
        elif name.endswith("running_var"):
            buffer.mul_(torch.rand(buffer.shape) + 0.5)
    return model


def image(size: int, channels: int = 3, count: int = 2) -> dict[str, Any]:
    """Draw square images, the only argument of a call."""
    return {"0": torch.randn(count, channels, size, size)}


# Sizes of the images. A model that has no size of its own takes images of any size.
TIMM: Final = {
    "convnext_atto": (64, {}),
    "densenet121": (64, {}),
    "eca_nfnet_l0": (64, {}),
    "efficientnet_b0": (64, {}),
    "ghostnet_050": (64, {}),
    "lambda_resnet26t": (64, {"img_size": 64}),
    "mobilenetv3_small_050": (64, {}),
    "repvgg_a0": (64, {"img_size": 64}),
    "resnet18": (64, {}),
    "skresnet18": (64, {}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (2, 2, 2, 2)}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "depth": 4}),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "depth": 4}),
}


def of_torchvision(library: ModuleType, name: str, **options: Any) -> torch.nn.Module:
    """Build a model of torchvision, whose name may have a folder."""
    folder, _, name = name.rpartition(".")
    home = importlib.import_module(".".join(["torchvision.models", *([folder] if folder else [])]))
    return getattr(home, name)(weights=None, **options)


CLASSES: Final = {"num_classes": 5}
UNINITIALIZED: Final = {"num_classes": 5, "init_weights": False}
TORCHVISION: Final = {
    "googlenet": (64, UNINITIALIZED),
    "mobilenet_v2": (64, CLASSES),
    "resnet18": (64, CLASSES),
    "segmentation.deeplabv3_mobilenet_v3_large": (64, {**CLASSES, "weights_backbone": None}),
    "shufflenet_v2_x0_5": (64, CLASSES),
    "video.r3d_18": (32, CLASSES),
}


def clip(size: int) -> dict[str, Any]:
    """Draw a video."""
    return {"0": torch.randn(1, 3, 4, size, size)}


TOKENS: Final = 40
TEXT: Final = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": TOKENS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Final = {**TEXT, "num_key_value_heads": 1}
PATCHES: Final = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
GPT: Final = {
    "n_embd": 16,
    "n_layer": 2,
    "vocab_size": TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STAGES: Final = {"hidden_sizes": [8, 16], "depths": [1, 1]}

# Models of text: the name of the class, that of the configuration, and what is configured.
ENCODERS: Final = {
    "BertForMaskedLM": TEXT,
    "DebertaV2Model": {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}
DECODERS: Final = {
    "GPT2LMHeadModel": {**GPT, "n_head": 2},
    "LlamaForCausalLM": GROUPED,
    "MambaForCausalLM": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": TOKENS,
        "state_size": 4,
    },
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 2},
}
SEQUENCE_TO_SEQUENCE: Final = {
    "T5ForConditionalGeneration": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": TOKENS,
        "decoder_start_token_id": 0,
    },
}
SEEING: Final = {
    "ResNetModel": (32, {**STAGES, "embedding_size": 8, "layer_type": "basic"}),
    "ViTModel": (16, PATCHES),
}
# Which kind of configuration a class takes, where its own name does not say it.
KINDS: Final = ("ForMaskedLM", "ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "MTModel")


def of_transformers(library: ModuleType, name: str, options: dict[str, Any]) -> torch.nn.Module:
    """Build a model of transformers from its configuration."""
    kind = next((kind for kind in KINDS if name.endswith(kind)), "Model")
    config = getattr(library, f"{name.removesuffix(kind)}Config")(**options)
    return getattr(library, name)(config)


def tokens(length: int = 6) -> torch.Tensor:
    """Draw two texts, without special tokens."""
    return torch.randint(3, TOKENS, (2, length))


def text() -> dict[str, Any]:
    """Draw a text of which a part is padding."""
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def whole_text() -> dict[str, Any]:
    """Draw a text without padding."""
    return {"input_ids": tokens()}


def two_texts() -> dict[str, Any]:
    """Draw a text, and the beginning of its translation."""
    return {"input_ids": tokens(), "decoder_input_ids": tokens(3)}


def pictures(size: int) -> dict[str, Any]:
    """Draw the images that a model of transformers takes."""
    return {"pixel_values": torch.randn(2, 3, size, size)}


DENOISERS: Final = {
    "UNet2DModel": {
        "sample_size": 8,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
    },
}


def noise() -> dict[str, Any]:
    """Draw what a model of diffusers takes: noise and a time."""
    return {"0": torch.randn(2, 3, 8, 8), "timestep": torch.tensor([3, 7])}


def of_timm(library: ModuleType, name: str, **options: Any) -> torch.nn.Module:
    """Build a model of timm."""
    return library.create_model(name, num_classes=5, **options)


def of_diffusers(library: ModuleType, name: str) -> torch.nn.Module:
    """Build a model of diffusers."""
    return getattr(library, name)(**DENOISERS[name])


def entries() -> Iterator[Entry]:
    """Yield the entries of all libraries."""
    for name, (size, options) in TIMM.items():
        yield Entry("timm", name, partial(of_timm, name=name, **options), partial(image, size))
    for name, (size, options) in TORCHVISION.items():
        draw = clip if name.startswith("video") else image
        make = partial(of_torchvision, name=name, **options)
        yield Entry("torchvision", name, make, partial(draw, size))
    for names, draw in (
        (ENCODERS, text),
        (DECODERS, whole_text),
        (SEQUENCE_TO_SEQUENCE, two_texts),
    ):
        for name, options in names.items():
            make = partial(of_transformers, name=name, options=options)
            yield Entry("transformers", name, make, draw)
    for name, (size, options) in SEEING.items():
        make = partial(of_transformers, name=name, options=options)
        yield Entry("transformers", name, make, partial(pictures, size))
    for name in DENOISERS:
        make = partial(of_diffusers, name=name)
        yield Entry("diffusers", name, make, noise)


ZOO: Final = list(entries())


def named(*names: str) -> list[Entry]:
    """Return the entries with these names, such as ``timm-resnet18``."""
    by_name = {str(entry): entry for entry in ZOO}
    return [by_name[name] for name in names]
