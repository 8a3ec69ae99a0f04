"""`modkit convert` writes what transformers reads, and reads what it writes."""

import json
from pathlib import Path

import click.testing
import pytest
import torch

from modkit.cli._commands import commands


transformers = pytest.importorskip(
    "transformers", reason="needs transformers: nox -s ecosystem installs it"
)
hub = pytest.importorskip("huggingface_hub")


def convert(*arguments: object) -> None:
    """Run the command, which must succeed."""
    line = ["convert", *map(str, arguments)]
    found = click.testing.CliRunner().invoke(commands, line)
    assert (found.exit_code, found.stderr) == (0, "")


@pytest.fixture
def model() -> torch.nn.Module:
    """Return a small model with tied embeddings."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=100)
    )


@pytest.mark.parametrize("size", ["50KB", "1GB"])
def test_transformers_loads_what_was_converted(
    tmp_path: Path, model: torch.nn.Module, size: str
) -> None:
    """From its own shards to a file, and from a file to shards, every parameter stays the same."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs, max_shard_size="40KB")
    convert(theirs, "-o", tmp_path / "one.pt")
    ours.mkdir()
    (ours / "config.json").write_bytes((theirs / "config.json").read_bytes())
    convert(tmp_path / "one.pt", "-o", ours / "model.safetensors", "--max-shard-size", size)
    again = transformers.AutoModelForCausalLM.from_pretrained(ours)

    expected = model.state_dict()
    found = again.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (ours / "model.safetensors").exists() == (size == "1GB")


@pytest.mark.parametrize("size", [30_000, 100_000])
def test_the_index_is_that_of_the_hub(tmp_path: Path, size: int) -> None:
    """Names, sizes and contents of the files are those of huggingface_hub."""
    state = {f"layer.{n}": torch.full((2_000 + 500 * (n % 3),), float(n)) for n in range(30)}
    torch.save(state, tmp_path / "one.pt")
    convert(
        *(tmp_path / "one.pt", "-o", tmp_path / "model.safetensors"),
        *("--max-shard-size", f"{size}B"),
    )
    expected = hub.split_torch_state_dict_into_shards(state, max_shard_size=size)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == expected.tensor_to_filename
    assert index["metadata"]["total_size"] == expected.metadata["total_size"]
