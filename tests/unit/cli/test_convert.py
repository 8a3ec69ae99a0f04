"""The command ``convert``: formats and dtypes, streamed and atomic."""

import functools
import itertools
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modkit import migrations as mig
from modkit.files import verify
from modkit.files.safetensors_files import save_safetensors
from modkit.files.tensor_files import Checkpoint
from tests.processes import peak_of_command
from tests.unit.cli.command_line import invoke
from tests.unit.files.test_inspect import scripted


run = functools.partial(invoke, "convert")
State = dict[str, Tensor]
SUFFIXES = ("pt", "bin", "safetensors")
both_formats = pytest.mark.parametrize("suffix", ["safetensors", "bin"])


def state() -> State:
    """Return tensors of several dtypes, with an empty one and a scalar."""
    torch.manual_seed(0)
    return {
        "z.weight": torch.randn(40, 30),
        "a.half": torch.randn(10, 20).bfloat16(),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "z.bias": torch.randn(30, dtype=torch.float64),
    }


def write(tensors: State, path: Path) -> Path:
    """Write a file with the library of its format."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(tensors, path, {"format": "pt", "origin": "a test"})
    else:
        torch.save(tensors, path)
    return path


def read(path: Path) -> State:
    """Read a file with the library of its format."""
    found: State = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    return found


def sharded(folder: Path) -> list[Path]:
    """Write two shards with versions of modules, and their index; return all three."""
    folder.mkdir()
    names: dict[str, str] = {}
    for number, part in enumerate((list(state())[:3], list(state())[3:])):
        tensors = {name: state()[name] for name in part}
        file = folder / f"model-{number}.safetensors"
        save_safetensors(tensors, file, {"": {"version": 2}})
        names |= dict.fromkeys(part, file.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    return [index, *sorted(folder.glob("model-*"))]


def listing(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def assert_same(found: State, expected: State) -> None:
    """Compare names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("old", SUFFIXES)
@pytest.mark.parametrize("new", SUFFIXES)
def test_each_format_becomes_each_other(tmp_path: Path, old: str, new: str) -> None:
    """All tensors stay bitwise the same, and the new file is intact."""
    source = write(state(), tmp_path / f"old.{old}")
    found = run(source, "-o", tmp_path / f"new.{new}")

    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout == f"{tmp_path}/new.{new}: 6 tensors\n"
    assert_same(read(tmp_path / f"new.{new}"), state())
    verify(tmp_path / f"new.{new}")
    if new != "safetensors":
        assert list(read(tmp_path / f"new.{new}")) == list(Checkpoint(source).shapes)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_dtype_and_key(tmp_path: Path, suffix: str) -> None:
    """Floating-point tensors are cast, others are not; --key chooses a state dict."""
    torch.save({"epoch": 1, "model": {"ema": state()}}, tmp_path / "last.pt")
    out = tmp_path / f"out.{suffix}"
    found = run(tmp_path / "last.pt", "-o", out, "--key", "model.ema", "--dtype", "float16")

    assert found.exit_code == 0, found.stderr
    expected = {n: t.half() if t.is_floating_point() else t for n, t in state().items()}
    assert_same(read(out), expected)


def test_shards_become_one_file(tmp_path: Path) -> None:
    """By their index, by their folder, or one by one; the versions of modules are kept."""
    index, *files = sharded(tmp_path / "shards")
    for number, sources in enumerate(([index], [index.parent], files)):
        out = tmp_path / f"one{number}.pt"
        done = run(*sources, "-o", out, "--json")

        assert json.loads(done.stdout) == {"output": str(out), "tensors": 6, "unverified": []}
        assert_same(read(out), state())
        assert vars(read(out))["_metadata"][""] == {"version": 2}
    for output in (files[0], index.parent / "model.safetensors"):
        refused = run(index, "-o", output, "--overwrite")
        assert (refused.exit_code, "exist" in refused.stderr or "input" in refused.stderr) == (
            1,
            True,
        )
    # A link that leads nowhere is not compared with the output.
    (index.parent / "gone.pt").symlink_to("nowhere")
    assert run(index, "-o", out, "--overwrite").exit_code == 0


def test_tied_tensors(tmp_path: Path) -> None:
    """They stay tied in torch files, and have a copy for each name in safetensors."""
    net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 30, bias=False))
    net[2].weight = net[0].weight
    torch.save(net.state_dict(), tmp_path / "tied.pt")
    for name in ("one.pt", "copies.safetensors"):
        assert run(tmp_path / "tied.pt", "-o", tmp_path / name).exit_code == 0
        assert_same(read(tmp_path / name), net.state_dict())
    one = read(tmp_path / "one.pt")

    assert list(one) == list(net.state_dict())
    assert one["0.weight"].data_ptr() == one["2.weight"].data_ptr()


@pytest.mark.parametrize("how", ["same", "symbolic", "hard"])
def test_a_source_is_never_replaced(tmp_path: Path, how: str) -> None:
    """Not under another name, even with --overwrite; another file is replaced with it alone."""
    source = write(state(), tmp_path / "a.pt")
    output = tmp_path / ("a.pt" if how == "same" else "b.pt")
    if how == "symbolic":
        output.symlink_to(source)
    elif how == "hard":
        output.hardlink_to(source)
    before = source.read_bytes()
    found = run(source, "-o", output, "--overwrite")
    assert (found.exit_code, "is an input" in found.stderr) == (1, True), found.stderr
    assert source.read_bytes() == before

    other = write({"old": torch.ones(1)}, tmp_path / "other.pt")
    refused = run(source, "-o", other)
    assert (refused.exit_code, "--overwrite replaces it" in refused.stderr) == (1, True)
    assert run(source, "-o", other, "--overwrite").exit_code == 0
    assert_same(read(other), state())


def test_the_memory_of_a_conversion(tmp_path: Path) -> None:
    """One tensor is in memory; mapped files do not count."""
    source = write({f"{n}": torch.ones(2_500_000) for n in range(24)}, tmp_path / "a.pt")
    arguments = ["convert", str(source), "-o", str(tmp_path / "b.safetensors")]

    # The file has 240 MB, and a cast takes 95 MB with what torch keeps.
    assert peak_of_command([*arguments, "--dtype", "bfloat16"]) < 180e6


@both_formats
def test_a_value_that_is_too_large_for_the_dtype(tmp_path: Path, suffix: str) -> None:
    """It would become infinite, so nothing is written."""
    source = write({"a": torch.ones(2), "w": torch.tensor([1.0, 70_000.0])}, tmp_path / "a.pt")
    found = run(source, "-o", tmp_path / f"b.{suffix}", "--dtype", "float16")

    assert (found.exit_code, "too large for torch.float16" in found.stderr) == (1, True)
    assert listing(tmp_path) == ["a.pt"]


@both_formats
def test_a_value_of_eight_bits_that_is_too_large_for_the_dtype(tmp_path: Path, suffix: str) -> None:
    """float8_e8m0fnu has the range of float32."""
    scales = torch.tensor([1.0, 2.0**100]).to(torch.float8_e8m0fnu)
    source = write({"w": scales}, tmp_path / f"a.{suffix}")
    found = run(source, "-o", tmp_path / "b.pt", "--dtype", "float16")

    assert (found.exit_code, "too large for torch.float16" in found.stderr) == (1, True)
    assert listing(tmp_path) == [f"a.{suffix}"]
    assert run(source, "-o", tmp_path / "b.pt", "--dtype", "bfloat16").exit_code == 0
    assert torch.equal(read(tmp_path / "b.pt")["w"], scales.bfloat16())


def test_views_are_written_without_their_storage(tmp_path: Path) -> None:
    """A small view of a large tensor does not take the large one along."""
    torch.save({"view": torch.ones(1000, 1000)[:2, :2]}, tmp_path / "a.pt")
    run(tmp_path / "a.pt", "-o", tmp_path / "b.pt")

    assert (tmp_path / "b.pt").stat().st_size < 10_000
    assert_same(read(tmp_path / "b.pt"), {"view": torch.ones(2, 2)})


@both_formats
def test_lazy_views_keep_their_values(tmp_path: Path, suffix: str) -> None:
    """A conjugate or negative view is not tied to its tensor, and is written with its values."""
    real = torch.tensor([1.0, 2.0])
    number = torch.complex(real, -real)
    old = {"z": number, "conj": number.conj(), "w": real, "neg": torch._neg_view(real)}
    torch.save(old, tmp_path / "old.pt")
    new = tmp_path / f"new.{suffix}"

    assert run(tmp_path / "old.pt", "-o", new).exit_code == 0
    assert_same(read(new), {**old, "conj": torch.complex(real, real), "neg": -real})


def test_metadata_is_kept(tmp_path: Path) -> None:
    """Versions of modules stay in torch files, the metadata in safetensors files."""
    versions = nn.BatchNorm1d(3).state_dict()
    torch.save(versions, tmp_path / "a.pt")
    run(tmp_path / "a.pt", "-o", tmp_path / "b.bin")
    found = read(tmp_path / "b.bin")
    write({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    run(tmp_path / "a.safetensors", "-o", tmp_path / "b.safetensors")

    assert isinstance(found, OrderedDict)
    assert vars(found)["_metadata"] == vars(versions)["_metadata"]
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "origin": "a test"}


@mig.declare({2: [mig.convert("turn", torch.t, torch.t)]})
class Turned(nn.Module):
    """A class whose first version stored the transposed matrix: its shape does not show which."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.arange(9.0).reshape(3, 3))


@pytest.mark.parametrize("version", [1, 2])
def test_versions_of_modules_are_kept_in_each_format(tmp_path: Path, version: int) -> None:
    """A class with migrations loads a file of its first version after any number of conversions."""
    model = Turned()
    saved = mig.migrate(model, model.state_dict(), to={Turned: version})
    torch.save({"model": saved}, tmp_path / "a.pt")
    names = ["a.pt", "b.safetensors", "c.safetensors", "d.pt", "e.safetensors"]
    for old, new in itertools.pairwise(names):
        key = ["--key", "model"] if old == "a.pt" else []
        done = run(tmp_path / old, "-o", tmp_path / new, *key)
        assert done.exit_code == 0, done.stderr

    found = torch.load(tmp_path / "d.pt")
    assert vars(found)["_metadata"][""] == {"version": version}
    loaded = Turned()
    nn.init.zeros_(loaded.turn)
    loaded.load_state_dict(found)
    assert torch.equal(loaded.turn, model.turn)
    for name in ("b", "e"):
        mig.migrate_file(model, tmp_path / f"{name}.safetensors", tmp_path / "new.safetensors")
        assert torch.equal(load_file(tmp_path / "new.safetensors")["turn"], model.turn)


def test_entries_that_are_not_versions_are_left_out(tmp_path: Path) -> None:
    """The metadata of a state dict from a file may hold anything."""
    state_dict = OrderedDict(w=torch.ones(2))
    odd = {"": {"version": 3}, "a": 5, "b": {"version": "1"}, "c": {}, 7: {"version": 1}}
    vars(state_dict)["_metadata"] = odd
    torch.save(state_dict, tmp_path / "a.pt")

    assert run(tmp_path / "a.pt", "-o", tmp_path / "b.safetensors").exit_code == 0
    versions = {"": {"version": 3}, "c": {"version": None}}
    assert Checkpoint(tmp_path / "b.safetensors").versions == versions

    # Placeholders for objects of the file cannot be written to another one.
    plain = {"version": 3, "name": "x"}
    odd[""] = {**plain, "dtype": torch.float16, "loss": nn.MSELoss(), "w": torch.ones(1)}
    torch.save(state_dict, tmp_path / "a.pt")
    for command, file in (("convert", "c.pt"), ("average", "d.pt")):
        assert invoke(command, tmp_path / "a.pt", "-o", tmp_path / file).exit_code == 0
        assert vars(read(tmp_path / file))["_metadata"][""] == plain
    mig.migrate_file(nn.ParameterDict(state_dict), tmp_path / "a.pt", tmp_path / "e.safetensors")


def test_a_corrupt_source_is_refused(tmp_path: Path) -> None:
    """A flipped bit is found while the tensor is read, and nothing is left."""
    source = write(state(), tmp_path / "a.pt")
    content = source.read_bytes()
    weight = state()["z.weight"].numpy().tobytes()
    source.write_bytes(content.replace(weight, bytes(len(weight))))
    found = run(source, "-o", tmp_path / "b.safetensors")

    assert (found.exit_code, "does not match its checksum" in found.stderr) == (1, True)
    assert listing(tmp_path) == ["a.pt"]


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("a.pt", 2, "Missing option '-o'"),
        ("-o b.pt", 2, "Missing argument 'SRC...'"),
        ("missing.pt -o b.pt", 2, "does not exist"),
        ("a.pt -o -", 2, "standard output is not supported"),
        ("a.pt -o no/b.pt", 1, "there is no directory no"),
        ("a.pt -o b.pt --dtype int8", 2, "Invalid value for '--dtype'"),
        ("a.pt -o b.pt --key model", 1, "model"),
        ("a.pt a.pt -o b.pt", 1, "z.weight is in a.pt and in a file before it"),
        ("page.pt -o b.pt", 1, "is a text file"),
        ("script.pt -o b.pt", 1, "is a TorchScript archive"),
    ],
)
def test_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, status: int, message: str
) -> None:
    """One line of error, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    write(state(), tmp_path / "a.pt")
    (tmp_path / "page.pt").write_text("<!DOCTYPE html>")
    scripted(tmp_path / "script.pt")
    before = listing(tmp_path)
    found = run(*line.split())

    assert (found.exit_code, message in found.stderr) == (status, True), found.stderr
    assert listing(tmp_path) == before
