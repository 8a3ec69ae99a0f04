"""Models of other libraries for `modkit compat`, with the options that it is called with."""

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch

from modkit.compat.model import Target


def timm(name: str) -> torch.nn.Module:
    """Build a model of timm."""
    model: torch.nn.Module = importlib.import_module("timm").create_model(name)
    return model


def torchvision(name: str) -> torch.nn.Module:
    """Build a model of torchvision."""
    model: torch.nn.Module = importlib.import_module("torchvision.models").get_model(name)
    return model


def transformers(model: str, config: str, **sizes: Any) -> torch.nn.Module:
    library = importlib.import_module("transformers")
    built: torch.nn.Module = getattr(library, model)(getattr(library, config)(**sizes))
    return built


def tokens() -> dict[str, torch.Tensor]:
    """Return the inputs of a language model."""
    return {"input_ids": torch.randint(100, (2, 16))}


TOKENS: Final = f"{__name__}:tokens"
BERT: Final = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
GPT2: Final = {"n_embd": 64, "n_head": 4, "n_layer": 2, "bos_token_id": 0, "eos_token_id": 0}
# The factories of targets, which have no arguments.
made: Final = SimpleNamespace(
    resnet18=partial(timm, "resnet18"),
    vit=partial(timm, "vit_tiny_patch16_224"),
    residual=partial(torchvision, "resnet18"),
    mobile=partial(torchvision, "mobilenet_v3_small"),
    bert=partial(transformers, "BertModel", "BertConfig", vocab_size=100, **BERT),
    gpt2=partial(transformers, "GPT2LMHeadModel", "GPT2Config", vocab_size=100, **GPT2),
)


def target(library: str, factory: str, inputs: str = "2,3,64,64") -> Target:
    """Return a target of this file whose library is swapped, too."""
    return Target(f"{__name__}:made.{factory}", (inputs,), (library,))


MODELS: Final = {
    "timm resnet18": target("timm", "resnet18"),
    "timm vit_tiny_patch16_224": target("timm", "vit", inputs="1,3,224,224"),
    "torchvision resnet18": target("torchvision", "residual"),
    "torchvision mobilenet_v3_small": target("torchvision", "mobile"),
    "transformers BertModel": target("transformers", "bert", inputs=TOKENS),
    "transformers GPT2LMHeadModel": target("transformers", "gpt2", inputs=TOKENS),
}
