import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modkit
import modkit.nn


transformers = pytest.importorskip(
    "transformers", reason="needs transformers: nox -s ecosystem installs it"
)

TOKENS = torch.arange(3, 17).reshape(2, 7)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
CLASSES = torch.tensor([0, 1])
SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2() -> Any:
    """Build a decoder whose linear layers are a class of transformers."""
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, **SPECIAL
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    """Build an encoder with a classifier."""
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **SIZE)
    return transformers.BertForSequenceClassification(config)


def llama() -> Any:
    """Build a decoder with rotary embeddings and grouped keys."""
    config = transformers.LlamaConfig(
        vocab_size=64, max_position_embeddings=32, num_key_value_heads=1, **SIZE, **SPECIAL
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    """Build an encoder and decoder that share their embedding."""
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    """Build an encoder of images with a classifier."""
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=2, **SIZE)
    return transformers.ViTForImageClassification(config)


TEXT = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
INPUTS: dict[Callable[[], Any], dict[str, torch.Tensor]] = {
    gpt2: {**TEXT, "labels": TOKENS},
    bert: {**TEXT, "labels": CLASSES},
    llama: {**TEXT, "labels": TOKENS},
    t5: {**TEXT, "labels": TOKENS},
    vit: {"pixel_values": PIXELS, "labels": CLASSES},
}
models = pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let transformers look for nothing outside, and print no progress."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@models
def test_logits_are_equal(make: Callable[[], Any]) -> None:
    """The logits are the same bits before adopt, after it, and after release."""
    model, inputs = make().eval(), INPUTS[make]
    classes, shown = [type(module) for module in model.modules()], repr(model)
    before = model(**inputs).logits

    modkit.adopt(model)
    adopted, all_adopted = (
        model(**inputs).logits,
        all(isinstance(module, modkit.nn.Module) for module in model.modules()),
    )
    shown_adopted = repr(model)
    modkit.release(model)

    assert all_adopted
    assert torch.equal(adopted, before)
    assert shown_adopted == shown
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(**inputs).logits, before)


@models
def test_training_is_equal(make: Callable[[], Any]) -> None:
    """Twenty steps of training, dropout included, give the losses of an unadopted copy."""
    model, inputs = make().train(), INPUTS[make]
    plain = copy.deepcopy(model)

    def train(model: torch.nn.Module) -> list[float]:
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(20):
            loss = model(**inputs).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return losses

    losses = train(modkit.adopt(model))

    assert losses == train(plain)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("make", [gpt2, llama, t5], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "how", [{"do_sample": True}, {"num_beams": 2, "do_sample": False}], ids=str
)
def test_generate_gives_the_same_tokens(make: Callable[[], Any], how: dict[str, Any]) -> None:
    """Sampling and beam search give the tokens that they give without adopt."""
    model = make().eval()

    def generate() -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(**TEXT, max_new_tokens=6, **how)

    before = generate()
    modkit.adopt(model)

    assert torch.equal(generate(), before)


@models
def test_saving_and_loading(make: Callable[[], Any], tmp_path: Path) -> None:
    """A saved adopted model loads through its own class, and through the adopted one."""
    model, inputs = make().eval(), INPUTS[make]
    original = type(model)
    logits = modkit.adopt(model)(**inputs).logits
    model.save_pretrained(tmp_path)

    plain = original.from_pretrained(tmp_path).eval()
    adopted = modkit.adopt(type(model).from_pretrained(tmp_path)).eval()

    assert type(plain) is original
    assert plain.config.architectures == [original.__name__]
    assert type(adopted) is type(model)
    assert torch.equal(plain(**inputs).logits, logits)
    assert torch.equal(adopted(**inputs).logits, logits)


@models
def test_copies(make: Callable[[], Any]) -> None:
    """A deep copy of an adopted model is adopted, has its tied weights, and computes the same."""
    model, inputs = modkit.adopt(make().eval()), INPUTS[make]

    copied = copy.deepcopy(model)

    assert [type(module) for module in copied.modules()] == [type(m) for m in model.modules()]
    assert [name for name, _ in copied.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert torch.equal(copied(**inputs).logits, model(**inputs).logits)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_in_one_graph() -> None:
    """An adopted GPT-2 compiles into one graph, with the logits of the eager model."""
    model, inputs = modkit.adopt(gpt2().eval()), {**TEXT, "use_cache": False}
    expected = model(**inputs).logits

    compiled = torch.compile(model, fullgraph=True, backend="eager")

    torch.testing.assert_close(compiled(**inputs).logits, expected)
