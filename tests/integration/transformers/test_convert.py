"""`modkit convert` writes what transformers reads, and reads what it writes."""

from pathlib import Path

import click.testing
import pytest
import torch

from modkit.cli._commands import commands


transformers = pytest.importorskip(
    "transformers", reason="needs transformers: nox -s ecosystem installs it"
)


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


def test_transformers_loads_what_was_converted(tmp_path: Path, model: torch.nn.Module) -> None:
    """From its own shards to a file of torch, and to one of safetensors, every parameter stays the same."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs, max_shard_size="40KB")
    convert(theirs, "-o", tmp_path / "one.pt")
    ours.mkdir()
    (ours / "config.json").write_bytes((theirs / "config.json").read_bytes())
    convert(tmp_path / "one.pt", "-o", ours / "model.safetensors")
    again = transformers.AutoModelForCausalLM.from_pretrained(ours)

    expected = model.state_dict()
    found = again.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
