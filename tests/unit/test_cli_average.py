import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import modkit
from modkit.cli import average as command
from modkit.cli._commands import commands
from modkit.files.checkpoint_files import Checkpoint


State = dict[str, Tensor]


def run(*arguments: object) -> click.testing.Result:
    """Run the command line."""
    return click.testing.CliRunner().invoke(commands, ["average", *map(str, arguments)])


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
    """Return what the average is to be."""
    mean = {
        name: torch.stack([state[name].double() for state in saved]).mean(0).to(value.dtype)
        for name, value in saved[0].items()
        if value.is_floating_point()
    }
    return {**mean, "steps": saved[-1]["steps"]}


def saved_as(folder: Path, kind: str, saved: list[State]) -> list[Path]:
    """Write the states as files of one kind, and return what the command is to be told."""
    if kind == "safetensors":
        paths = [folder / f"{index}.safetensors" for index in range(len(saved))]
        for path, state in zip(paths, saved, strict=True):
            save_file(state, path)
        return paths
    if kind == "torch":
        paths = [folder / f"{index}.pt" for index in range(len(saved))]
        for path, state in zip(paths, saved, strict=True):
            torch.save(state, path)
        return paths
    return [sharded(folder / str(index), kind, state) for index, state in enumerate(saved)]


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
    """Read what the command has written, with nothing run."""
    if path.suffix == ".safetensors":
        return load_file(path)
    found: State = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("kind", ["torch", "safetensors", "torch shards", "safetensors shards"])
@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
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


def test_the_options_of_the_average(tmp_path: Path) -> None:
    """Weights, the key in the file, the prefix of the names and the dtype are those that are asked for."""
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


def test_the_average_of_a_run_loads_into_the_model(tmp_path: Path) -> None:
    """The averages that `EMA` has saved can be averaged, by the key that the inspection shows."""
    net = nn.Linear(2, 2)
    ema = modkit.EMA(net)
    for step in range(2):
        ema.update()
        torch.save({"ema": ema.state_dict()}, tmp_path / f"{step}.pt")
    key = "ema.averages.0.tensors"
    seen = run("--inspect", tmp_path / "0.pt")
    done = run(tmp_path / "0.pt", tmp_path / "1.pt", "-o", tmp_path / "out.pt", "--key", key)

    assert f" {key} " in seen.output
    assert "averages of modkit.EMA" in seen.output
    assert done.exit_code == 0
    assert nn.Linear(2, 2).load_state_dict(read(tmp_path / "out.pt")).missing_keys == []


def posthoc(folder: Path) -> State:
    """Train with snapshots of two widths; return an average of a third."""
    net = nn.Linear(1, 1, bias=False)
    averages = modkit.PostHocEMA(net, folder, snapshot_every=20)
    for step in range(200):
        nn.init.constant_(net.weight, step)
        averages.update()
    return averages.reconstruct(sigma_rel=0.15).averages


def test_a_width_is_reconstructed_from_snapshots(tmp_path: Path) -> None:
    """With --ema-sigma the snapshots give the average of that width, and the error of the fit is told."""
    expected = posthoc(tmp_path / "snapshots")
    out = tmp_path / "out.safetensors"
    done = run(tmp_path / "snapshots", "-o", out, "--ema-sigma", "0.15")

    assert done.exit_code == 0
    assert (
        "sigma_rel 0.15 at step 200 from 20 snapshots: relative error of the fit 0.0" in done.output
    )
    assert torch.equal(read(out)["weight"], expected["weight"])


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
    """What the snapshots cannot give is refused, and nothing is written."""
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
    """Whatever name the output has, a file that is read stays, --overwrite or not."""
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


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda state: state.pop("layer.bias"), "layer.bias"),
        (lambda state: state.update({"layer.bias": torch.zeros(5)}), "layer.bias"),
        (lambda state: state.update({"more": torch.zeros(5)}), "more"),
        (lambda state: state.update({"layer.bias": torch.zeros(4, dtype=torch.int)}), "layer.bias"),
    ],
    ids=["missing", "shape", "unexpected", "integers"],
)
def test_checkpoints_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Any, name: str
) -> None:
    """The first name that does not fit stands in the error, and nothing is written."""
    saved = states()
    change(saved[1])
    paths = saved_as(tmp_path, "torch", saved)
    done = run(*paths, "-o", tmp_path / "out.pt")

    assert done.exit_code == 1
    assert name in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt", "2.pt"]


def test_a_dry_run_shows_what_fits_and_writes_nothing(tmp_path: Path) -> None:
    """The table has a line for each name; what differs is named, and is the status."""
    saved = states(2)
    paths = saved_as(tmp_path, "torch", saved)
    fits = run(*paths, "--dry-run", "-o", tmp_path / "out.pt")
    saved[1]["layer.bias"] = torch.zeros(7)
    paths = saved_as(tmp_path, "torch", saved)
    differs = run(*paths, "--dry-run")

    assert fits.exit_code == 0
    assert [fits.output.count(name) for name in states()[0]] == [1, 1, 1]
    assert differs.exit_code == 1
    assert "1.pt: 7" in differs.output
    assert "1 tensors do not fit, the first is layer.bias" in differs.output
    assert not (tmp_path / "out.pt").exists()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """However much of a file is missing, it is named, and nothing is written."""
    whole = saved_as(tmp_path, "torch", states(2))
    content = whole[1].read_bytes()
    for length in (0, 1, len(content) // 3, len(content) // 2, len(content) - 1):
        whole[1].write_bytes(content[:length])
        done = run(*whole, "-o", tmp_path / "out.pt")

        assert done.exit_code == 1, length
        assert "1.pt cannot be read as a checkpoint" in done.output
        assert not (tmp_path / "out.pt").exists()


def test_a_flipped_bit_is_never_averaged(tmp_path: Path) -> None:
    """Each flip of a bit is refused, or was in bytes that mean nothing and changes no result."""
    paths = saved_as(tmp_path, "torch", states(2))
    expected = modkit.average_checkpoints(paths)
    content = paths[1].read_bytes()
    dice = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        paths[1].write_bytes(damaged)
        try:
            found = modkit.average_checkpoints(paths)
        except ValueError as error:
            refused += 1
            assert "1.pt" in str(error)  # noqa: PT017 - which of them raise is not known before
            continue

        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert refused > 100


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    """The error names the file and the tensor whose bytes are wrong."""
    paths = saved_as(tmp_path, "torch", states(2))
    content = bytearray(paths[1].read_bytes())
    place = content.find(states(2)[1]["layer.weight"].numpy().tobytes())
    content[place + 5] ^= 1
    paths[1].write_bytes(content)
    done = run(*paths, "-o", tmp_path / "out.pt")

    assert done.exit_code == 1
    assert "1.pt: layer.weight is damaged: it does not fit its checksum" in done.output


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full"), RuntimeError("broken")])
@pytest.mark.parametrize("existing", [False, True])
def test_an_error_while_writing_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, existing: bool
) -> None:
    """The output is as it was before, and no part of another file is left."""
    paths = saved_as(tmp_path, "torch", states())
    out = tmp_path / "out.pt"
    if existing:
        out.write_bytes(b"old")

    def half(_: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(command.torch, "save", half)
    done = run(*paths, "-o", out, "--overwrite")

    assert done.exit_code == 1
    assert sorted(tmp_path.iterdir()) == sorted([*paths, out] if existing else paths)
    assert not existing or out.read_bytes() == b"old"


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run some code and then the command, in a process of its own."""
    program = f"{code}\nfrom modkit.__main__ import main\nmain()"
    line = [sys.executable, "-c", program, "average", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, encoding="utf-8", check=False)


def test_a_process_that_is_killed_while_writing_leaves_no_output(tmp_path: Path) -> None:
    """After kill -9 in the middle of a file, inputs and the old output are whole."""
    paths = saved_as(tmp_path, "torch", states())
    before = [path.read_bytes() for path in paths]
    out = tmp_path / "out.pt"
    out.write_bytes(b"old")
    code = """
import os, signal, torch
def save(_, path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = save
"""
    done = child(code, *paths, "-o", out, "--overwrite")

    assert done.returncode == -signal.SIGKILL
    assert out.read_bytes() == b"old"
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files as POSIX does")
@pytest.mark.parametrize("output", ["out.pt", "out.safetensors"])
def test_a_full_disk_is_one_line_and_leaves_no_output(tmp_path: Path, output: str) -> None:
    """Where no more can be written, the error says so and the folder is as before."""
    saved = [{"weight": torch.randn(100_000)} for _ in range(2)]
    paths = saved_as(tmp_path, "torch", saved)
    code = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    done = child(code, *paths, "-o", tmp_path / output)

    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {tmp_path / output} cannot be written: ")
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.parametrize("kind", ["torch", "safetensors", "torch shards", "safetensors shards"])
def test_the_inspection_names_every_tensor(tmp_path: Path, kind: str) -> None:
    """Names, shapes, dtypes and sizes are shown, for files and for shards."""
    (path,) = saved_as(tmp_path, kind, states(1))
    done = run("--inspect", path)

    assert done.exit_code == 0
    assert all(name in done.output for name in states()[0])
    assert "4 x 3" in done.output
    assert "48 B" in done.output


@pytest.mark.parametrize("kind", ["torch shards", "safetensors shards"])
def test_the_inspection_of_shards_reads_no_tensor(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes follow from shapes and dtypes; the sizes of bfloat16 and int64 tensors are shown."""
    (path,) = saved_as(tmp_path, kind, states(1))
    read: list[str] = []
    monkeypatch.setattr(Checkpoint, "tensor", lambda _, name: read.append(name))
    done = run("--inspect", path)

    assert done.exit_code == 0
    assert read == []
    assert [f"{size} B" in done.output for size in (48, 8, 8, 64)] == [True] * 4


def test_the_inspection_tells_whose_averages_there_are(tmp_path: Path) -> None:
    """The average of torch is recognised, and what is no tensor is listed as text."""
    net = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(net)
    content = {"swa": average.state_dict(), "net": net.state_dict(), "epoch": 3, "lrs": [0.1, 0.2]}
    torch.save(content, tmp_path / "all.pt")
    done = run("--inspect", tmp_path / "all.pt", "--key", "net")

    assert "averages of torch" in done.output
    assert "Tensors of net" in done.output
    assert "[0.1, 0.2]" in done.output
    assert done.output.count("bias") == 1


def test_the_inspection_runs_nothing(tmp_path: Path) -> None:
    """A file that would run code when it is loaded is refused, and the code does not run."""
    trace = tmp_path / "trace"

    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(trace),)

    torch.save({"model": Harmful()}, tmp_path / "harmful.pt")
    done = run("--inspect", tmp_path / "harmful.pt")

    assert done.exit_code == 1
    assert "harmful.pt cannot be read as a checkpoint" in done.output
    assert not trace.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        (["{0}"], "missing option '-o'"),
        (["{0}", "-o", "{0}/x/y.pt"], "there is no directory"),
        (["missing.pt", "-o", "out.pt"], "does not exist"),
        (["{0}", "-o", "{0}.out", "--weights", "1,x"], "'1,x' is not a list of numbers"),
        (["{0}", "-o", "{0}.out", "--weights", "1,2"], "2 weights for 1 files"),
        (["{0}", "-o", "{0}.out", "--step", "3"], "--step goes with --ema-sigma"),
        (["{0}", "-o", "{0}.out", "--dtype", "int8"], "'int8' is not one of"),
        (["{0}", "-o", "{0}.out", "--prefix", "net."], "no name begins with --prefix 'net.'"),
        (["{0}", "-o", "{0}.out", "--key", "model"], "no 'model' on the way"),
    ],
)
def test_bad_arguments_are_one_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    """What is wrong is said, without a traceback."""
    (path,) = saved_as(tmp_path, "torch", states(1))
    done = run(*(argument.format(path) for argument in arguments))

    assert done.exit_code in {1, 2}
    assert message in done.output
    assert "Traceback" not in done.output
