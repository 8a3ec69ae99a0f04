"""``migrate_file``: streamed, atomic, with versions in the metadata of the target."""

import json
import signal
import sys
import textwrap

import pytest
import torch

import modkit
from modkit import migrations as mig
from modkit.errors import FileError, MigrationError
from modkit.files.tensor_files import Checkpoint
from tests.processes import python
from tests.unit.migrations.networks import (
    equal,
    joined,
    network,
    new_attention,
    old_attention,
    versions,
)


pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file


nn = torch.nn
Attention = new_attention(nn)


@pytest.fixture
def old():
    """Return a state dict of version 1."""
    return network(nn, old_attention(nn)).state_dict()


@pytest.fixture
def model():
    """Return a model of version 3, without values."""
    with torch.device("meta"):
        return network(nn, Attention)


def content(folder):
    """Return the names in a folder with their bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_kind_of_source(tmp_path, old, model):
    """Files of torch and of safetensors, and state dicts at a key, give what ``migrate`` returns."""
    torch.save(old, tmp_path / "a.pt")
    torch.save({"model": old, "epoch": 3}, tmp_path / "b.pt")
    save_file(dict(old), tmp_path / "c.safetensors")

    for name, key in (("a.pt", None), ("b.pt", "model"), ("c.safetensors", None)):
        lines = mig.migrate_file(model, tmp_path / name, tmp_path / "new.safetensors", key=key)

        assert equal(load_file(tmp_path / "new.safetensors"), joined(old))
        assert sorted(lines) == sorted(mig.plan(model, old))


def test_the_target_holds_versions(tmp_path, old, model):
    """The metadata of the target has the versions; the way back through files gives the old file."""
    torch.save(old, tmp_path / "old.pt")
    mig.migrate_file(model, tmp_path / "old.pt", tmp_path / "new.safetensors")

    with safe_open(tmp_path / "new.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["modkit.versions"])["blocks.1"] == 3
    lines = mig.migrate_file(
        model, tmp_path / "new.safetensors", tmp_path / "back.safetensors", to={Attention: 1}
    )
    assert len(lines) == 12
    assert equal(load_file(tmp_path / "back.safetensors"), old)
    assert Checkpoint(tmp_path / "back.safetensors").versions["blocks.0"] == {"version": 1}
    averaged = modkit.average_checkpoints([tmp_path / "new.safetensors"])
    assert versions(averaged)["blocks.0"] == 3


def test_corrupt_versions(tmp_path):
    """Versions that are not versions make the file corrupt."""
    not_versions = r"modkit\.versions are not versions of modules"
    for text, reason in (
        ("{", not_versions),
        ("[1]", not_versions),
        ('{"a": "b"}', not_versions),
        ("[" * 9_000, not_versions),
        ("[" * 100_000, not_versions),
    ):
        path = tmp_path / "file.safetensors"
        save_file({"w": torch.ones(1)}, path, metadata={"modkit.versions": text})

        with pytest.raises(FileError, match=reason):
            Checkpoint(path)


def test_a_refusal_leaves_the_target(tmp_path, old, model):
    """If a step is impossible, or a function differs on meta tensors, the target is as it was."""
    del old["blocks.1.k.weight"]
    torch.save(old, tmp_path / "old.pt")
    (tmp_path / "new.safetensors").write_bytes(b"before")
    before = content(tmp_path)
    with pytest.raises(
        MigrationError, match=r"q\.weight is in the state dict, but k\.weight is missing"
    ):
        mig.migrate_file(model, tmp_path / "old.pt", tmp_path / "new.safetensors")
    assert content(tmp_path) == before

    @mig.declare({2: [mig.convert("w", lambda w: w if w.is_meta else w[:1], new="v")]})
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.v = nn.Parameter(torch.zeros(2))

    torch.save({"w": torch.zeros(2)}, tmp_path / "old.pt")
    before = content(tmp_path)
    with pytest.raises(
        MigrationError, match=r"the step returned torch.float32 \[1\], but torch.float32 \[2\]"
    ):
        mig.migrate_file(Odd(), tmp_path / "old.pt", tmp_path / "new.safetensors")
    assert content(tmp_path) == before


def test_a_default_is_merged_with_a_tensor_of_the_file(tmp_path):
    """One is in memory, and the other is read when the target is written."""

    @mig.declare({2: [mig.add("b", torch.ones(1)), mig.merge(["a", "b"], "c")]})
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Parameter(torch.zeros(2))

    torch.save({"a": torch.zeros(1)}, tmp_path / "old.pt")

    mig.migrate_file(Net(), tmp_path / "old.pt", tmp_path / "new.safetensors")

    assert load_file(tmp_path / "new.safetensors")["c"].tolist() == [0.0, 1.0]


def test_a_source_that_is_replaced(tmp_path):
    """A file that another one replaces while it is read stays open, and is read to its end."""

    def replacing(tensor):
        if not tensor.is_meta:
            torch.save({"a": torch.zeros(3), "b": torch.zeros(3)}, tmp_path / "other.pt")
            (tmp_path / "other.pt").replace(tmp_path / "old.pt")
        return tensor * 2

    @mig.declare({2: [mig.convert("a", replacing), mig.rename("b", "c")]})
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(2))
            self.c = nn.Parameter(torch.zeros(2))

    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "old.pt")

    mig.migrate_file(Net(), tmp_path / "old.pt", tmp_path / "new.safetensors")
    written = load_file(tmp_path / "new.safetensors")
    assert (written["a"].tolist(), written["c"].tolist()) == ([2.0, 2.0], [1.0, 1.0])


PROGRAM = """
    import os, re, signal, sys
    from pathlib import Path
    import torch
    from modkit import migrations as mig

    layers, width, fatal = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    calls = []

    def turn(weight):
        if not weight.is_meta:
            calls.append(1)
            if len(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        return weight.t()

    steps = [mig.merge(["q.*", "k.*", "v.*"], "qkv.*"), mig.convert("out.weight", turn, turn)]

    @mig.declare({2: steps})
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
            self.out = torch.nn.Linear(width, width, bias=False)

    with torch.device("meta"):
        model = torch.nn.Sequential(*(Block() for _ in range(layers)))
    from safetensors import safe_open
    # The first operation on a meta tensor imports 800 modules of torch, 70 MiB.
    torch.cat([torch.empty(2, 2, device="meta")])

    def peak():
        # Of this program alone: ru_maxrss begins with the memory of the process that started it.
        status = Path("/proc/self/status")
        text = status.read_text() if status.exists() else "VmHWM: 0"
        return int(re.search(r"VmHWM:\\s+(\\d+)", text)[1])

    before = peak()
    mig.migrate_file(model, sys.argv[4], sys.argv[5], versions={Block: 1})
    print(peak() - before)
"""


def large_file(path, layers, width):
    """Write blocks with q, k, v and out."""
    torch.save(
        {
            f"{layer}.{name}.weight": torch.randn(width, width)
            for layer in range(layers)
            for name in ("q", "k", "v", "out")
        },
        path,
    )


def run(*arguments):
    """Run the program in a process of its own."""
    return python(textwrap.dedent(PROGRAM), *arguments)


@pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")
def test_killed_in_the_middle(tmp_path):
    """A process that is killed while it writes leaves the target as it was."""
    large_file(tmp_path / "old.pt", 4, 8)
    (tmp_path / "new.safetensors").write_bytes(b"before")

    killed = run(4, 8, 3, tmp_path / "old.pt", tmp_path / "new.safetensors")
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "new.safetensors").read_bytes() == b"before"
    assert run(4, 8, 0, tmp_path / "old.pt", tmp_path / "new.safetensors").returncode == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.safetensors", "old.pt"]
    old, new = torch.load(tmp_path / "old.pt"), load_file(tmp_path / "new.safetensors")
    assert torch.equal(new["2.qkv.weight"], torch.cat([old[f"2.{name}.weight"] for name in "qkv"]))
    assert torch.equal(new["3.out.weight"], old["3.out.weight"].t())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_memory_of_a_large_file(tmp_path, kind):
    """A file of 1.2 GB migrates with at most 150 MiB more than before."""
    layers, width = 72, 1024
    path = tmp_path / "old.pt"
    large_file(path, layers, width)
    if kind == "safetensors":
        save_file(torch.load(path, mmap=True), tmp_path / "old.safetensors")
        path = tmp_path / "old.safetensors"
    assert path.stat().st_size > 1.2e9

    done = run(layers, width, 0, path, tmp_path / "new.safetensors")

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 150 << 10
