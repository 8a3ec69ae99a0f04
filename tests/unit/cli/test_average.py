import functools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import modkit
from modkit.distributed import export_average
from modkit.files.tensor_files import Checkpoint
from tests.cases import for_each
from tests.unit.cli.command_line import invoke


run = functools.partial(invoke, "average")
State = dict[str, Tensor]


def states(count: int = 3) -> list[State]:
    """Return states of one model at several times."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "layer.weight": torch.randn(4, 3, generator=generator),
            "layer.bias": torch.randn(4, generator=generator).bfloat16(),
            "steps": torch.tensor(step),
        }
        for step in range(count)
    ]


def mean_of(saved: list[State]) -> State:
    """Return the expected average."""
    mean = {
        name: torch.stack([state[name].double() for state in saved]).mean(0).to(value.dtype)
        for name, value in saved[0].items()
        if value.is_floating_point()
    }
    return {**mean, "steps": saved[-1]["steps"]}


def saved_as(folder: Path, kind: str, saved: list[State]) -> list[Path]:
    """Write the states as files of one kind, and return the arguments for the command."""
    if "shards" in kind:
        return [sharded(folder / str(index), kind, state) for index, state in enumerate(saved)]

    write, suffix = (torch.save, "pt") if kind == "torch" else (save_file, "safetensors")
    paths = [folder / f"{index}.{suffix}" for index in range(len(saved))]
    for path, state in zip(paths, saved, strict=True):
        write(state, path)
    return paths


def sharded(folder: Path, kind: str, state: State) -> Path:
    """Write a state in two files and an index, as transformers does; return the folder."""
    folder.mkdir()
    suffix, stem = ("bin", "pytorch_model") if kind == "torch shards" else ("safetensors", "model")
    halves = dict(list(state.items())[:1]), dict(list(state.items())[1:])
    names: dict[str, str] = {}
    for number, half in enumerate(halves):
        file = f"{stem}-{number}.{suffix}"
        names |= dict.fromkeys(half, file)
        if suffix == "bin":
            torch.save(half, folder / file)
        else:
            save_file(half, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def read(path: Path) -> State:
    """Read the output of the command, without executing code from it."""
    if path.suffix == ".safetensors":
        return load_file(path)
    found: State = torch.load(path, weights_only=True)
    return found


@for_each("kind", ["torch", "safetensors", "torch shards", "safetensors shards"])
@for_each("output", ["out.pt", "out.safetensors"])
def test_every_kind_is_averaged_into_either_kind(tmp_path: Path, kind: str, output: str) -> None:
    """Files and shards of both formats are read, and the name of the output chooses its format."""
    paths = saved_as(tmp_path, kind, states())
    done = run(*paths, "-o", tmp_path / output)
    found, expected = read(tmp_path / output), mean_of(states())

    assert (done.exit_code, done.stderr) == (0, "")
    assert "the average of 3, 3 tensors" in done.stdout
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_tied_weights_are_written_to_safetensors(tmp_path: Path) -> None:
    """They are written under each name, as export_average() does; the model loads them."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    torch.save(net.state_dict(), tmp_path / "tied.pt")
    found = run(tmp_path / "tied.pt", "-o", tmp_path / "tied.safetensors")
    ema = modkit.EMA(net)
    ema.update()
    export_average(ema, tmp_path / "exported.safetensors")

    assert (found.exit_code, found.stderr) == (0, "")
    assert (tmp_path / "tied.safetensors").read_bytes() == (
        tmp_path / "exported.safetensors"
    ).read_bytes()
    assert net.load_state_dict(load_file(tmp_path / "tied.safetensors"))


@for_each("output", ["out.pt", "out.safetensors"])
@for_each("prefix", ["", "model."])
def test_the_versions_of_modules_are_kept(tmp_path: Path, output: str, prefix: str) -> None:
    """A prefix is removed from their paths, too; without versions, some modules refuse a state."""
    net = nn.ModuleDict({"model": nn.Sequential(nn.BatchNorm1d(2)), "other": nn.BatchNorm1d(2)})
    torch.save(net.state_dict(), tmp_path / "old.pt")
    found = run(tmp_path / "old.pt", "--prefix", prefix, "-o", tmp_path / output)
    source = net.model if prefix else net
    expected = {path: entry["version"] for path, entry in source.state_dict()._metadata.items()}

    assert (found.exit_code, found.stderr) == (0, "")
    versions = Checkpoint(tmp_path / output).versions
    assert {path: entry.get("version") for path, entry in versions.items()} == expected


def test_the_options_of_the_average(tmp_path: Path) -> None:
    """--weights, --key, --prefix and --dtype are applied."""
    paths = [tmp_path / f"{index}.pt" for index in range(2)]
    for path, value in zip(paths, (1.0, 5.0), strict=True):
        net = {"module.w": torch.tensor([value]), "n_averaged": torch.tensor(3)}
        torch.save({"epoch": 1, "averages": [net]}, path)
    out = tmp_path / "out.pt"
    options = [
        "--weights",
        "3,1",
        "--key",
        "averages.0",
        "--prefix",
        "module.",
        "--dtype",
        "float64",
    ]
    done = run(*paths, "-o", out, *options)

    assert (done.exit_code, done.output) == (0, f"{out}: the average of 2, 1 tensors\n")
    assert read(out) == {"w": torch.tensor([2.0], dtype=torch.float64)}
    assert read(out)["w"].dtype == torch.float64


def posthoc(folder: Path) -> State:
    """Train with snapshots of two widths; return an average of a third."""
    net = nn.Linear(1, 1, bias=False)
    averages = modkit.PostHocEMA(net, folder, snapshot_every=20)
    for step in range(200):
        nn.init.constant_(net.weight, step)
        averages.update()
    return averages.reconstruct(sigma_rel=0.15).averages


def test_a_width_is_reconstructed_from_snapshots(tmp_path: Path) -> None:
    """With --ema-sigma the snapshots give the average of that width; the error of the fit is printed."""
    expected = posthoc(tmp_path / "snapshots")
    out = tmp_path / "out.safetensors"
    done = run(tmp_path / "snapshots", "-o", out, "--ema-sigma", "0.15")

    assert done.exit_code == 0
    assert (
        "sigma_rel 0.15 at step 200 from 20 snapshots: relative error of the fit 0.0" in done.output
    )
    assert torch.equal(read(out)["weight"], expected["weight"])


def test_a_reconstructed_value_that_is_too_large_for_the_dtype(tmp_path: Path) -> None:
    """It would become infinite, so nothing is written."""
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, 1e6)
    ema = modkit.PostHocEMA(net, tmp_path / "snapshots", snapshot_every=2)
    for _ in range(8):
        ema.update()
    options = ("--ema-sigma", "0.1", "--dtype", "float16")
    done = run(tmp_path / "snapshots", "-o", tmp_path / "out.pt", *options)

    assert (done.exit_code, "too large for torch.float16" in done.stderr) == (1, True)
    assert not (tmp_path / "out.pt").exists()


@for_each(
    "others",
    [
        *({}, {"head.w": torch.ones(3)}, {"head.w": torch.ones(2, dtype=torch.int64)}),
        {"head._extra_state": {"scale": 1}},
    ],
)
def test_tensors_without_the_prefix_may_differ(tmp_path: Path, others: State) -> None:
    """They are not averaged, so they are not compared: classifiers of fine-tuned models."""
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    torch.save({"model.w": torch.tensor([1.0]), "head.w": torch.ones(2)}, paths[0])
    torch.save({"model.w": torch.tensor([3.0]), **others}, paths[1])
    options = ("--prefix", "model.")
    done = run(*paths, *options, "-o", tmp_path / "o.pt")

    assert (done.exit_code, read(tmp_path / "o.pt")) == (0, {"w": torch.tensor([2.0])}), done.output
    assert modkit.average_checkpoints(paths, prefix="model.") == {"model.w": torch.tensor([2.0])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ema-sigma", "0.01"], "narrower than all snapshots"),
        (["--ema-sigma", "0.15", "--step", "1000"], "step 1000 is outside"),
    ],
)
def test_no_width_and_no_step_is_extrapolated(
    tmp_path: Path, options: list[str], message: str
) -> None:
    """A width or step outside the snapshots is refused, and nothing is written."""
    posthoc(tmp_path / "snapshots")
    done = run(tmp_path / "snapshots", "-o", tmp_path / "out.pt", *options)

    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "out.pt").exists()


def linked(path: Path, how: str) -> Path:
    """Return another name of a file."""
    other = path.with_name("other.pt")
    if how == "symbolic":
        other.symlink_to(path)
    else:
        other.hardlink_to(path)
    return other


@pytest.mark.parametrize("how", ["same", "symbolic", "hard"])
def test_an_input_is_never_overwritten(tmp_path: Path, how: str) -> None:
    """An input stays under any name of the output, also with --overwrite."""
    paths = saved_as(tmp_path, "torch", states())
    output = paths[1] if how == "same" else linked(paths[1], how)
    before = paths[1].read_bytes()
    done = run(*paths, "-o", output, "--overwrite")

    assert done.exit_code == 1
    assert f"{output} is an input: {paths[1]}" in done.output
    assert paths[1].read_bytes() == before


def test_a_shard_is_never_overwritten(tmp_path: Path) -> None:
    """The files beside an index are inputs as well."""
    paths = saved_as(tmp_path, "safetensors shards", states())
    shard = paths[0] / "model-1.safetensors"
    before = shard.read_bytes()
    done = run(*paths, "-o", shard, "--overwrite")

    assert (done.exit_code, "is an input" in done.output) == (1, True)
    assert shard.read_bytes() == before


def test_another_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    """A file that exists is kept, unless --overwrite is given."""
    paths = saved_as(tmp_path, "torch", states())
    out = tmp_path / "out.pt"
    out.write_bytes(b"precious")
    refused = run(*paths, "-o", out)
    kept = out.read_bytes()
    done = run(*paths, "-o", out, "--overwrite")

    assert (refused.exit_code, kept) == (1, b"precious")
    assert "--overwrite replaces it" in refused.output
    assert done.exit_code == 0
    assert read(out).keys() == states()[0].keys()


def test_names_cannot_forge_output(tmp_path: Path) -> None:
    """Control characters in names and paths are escaped, in tables and in errors."""
    first, second = tmp_path / "a\x1b[31m.pt", tmp_path / "b\n.pt"
    torch.save({"a\x1b[31mb": torch.ones(1), "line\nbreak": torch.ones(1)}, first)
    torch.save({"a\x1b[31mb": torch.ones(2), "[red]c[/red]": torch.ones(1)}, second)
    runs = [
        run(first, second, "-o", tmp_path / "out.pt"),
        run(first, "-o", tmp_path / "out\x1b.pt"),
        run(first, "-o", tmp_path / "out.pt", "--key", "\x1b"),
        run(first, "-o", tmp_path / "out.pt", "--prefix", "\x1b"),
    ]

    assert [done.exit_code for done in runs] == [1, 0, 1, 1]
    for done in runs:
        assert all(c.isprintable() or c == "\n" for c in done.output)
    assert r"b\n.pt" in runs[0].output


def no_work(*_: object, **__: object) -> None:
    """Stand for the work that must not begin."""
    raise AssertionError("the work has begun")


@for_each(
    "why",
    [
        *("missing folder", "read-only", "write-protected", "linked", "index", "exists"),
        "directory",
    ],
)
def test_an_impossible_output_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """An output that cannot be written is an error before any file is read."""
    paths = saved_as(tmp_path, "torch", states())
    out = tmp_path / "out.pt"
    if why == "missing folder":
        out = tmp_path / "missing" / "out.pt"
    elif why == "read-only":
        monkeypatch.setattr(os, "access", lambda _, mode, **__: mode != os.W_OK)
    elif why == "write-protected":
        out.touch()
        monkeypatch.setattr(os, "access", lambda path, mode, **__: path != out or mode != os.W_OK)
    elif why == "linked":
        # The folder of the file is written to, and not that of the link.
        out.symlink_to(tmp_path / "missing" / "out.pt")
    elif why == "index":
        out.with_name("out.pt.index.json").touch()
    elif why == "exists":
        out.touch()
    else:
        out.mkdir()
    monkeypatch.setattr("modkit.averaging.checkpoints.average_checkpoints", no_work)
    done = run(*paths, "-o", out)
    message = {
        "missing folder": "there is no directory",
        "read-only": "is not writable",
        "write-protected": "out.pt is not writable",
        "linked": f"there is no directory {tmp_path / 'missing'}",
        "index": "out.pt.index.json exists: remove it and its shards",
        "exists": "--overwrite replaces it",
        "directory": "is a directory",
    }[why]

    assert done.exit_code in {1, 2}
    assert message in done.stderr


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", "optimizer.pt", "scheduler.pt"], "model.safetensors"),
        (["model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        (["diffusion_pytorch_model.safetensors", "vae.pt"], "diffusion_pytorch_model.safetensors"),
        (["adapter_model.safetensors"], "adapter_model.safetensors"),
        (["adapter_model.bin"], "adapter_model.bin"),
        (["last.pt", "README.md"], "last.pt"),
        (["last.ckpt"], "last.ckpt"),
        (["weights.safetensors"], "weights.safetensors"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_the_checkpoint_of_a_directory(tmp_path: Path, names: list[str], expected: str) -> None:
    """The file of transformers, diffusers or peft is read, else the only checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    for number, name in enumerate(names):
        value = 7.0 if name == expected else float(number)
        if name.endswith(".safetensors"):
            save_file({"w": torch.tensor([value])}, folder / name)
        else:
            torch.save({"w": torch.tensor([value])}, folder / name)
    found = run(folder, "-o", tmp_path / "out.pt")

    assert (found.exit_code, found.stderr) == (0, "")
    assert read(tmp_path / "out.pt")["w"].item() == 7.0


@pytest.mark.parametrize(
    "names", [["1.pt", "2.pt"], ["adapter_model.safetensors", "model.safetensors"]], ids="+".join
)
def test_an_ambiguous_directory(tmp_path: Path, names: list[str]) -> None:
    """The error lists the candidates, and nothing is written."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    found = run(folder, "-o", tmp_path / "out.pt")

    assert found.exit_code == 1
    assert "run has 2 checkpoints, name one of them: " in found.stderr
    assert all(name in found.stderr for name in names)
    assert not (tmp_path / "out.pt").exists()
