"""The command ``convert``: formats, dtypes and shards, streamed and atomic."""

import functools
import itertools
import json
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modkit import migrations as mig
from modkit.files import verify
from modkit.files.tensor_files import Checkpoint
from tests.processes import peak_of_command, python
from tests.unit.cli.command_line import invoke
from tests.unit.files.test_inspect import scripted


run = functools.partial(invoke, "convert")
State = dict[str, Tensor]
MAIN = "from modkit.__main__ import main; main()"
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
    """Read a file with the library of its format; of an index, the union of its files."""
    if path.suffix == ".json":
        names = json.loads(path.read_text())["weight_map"]
        files = {name: read(path.with_name(name)) for name in set(names.values())}
        assert sorted(name for each in files.values() for name in each) == sorted(names)
        return {name: files[file][name] for name, file in names.items()}
    found: State = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    return found


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


@both_formats
@pytest.mark.parametrize("old", SUFFIXES)
def test_one_file_becomes_shards_and_back(tmp_path: Path, old: str, suffix: str) -> None:
    """The files, their index and their names are those of transformers; the shards become one file."""
    source = write(state(), tmp_path / f"one.{old}")
    out = tmp_path / "out" / f"model.{suffix}"
    out.parent.mkdir()
    found = run(source, "-o", out, "--max-shard-size", "1KB", "--json")

    files = json.loads(found.stdout)["files"]
    index = json.loads(Path(f"{out}.index.json").read_text())
    count = len(files)
    names = [f"model-{n:05d}-of-{count:05d}.{suffix}" for n in range(1, count + 1)]
    assert (found.exit_code, found.stderr) == (0, "")
    assert [Path(file).name for file in files] == names
    assert listing(out.parent) == sorted([*names, f"model.{suffix}.index.json"])
    assert index["metadata"] == {"total_size": sum(each.nbytes for each in state().values())}
    assert_same(read(Path(f"{out}.index.json")), state())
    # A shard is larger only if it has a single tensor.
    for file in files:
        tensors = read(Path(file)).values()
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors) <= 1000

    for number, again in enumerate(([f"{out}.index.json"], files)):
        done = run(*again, "-o", tmp_path / f"again{number}.pt")
        assert done.exit_code == 0, done.stderr
        assert_same(read(tmp_path / f"again{number}.pt"), state())


@pytest.mark.parametrize(
    ("size", "files"),
    [("1GB", 1), ("1 gib", 1), ("5000000", 1), ("9600B", 1), ("9.5KB", 2), ("9.5KiB", 1)],
)
def test_sizes(tmp_path: Path, size: str, files: int) -> None:
    """Units are decimal, or binary with an i; what fits into one file has no index."""
    tensors = {"a": torch.ones(1200), "b": torch.ones(1200)}
    found = run(
        write(tensors, tmp_path / "a.pt"), "-o", tmp_path / "b.pt", "--max-shard-size", size
    )

    assert found.exit_code == 0, found.stderr
    assert (tmp_path / "b.pt").exists() == (files == 1)
    assert (tmp_path / "b.pt.index.json").exists() == (files == 2)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_dtype_and_key(tmp_path: Path, suffix: str) -> None:
    """Floating-point tensors are cast, others are not; --key chooses a state dict."""
    torch.save({"epoch": 1, "model": {"ema": state()}}, tmp_path / "last.pt")
    out = tmp_path / f"out.{suffix}"
    found = run(tmp_path / "last.pt", "-o", out, "--key", "model.ema", "--dtype", "float16")

    assert found.exit_code == 0, found.stderr
    expected = {n: t.half() if t.is_floating_point() else t for n, t in state().items()}
    assert_same(read(out), expected)


@both_formats
def test_a_value_that_is_too_large_for_the_dtype(tmp_path: Path, suffix: str) -> None:
    """It would become infinite, so nothing is written."""
    source = write({"a": torch.ones(2), "w": torch.tensor([1.0, 70_000.0])}, tmp_path / "a.pt")
    for size in ("1GB", "4B"):
        options = ("--dtype", "float16", "--max-shard-size", size)
        found = run(source, "-o", tmp_path / f"b.{suffix}", *options)

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


def test_tied_tensors(tmp_path: Path) -> None:
    """They stay tied in torch files, in one shard, and have a copy for each name in safetensors."""
    net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 30, bias=False))
    net[2].weight = net[0].weight
    tied = net.state_dict()
    torch.save(tied, tmp_path / "tied.pt")
    for name in ("again.pt", "shards.bin", "copies.safetensors"):
        found = run(tmp_path / "tied.pt", "-o", tmp_path / name, "--max-shard-size", "5KB")
        assert found.exit_code == 0, found.stderr
    run(tmp_path / "tied.pt", "-o", tmp_path / "one.pt")
    one = read(tmp_path / "one.pt")
    index = json.loads((tmp_path / "shards.bin.index.json").read_text())
    shard = read(tmp_path / index["weight_map"]["0.weight"])

    assert list(one) == list(tied)
    assert one["0.weight"].data_ptr() == one["2.weight"].data_ptr()
    assert shard["0.weight"].data_ptr() == shard["2.weight"].data_ptr()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in net.parameters())
    for name in ("shards.bin.index.json", "copies.safetensors.index.json"):
        assert_same(read(tmp_path / name), dict(tied))


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
    options = ("-o", tmp_path / "b.safetensors", "--max-shard-size", "4B")
    run(tmp_path / "a.safetensors", *options)

    assert isinstance(found, OrderedDict)
    assert vars(found)["_metadata"] == vars(versions)["_metadata"]
    for number in (1, 2):
        file = tmp_path / f"b-0000{number}-of-00002.safetensors"
        with safetensors.safe_open(file, "pt") as opened:
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


def test_versions_of_sharded_files_are_kept(tmp_path: Path) -> None:
    """Shards of safetensors have them, and so has the file of torch that is made of the shards."""
    state_dict = nn.BatchNorm1d(30).state_dict()
    torch.save(state_dict, tmp_path / "a.pt")
    run(tmp_path / "a.pt", "-o", tmp_path / "b.safetensors", "--max-shard-size", "200B")
    run(tmp_path / "b.safetensors.index.json", "-o", tmp_path / "c.pt")

    assert len([*tmp_path.glob("b-*.safetensors")]) > 1
    found = vars(torch.load(tmp_path / "c.pt"))
    assert found["_metadata"] == vars(state_dict)["_metadata"]


def test_entries_that_are_not_versions_are_left_out(tmp_path: Path) -> None:
    """The metadata of a state dict from a file may hold anything."""
    state_dict = OrderedDict(w=torch.ones(2))
    odd = {"": {"version": 3}, "a": 5, "b": {"version": "1"}, "c": {}, 7: {"version": 1}}
    vars(state_dict)["_metadata"] = odd
    torch.save(state_dict, tmp_path / "a.pt")

    assert run(tmp_path / "a.pt", "-o", tmp_path / "b.safetensors").exit_code == 0
    versions = {"": {"version": 3}, "c": {"version": None}}
    assert Checkpoint(tmp_path / "b.safetensors").versions == versions


def test_a_corrupt_source_is_refused(tmp_path: Path) -> None:
    """A flipped bit is found while the tensor is read, and nothing is left."""
    source = write(state(), tmp_path / "a.pt")
    content = source.read_bytes()
    weight = state()["z.weight"].numpy().tobytes()
    source.write_bytes(content.replace(weight, bytes(len(weight))))
    found = run(source, "-o", tmp_path / "b.safetensors")

    assert (found.exit_code, "does not match its checksum" in found.stderr) == (1, True)
    assert listing(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("how", ["same", "symbolic", "hard", "shards"])
def test_a_source_is_never_replaced(tmp_path: Path, how: str) -> None:
    """Not under another name, and not by a shard or an index, even with --overwrite."""
    source = write(state(), tmp_path / "a.pt")
    output = tmp_path / ("a.pt" if how == "same" else "b.pt")
    options = ["--overwrite", "--max-shard-size", "5KB"]
    if how == "symbolic":
        output.symlink_to(source)
    elif how == "hard":
        output.hardlink_to(source)
    elif how == "shards":
        assert run(source, "-o", output, *options).exit_code == 0
        source = tmp_path / "b.pt.index.json"
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for changed in (options, options[:1]):
        found = run(source, "-o", output, *changed)
        assert (found.exit_code, "is an input" in found.stderr) == (1, True), found.stderr
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    """Beside the shards that are read, it is not compared with the output."""
    source = write(state(), tmp_path / "a.pt")
    write({"w": torch.ones(1)}, tmp_path / "c.pt")
    (tmp_path / "gone.pt").symlink_to("nowhere")
    assert run(source, "-o", tmp_path / "b.pt", "--max-shard-size", "1KB").exit_code == 0
    done = run(tmp_path / "b.pt.index.json", "-o", tmp_path.parent / "d.pt")

    assert done.exit_code == 0, done.stderr
    again = run(tmp_path / "b.pt.index.json", "-o", tmp_path.parent / "d.pt", "--overwrite")
    assert again.exit_code == 0, again.stderr


def test_overwriting(tmp_path: Path) -> None:
    """An existing file is kept unless --overwrite is given, and then only the new checkpoint is found."""
    source = write(state(), tmp_path / "a.pt")
    out = tmp_path / "out"
    out.mkdir()
    write({"old": torch.ones(1)}, out / "model.safetensors")
    options = ("-o", out / "model.safetensors", "--max-shard-size", "1KB")
    refused = run(source, *options)
    assert (refused.exit_code, "--overwrite replaces it" in refused.stderr) == (1, True)
    assert listing(out) == ["model.safetensors"]

    assert run(source, *options, "--overwrite").exit_code == 0
    assert not (out / "model.safetensors").exists()
    assert_same(read(out / "model.safetensors.index.json"), state())

    refused = run(source, *options[:2])
    assert (refused.exit_code, "--overwrite replaces it" in refused.stderr) == (1, True)
    assert run(source, *options[:2], "--overwrite").exit_code == 0
    assert not (out / "model.safetensors.index.json").exists()
    assert_same(read(out / "model.safetensors"), state())


def old_and_other_shards(folder: Path, suffix: str) -> tuple[Path, Path]:
    """Write a checkpoint in four shards; return one file, with zeros now, and the name of the shards."""
    source = write(state(), folder / "a.pt")
    out = folder / "out" / f"model.{suffix}"
    out.parent.mkdir()
    assert run(source, "-o", out, "--max-shard-size", "100B").exit_code == 0
    assert len(listing(out.parent)) == 5
    write({name: torch.zeros_like(value) for name, value in state().items()}, source)
    return source, out


@both_formats
@pytest.mark.parametrize("size", ["1KB", "1GB"])
def test_shards_of_another_number_are_removed(tmp_path: Path, suffix: str, size: str) -> None:
    """Those that the old index names go, and no other file."""
    source, out = old_and_other_shards(tmp_path, suffix)
    other = write({"other": torch.ones(1)}, out.with_name(f"model-00009-of-00009.{suffix}"))
    found = run(source, "-o", out, "--overwrite", "--max-shard-size", size, "--json")

    assert found.exit_code == 0, found.stderr
    files = [Path(file).name for file in json.loads(found.stdout)["files"]]
    index = [f"model.{suffix}.index.json"] if size == "1KB" else []
    assert len(files) == (2 if size == "1KB" else 1)
    assert listing(out.parent) == sorted([*files, *index, other.name])
    assert_same(read(out.with_name([*index, *files][0])), read(source))


def ended(function: str, call: int, ending: str, *line: object) -> int:
    """Run the command in a process that ends in the call of a function; return its status."""
    code = (
        "import os; from modkit.cli import convert; from modkit.cli._commands import commands\n"
        f"original = convert.{function}; left = [{call}]\n"
        "def failing(*arguments):\n"
        "    left[0] -= 1\n"
        f"    if not left[0]: {ending}\n"
        "    original(*arguments)\n"
        f"convert.{function} = failing; commands({['convert', *map(str, line)]!r})"
    )
    return python(code).returncode


@pytest.mark.parametrize(
    ("function", "call", "size", "how"),
    [
        ("_write", 1, "1GB", "crash"),
        ("_write", 2, "1KB", "error"),
        ("_Target._write_index", 1, "1KB", "crash"),
    ],
)
def test_a_failure_leaves_the_old_shards(
    tmp_path: Path, how: str, function: str, call: int, size: str
) -> None:
    """Until the new checkpoint is complete, the old one of another number of files is read."""
    source, out = old_and_other_shards(tmp_path, "safetensors")
    before = {path.name: path.read_bytes() for path in out.parent.iterdir()}
    options = ["--overwrite", "--max-shard-size", size]
    ending = "os._exit(9)" if how == "crash" else "raise OSError(28, 'No space left on device')"
    status = ended(function, call, ending, source, "-o", out, *options)

    after = {path.name: path.read_bytes() for path in out.parent.iterdir()}
    assert status == (9 if how == "crash" else 1)
    assert after.items() >= before.items()
    assert len(after) == len(before) or how == "crash"
    assert_same(read(out.with_name("model.safetensors.index.json")), state())


def test_a_crash_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    """Between two shards that replace those of an older checkpoint, there is no index."""
    source, out = old_and_other_shards(tmp_path, "safetensors")
    options = ("-o", out, "--overwrite", "--max-shard-size", "100B")
    status = ended("_write", 2, "os._exit(9)", source, *options)

    assert status == 9
    assert not out.with_name("model.safetensors.index.json").exists()
    assert not out.exists()
    assert run(source, *options).exit_code == 0
    assert_same(read(out.with_name("model.safetensors.index.json")), read(source))


def test_old_shards_that_are_sources_are_refused(tmp_path: Path) -> None:
    """They would be removed after the new index is written."""
    _, out = old_and_other_shards(tmp_path, "safetensors")
    shards = sorted(out.parent.glob("*.safetensors"))
    before = listing(out.parent)
    found = run(*shards, "-o", out, "--overwrite", "--max-shard-size", "1KB")

    assert (found.exit_code, "is an input" in found.stderr) == (1, True)
    assert listing(out.parent) == before


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b'{"weight_map": {"w": "../a.pt"}}',
        b'{"weight_map": {"w": "..", "v": "out"}}',
        json.dumps({"weight_map": {"a": "x" * 5000, "b": "a\0b"}}).encode(),
    ],
)
def test_a_strange_old_index(tmp_path: Path, index: bytes) -> None:
    """It is replaced, and nothing outside of its folder is removed."""
    source, out = old_and_other_shards(tmp_path, "safetensors")
    for path in out.parent.iterdir():
        path.unlink()
    write({"w": torch.ones(1)}, tmp_path / "out" / "keep.safetensors")
    Path(f"{out}.index.json").write_bytes(index)

    done = run(source, "-o", out, "--overwrite", "--max-shard-size", "1KB")
    assert done.exit_code == 0, done.stderr
    assert_same(read(out.with_name("model.safetensors.index.json")), read(source))
    assert source.exists()
    assert (tmp_path / "out" / "keep.safetensors").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_device_is_not_removed(tmp_path: Path) -> None:
    """Shards beside a FIFO or a device of the name of the output leave it alone."""
    source = write(state(), tmp_path / "a.pt")
    os.mkfifo(tmp_path / "b.pt")
    options = ("-o", tmp_path / "b.pt", "--max-shard-size", "1KB", "--overwrite")

    assert run(source, *options).exit_code == 0
    assert (tmp_path / "b.pt").is_fifo()
    assert run(source, "-o", "/dev/null", "--overwrite").exit_code == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("old", "new", "size"),
    [
        ("a.pt", "b.safetensors", "100GB"),
        ("a.safetensors", "b.pt", "40MB"),
    ],
)
def test_the_memory_of_a_conversion(tmp_path: Path, old: str, new: str, size: str) -> None:
    """One tensor, or one shard of torch's format, is in memory; mapped files do not count."""
    source = write({f"{n}": torch.ones(2_500_000) for n in range(24)}, tmp_path / old)
    arguments = ["convert", str(source), "-o", str(tmp_path / new), "--max-shard-size", size]
    peak = peak_of_command([*arguments, "--dtype", "bfloat16"])

    # The file has 240 MB; a cast takes 95 MB with what torch keeps, and a shard 40 MB.
    assert peak < 180e6


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("a.pt", 2, "Missing option '-o'"),
        ("-o b.pt", 2, "Missing argument 'SRC...'"),
        ("missing.pt -o b.pt", 2, "does not exist"),
        ("a.pt -o -", 2, "standard output is not supported"),
        ("a.pt -o no/b.pt", 1, "there is no directory no"),
        ("a.pt -o b.pt --max-shard-size 5XB", 2, "'5XB' is not a size such as 5GB or 500MB"),
        ("a.pt -o b.pt --max-shard-size 0", 2, "'0' is not a size"),
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
