"""Files as people have them: foreign classes, old formats, distributed folders, wrong names."""

import datetime as dt
import errno
import gzip
import io
import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import modkit
from modkit.errors import FileError
from modkit.files import inspect, verify
from modkit.files.checkpoints import write_checkpoint
from modkit.files.tensor_files import Checkpoint
from tests.cases import for_each
from tests.unit.cli.command_line import invoke


NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).requires_grad_(requires_grad=False)
STATE = NET.state_dict()


class Options:
    """A class that no reader of checkpoints knows."""


class Boxed(torch.Tensor):
    """A subclass of tensors that rebuilds itself with a function of its own."""

    def __reduce_ex__(self, _: Any) -> Any:
        parts = (boxed, Boxed, (self.as_subclass(torch.Tensor),), {})
        return torch._tensor._rebuild_from_type_v2, parts


def boxed(tensor: torch.Tensor) -> Boxed:
    """Rebuild one."""
    return tensor.as_subclass(Boxed)


def read(path: Path, key: str | None = None) -> dict[str, torch.Tensor]:
    """Return all tensors at a key."""
    checkpoint = Checkpoint(path, key=key)
    return {name: checkpoint.tensor(name) for name in checkpoint.shapes}


def assert_state(found: dict[str, torch.Tensor]) -> None:
    """Compare tensors with those of the network."""
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


def ragged() -> torch.Tensor:
    """Return a nested tensor of the layout that weights_only=True reads."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)


@pytest.fixture
def lit(tmp_path: Path) -> Path:
    """Write a file as Lightning does, with objects of several classes beside the weights."""
    extra = {"loss": nn.MSELoss(), "options": Options(), "out": Path("x"), "kind": list}
    extra |= {"at": dt.timedelta(1), "day": np.datetime64("2026"), "ns": SimpleNamespace(a=1)}
    extra |= {"box": boxed(torch.ones(2)), "ragged": ragged()}
    torch.save({"state_dict": STATE, "hyper_parameters": extra}, tmp_path / "lit.ckpt")
    return tmp_path / "lit.ckpt"


def test_foreign_classes_do_not_hide_the_tensors(lit: Path) -> None:
    """The tensors are listed, and all classes are named; nothing is imported or executed."""
    info = inspect(lit)

    assert [tensor.name for tensor in info.tensors] == [f"state_dict.{name}" for name in STATE]
    for name in ("torch.nn.modules.loss.MSELoss", f"{__name__}.Options", "datetime.timedelta"):
        assert name in info.note
    assert "would execute code; none was executed" in info.note
    assert info.entries["hyper_parameters.kind"] == "list"
    assert info.entries["hyper_parameters.box"] == f"{__name__}.boxed"


def test_nested_tensors_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """Also where their class has a function of its own that rebuilds them."""
    modkit.save_checkpoint({"ragged": ragged()}, tmp_path / "a.pt")

    found = modkit.load_checkpoint(tmp_path / "a.pt")["ragged"]
    assert type(found) is type(ragged())
    assert [part.tolist() for part in found.unbind()] == [[1, 1], [1]]


@for_each(
    "line", ["convert {0} --key state_dict -o {1}", "average {0} {0} --key state_dict -o {1}"]
)
def test_commands_read_around_foreign_classes(line: str, lit: Path, tmp_path: Path) -> None:
    """The tensors at a key get out of the file, without its classes."""
    output = tmp_path / "new.safetensors"
    done = invoke(*line.format(lit, output).split())

    assert done.exit_code == 0, done.output
    assert_state(load_file(output))
    assert invoke("diff", lit, output, "--key", "state_dict", "--values").exit_code == 0


def test_one_error_names_all_classes(lit: Path) -> None:
    """With the classes that it names, the file is read; classes of Python itself are not named."""
    with pytest.raises(FileError) as caught:
        modkit.load_checkpoint(lit)
    assert "strings, dates, records or objects of NumPy" in str(caught.value)

    torch.save({"a": nn.MSELoss(), "b": Options(), "c": [list, int, str]}, lit)
    with pytest.raises(FileError) as caught:
        modkit.load_checkpoint(lit)
    text = str(caught.value)
    names = text.partition("safe_globals([")[2].partition("])")[0].split(", ")
    assert sorted(names) == sorted(["torch.nn.modules.loss.MSELoss", f"{__name__}.Options"])


def test_classes_of_python_are_values(tmp_path: Path) -> None:
    """Types of Python, which configurations hold, are read without being allowed."""
    torch.save({"types": [list, int, str, float]}, tmp_path / "a.pt")

    assert modkit.load_checkpoint(tmp_path / "a.pt") == {"types": [list, int, str, float]}


def test_scripts_in_a_checkpoint_get_no_circular_advice(tmp_path: Path) -> None:
    """safe_globals would not help, so it is not named."""
    pickled = b"\x80\x02}X\x01\0\0\0mctorch._C\nScriptObject\n)\x81s."
    torch.save({"m": 1}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for info in old.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            new.writestr(info.filename, pickled if is_pickle else old.read(info))

    with pytest.raises(FileError, match=r"objects of TorchScript.*weights_only=False") as caught:
        modkit.load_checkpoint(tmp_path / "b.pt")
    assert "safe_globals" not in str(caught.value)


@for_each("name", ["torch.safetensors", "a.SAFETENSORS", "b.ckpt", "c.bin"])
def test_content_decides(name: str, tmp_path: Path) -> None:
    """A file is what its content says, whatever its name is."""
    path = tmp_path / name
    (torch.save if name == "torch.safetensors" else save_file)(dict(STATE), path)

    assert_state(read(path))
    assert_state(dict(modkit.average_checkpoints([path, path])))
    assert invoke("diff", path, path, "--values").exit_code == 0


def packed(path: Path, how: str) -> None:
    """Pack a checkpoint."""
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    if how == "gz":
        path.write_bytes(gzip.compress(buffer.getvalue()))
    elif how == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("net.pth", buffer.getvalue())
    else:
        folder = path.with_suffix("")
        folder.mkdir()
        (folder / "net.pth").write_bytes(buffer.getvalue())
        shutil.move(shutil.make_archive(str(folder), "tar", folder), path)


@for_each("how", ["gz", "tar", "zip"])
def test_packed_files_are_to_be_unpacked(how: str, tmp_path: Path) -> None:
    """The error says so, for every reader."""
    path = tmp_path / "x.ckpt"
    packed(path, how)

    for reader in (modkit.load_checkpoint, verify, read):
        with pytest.raises(FileError, match="unpack"):
            reader(path)


def test_git_lfs_pointers(tmp_path: Path) -> None:
    """The error names the command that downloads the file, under each name."""
    for name in ("a.safetensors", "a.pt"):
        path = tmp_path / name
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        for reader in (modkit.load_checkpoint, verify, read):
            with pytest.raises(FileError, match=r"git lfs pull"):
                reader(path)


def test_packages_are_named(tmp_path: Path) -> None:
    """A file of torch.package is an archive of torch, with a reader of its own."""
    with torch.package.PackageExporter(tmp_path / "a.pt") as exporter:
        exporter.save_text("a", "b.txt", "text")

    assert inspect(tmp_path / "a.pt").kind == "torch.package archive"
    with pytest.raises(FileError, match="PackageImporter"):
        modkit.load_checkpoint(tmp_path / "a.pt")


def save_distributed(path: Path) -> None:
    """Write a folder of torch.distributed.checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": STATE, "epoch": 3}, checkpoint_id=path)


@pytest.fixture
def distributed(tmp_path: Path) -> Path:
    """Return a folder of torch.distributed.checkpoint."""
    save_distributed(tmp_path / "step-5")
    return tmp_path / "step-5"


def test_distributed_checkpoints_without_checksums(tmp_path: Path) -> None:
    """They are reported as files without checksums are, also where a file has several archives."""
    path, output = tmp_path / "step-5", tmp_path / "one.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_distributed(path)
    finally:
        torch.serialization.set_crc32_options(before)

    with pytest.raises(
        FileError, match=r"unverified: no checksums in a chain of torch\.save files"
    ):
        verify(path)
    assert invoke("verify", path).exit_code == 1
    done = invoke("convert", path, "--key", "model", "-o", output)
    assert done.stderr == f"{path / '.metadata'}: unverified: no checksums\n"
    assert_state(modkit.load_checkpoint(output))


def test_distributed_checkpoints(distributed: Path, tmp_path: Path) -> None:
    """A folder is listed, verified, compared, converted and averaged."""
    info = inspect(distributed)
    assert info.kind == "distributed checkpoint"
    assert {tensor.name for tensor in info.tensors} == {f"model.{name}" for name in STATE}
    assert info.entries == {"epoch": "an object of its own"}

    verify(distributed)
    assert invoke("verify", tmp_path).exit_code == 0
    assert_state(read(distributed, "model"))
    output = tmp_path / "one.pt"
    done = invoke("convert", distributed, "--key", "model", "-o", output)
    assert done.exit_code == 0, done.output
    assert_state(modkit.load_checkpoint(output))
    assert invoke("diff", distributed, output, "--key", "model", "--values").exit_code != 1
    assert modkit.average_checkpoints([distributed], key="model").keys() == STATE.keys()


def test_corrupt_distributed_checkpoints(distributed: Path) -> None:
    """A flipped bit, a file that is cut off, and one that is missing are found."""
    (file,) = distributed.glob("*.distcp")
    content = file.read_bytes()
    weight = STATE["0.weight"].numpy().tobytes()
    file.write_bytes(content.replace(weight, bytes(len(weight))))
    with pytest.raises(FileError, match="does not match its checksum"):
        verify(distributed)
    with pytest.raises(FileError, match="does not match its checksum"):
        read(distributed, "model")

    file.write_bytes(content[:-100])
    with pytest.raises(FileError, match="cut off"):
        inspect(distributed)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        inspect(distributed)


def test_archives_one_after_another(tmp_path: Path) -> None:
    """Two files of torch.save in one are intact, named as what they are, and read as the error says."""
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer)
    torch.save({"b": torch.ones(300)}, buffer)
    path = tmp_path / "two.pt"
    path.write_bytes(buffer.getvalue())

    verify(path)
    assert inspect(path).kind == "chain of torch.save files"
    with pytest.raises(FileError, match=r"is a chain of 2 torch\.save files") as refused:
        modkit.load_checkpoint(path)
    remedy = str(refused.value).partition("the first is ")[2]
    names = {"io": io, "content": buffer.getvalue(), "load_checkpoint": modkit.load_checkpoint}
    assert torch.equal(eval(remedy, names)["a"], torch.ones(3))
    with pytest.raises(RuntimeError):
        torch.load(path)


@for_each("how", ["before torch 1.6", "no checksums"])
def test_files_without_checksums(how: str, tmp_path: Path) -> None:
    """They are read by all commands, and reported as unverified, in JSON too."""
    path, output = tmp_path / "old.pth", tmp_path / "new.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, path, _use_new_zipfile_serialization=how == "no checksums")
    finally:
        torch.serialization.set_crc32_options(before)

    with pytest.warns(UserWarning, match=r"read unverified; `modkit convert` writes it with them"):
        assert_state(modkit.load_checkpoint(path))
    assert "unverified: no checksums" in inspect(path).note
    done = invoke("convert", path, "-o", output, "--json")
    assert json.loads(done.stdout)["unverified"] == [str(path)]
    assert done.stderr == f"{path}: unverified: no checksums\n"
    assert_state(modkit.load_checkpoint(output))
    assert invoke("average", path, "-o", tmp_path / "mean.pt").stderr == done.stderr
    net, new = tmp_path / "net.py", tmp_path / "new.safetensors"
    net.write_text(
        "import torch.nn as n\ndef f(): return n.Sequential(n.Linear(3, 4), n.BatchNorm1d(4))"
    )
    assert invoke("migrate", path, "--model", f"{net}:f", "-o", new).stderr == done.stderr
    done = invoke("diff", path, output, "--values", "--json")
    assert (json.loads(done.stdout)["equal"], json.loads(done.stdout)["unverified"]) == (
        True,
        [str(path)],
    )


def test_opening_without_reading(tmp_path: Path) -> None:
    """verify=False leaves the tensors alone; a flipped bit is found by files.verify later."""
    path = tmp_path / "a.pt"
    modkit.save_checkpoint(dict(STATE), path)
    weight = STATE["0.weight"].numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(weight, bytes(len(weight))))

    found = modkit.load_checkpoint(path, mmap=True, verify=False)
    assert found["0.weight"].sum() == 0
    with pytest.raises(FileError, match="does not match its checksum"):
        verify(path)
    with pytest.raises(ValueError, match="verify=False needs mmap=True"):
        modkit.load_checkpoint(path, verify=False)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """The error has the errno and the path, and names the command that looks into folders."""
    with pytest.raises(IsADirectoryError, match="modkit inspect") as caught:
        modkit.load_checkpoint(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(tmp_path))


def test_keys_lead_to_tensors(tmp_path: Path) -> None:
    """An error offers the keys with tensors only, nested ones too, and near misses."""
    torch.save({"cfg": {"a": 1}, "opt": {"x": "y"}, "model": {"net": STATE}}, tmp_path / "a.pt")
    with pytest.raises(FileError, match=r"choose a key: model\.net$"):
        read(tmp_path / "a.pt")
    with pytest.raises(
        FileError, match=r"no state dict at the key 'modle.net'; choose a key: model"
    ):
        read(tmp_path / "a.pt", "modle.net")

    torch.save({"init": {"w": torch.ones(1), "types": ["H"]}}, tmp_path / "b.pt")
    with pytest.raises(FileError, match="no key leads to tensors only"):
        read(tmp_path / "b.pt")


@for_each(
    "text",
    [
        "[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 598",
        "basic_ios::clear: iostream error",
        f"File x cannot be opened: {os.strerror(116)}",
    ],
)
def test_faults_that_happen_once(text: str, tmp_path: Path, monkeypatch) -> None:
    """Torch's writer loses the errno of a fault: it is an OSError with errno and path all the same."""

    def failing(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match=r"last\.pt") as caught:
        modkit.save_checkpoint({}, tmp_path / "last.pt")
    assert caught.value.errno == (116 if "opened" in text else errno.EIO)
    assert caught.value.filename == str(tmp_path / "last.pt")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("save", [modkit.save_checkpoint, write_checkpoint])
def test_a_last_write_that_fails_without_an_error(save, tmp_path: Path, monkeypatch) -> None:
    """A file that ends too early, as torch 2.8 leaves it, is an OSError; the previous one stays."""
    path = tmp_path / "last.pt"
    save({"epoch": 1}, path)
    monkeypatch.setattr(torch, "save", lambda _, target: target.write_bytes(b"PK" * 1000))

    with pytest.raises(OSError, match="has not written the end") as caught:
        save({"epoch": 2}, path)

    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
    assert modkit.load_checkpoint(path) == {"epoch": 1}
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Lite Interpreter")
def test_mobile_archives_with_debug_info(tmp_path: Path) -> None:
    """Torch compresses the map of call stacks, too."""
    scripted = torch.jit.script(nn.Linear(2, 2))
    scripted._save_for_lite_interpreter(str(tmp_path / "m.ptl"), _save_mobile_debug_info=True)

    verify(tmp_path / "m.ptl")
    assert modkit.jit.load(tmp_path / "m.ptl").weight.shape == (2, 2)


def test_negative_weights(tmp_path: Path) -> None:
    """The difference of two cumulative averages is the average of what is between them."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        torch.save(
            {"w": torch.tensor([value]), "n": torch.tensor(int(value))}, tmp_path / f"{name}.pt"
        )
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]

    found = modkit.average_checkpoints(paths, [-1, 3])
    assert (found["w"].item(), found["n"].item()) == (2.5, 2)
    assert modkit.average_checkpoints(paths, [2, -1])["w"].item() == 0.0
    assert modkit.average_checkpoints(paths, [1, -3])["w"].item() == 2.5
    with pytest.raises(ValueError, match="a sum other than 0"):
        modkit.average_checkpoints(paths, [1, -1])


def test_an_index_that_names_fewer_tensors(tmp_path: Path) -> None:
    """Tensors that only its shards have are counted."""
    save_file(dict(STATE), tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.weight": "1.safetensors"}}))

    assert "which have 6 tensors more" in invoke("verify", index).stdout


def test_the_module_of_files_is_an_attribute() -> None:
    """As the pages write it."""
    assert modkit.files.verify is verify
