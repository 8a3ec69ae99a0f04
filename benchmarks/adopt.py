"""Measure how much faster models of other libraries run once they are adopted.

    pip install transformers timm torchvision
    python benchmarks/adopt.py

Small models with random weights, batch 1, in ``torch.inference_mode()``: the networks of which the
modules, and not the arithmetic, take the time. Each is timed in turns as it is, adopted, and adopted
inside of ``modkit.fast_attributes``; a round gives one ratio, and the table shows their medians, with
the middle half. What is counted is the time that the one thread spends on the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import statistics
import time
import timeit
from typing import TYPE_CHECKING, Any

import torch

import modkit


if TYPE_CHECKING:
    from collections.abc import Callable

Inputs = dict[str, torch.Tensor]
TOKENS = {"input_ids": torch.arange(1, 9)[None]}
SIZE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def gpt2() -> tuple[torch.nn.Module, Inputs]:
    """Build a GPT-2 of four layers and width 64, for eight tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=4, n_head=4, **special)
    return GPT2LMHeadModel(config), {**TOKENS}


def llama() -> tuple[torch.nn.Module, Inputs]:
    """Build a Llama of four layers and width 64, for eight tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **SIZE)), TOKENS


def vit() -> tuple[torch.nn.Module, Inputs]:
    """Build a ViT of four layers and width 64, for images of 4 by 4 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=32, patch_size=8, **SIZE)
    return ViTForImageClassification(config), {"pixel_values": torch.ones(1, 3, 32, 32)}


def mixer() -> tuple[torch.nn.Module, Inputs]:
    """Build an MLP-Mixer of timm with four layers and width 64, for 4 by 4 patches."""
    from timm.models.mlp_mixer import MlpMixer

    model = MlpMixer(num_classes=8, img_size=32, patch_size=8, num_blocks=4, embed_dim=64)
    return model, {"x": torch.ones(1, 3, 32, 32)}


def mlp() -> tuple[torch.nn.Module, Inputs]:
    """Build a policy network: 4 blocks of Linear 64, LayerNorm and ReLU."""
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers), {"input": torch.ones(1, 64)}


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Inputs]]] = {
    "GPT-2, 4 x 64 (transformers)": gpt2,
    "Llama, 4 x 64 (transformers)": llama,
    "ViT, 4 x 64 (transformers)": vit,
    "MLP-Mixer, 4 x 64 (timm)": mixer,
    "4 x (Linear 64, LayerNorm, ReLU)": mlp,
}


def per_call(model: torch.nn.Module, inputs: Inputs, number: int) -> float:
    """Return the seconds that one call takes."""
    names: dict[str, Any] = {"model": model, "inputs": inputs}
    statement = timeit.Timer("model(**inputs)", globals=names, timer=time.thread_time)
    return statement.timeit(number) / number


def measure(make: Callable[[], tuple[torch.nn.Module, Inputs]], rounds: int) -> list[list[float]]:
    """Return for each round the time of the plain model and the two ratios to it."""
    model, inputs = make()
    plain = model.eval()
    adopted, fast = (modkit.adopt(copy.deepcopy(plain)) for _ in range(2))
    rows = []
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        stack.enter_context(modkit.fast_attributes(fast))
        number = max(5, int(0.02 / per_call(plain, inputs, 20)))
        for turn in range(rounds):
            order = [plain, adopted, fast][:: 1 if turn % 2 else -1]
            times = {id(model): per_call(model, inputs, number) for model in order}
            base = times[id(plain)]
            rows.append([base, times[id(adopted)] / base, times[id(fast)] / base])
    return rows


def main() -> None:
    """Measure and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--only", default="", metavar="WORD", help="models whose name contains it")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()
    print("| model | as it is | adopted | adopted, `fast_attributes` |")
    print("|---|---|---|---|")
    for name, make in MODELS.items():
        if options.only not in name:
            continue
        base, *ratios = zip(*measure(make, options.rounds), strict=True)
        cells = [f"{statistics.median(base) * 1e6:,.0f} us"]
        for column in ratios:
            low, middle, high = statistics.quantiles(column, n=4)
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")
        gc.collect()


if __name__ == "__main__":
    main()
