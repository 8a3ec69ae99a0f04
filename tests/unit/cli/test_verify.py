"""The command ``verify``: which files are intact, how they were tested, and lists of ``sha256sum``."""

import functools
import hashlib
import json
import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modkit.files import zip_archive
from tests.unit.cli.command_line import invoke
from tests.unit.files.test_inspect import legacy, scripted, sharded


run = functools.partial(invoke, "verify")
WEIGHT = torch.arange(1000.0)
NO_CHECKSUMS = "header and sizes; safetensors files have no checksums"


def corrupt(path: Path) -> Path:
    """Flip one bit of the weights."""
    content = bytearray(path.read_bytes())
    content[content.find(WEIGHT.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    return path


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write model files and other files into a folder, and go there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "shards").mkdir(parents=True)
    torch.save({"weight": WEIGHT, "bias": torch.ones(3)}, tmp_path / "run" / "last.pt")
    save_file({"weight": WEIGHT}, tmp_path / "run" / "model.safetensors")
    scripted(tmp_path / "run" / "no_suffix")
    sharded(tmp_path / "run" / "shards")
    (tmp_path / "run" / "README.md").write_text("# A model\n")
    (tmp_path / "run" / "config.json").write_text("{}\n")
    (tmp_path / "run" / "vocab.bin").write_bytes(bytes(range(256)))
    return tmp_path / "run"


def test_each_file_of_a_folder_has_a_line(folder: Path) -> None:
    """Models are found by name or content, in subfolders too; each line says how it was tested."""
    found = run("run")
    names = torch._C.PyTorchFileReader(str(folder / "last.pt")).get_all_records()

    lines = dict(line.split(": ", 1) for line in found.stdout.splitlines())
    assert (found.exit_code, found.stderr) == (0, "")
    assert lines.pop("run/no_suffix").startswith("intact: checksums of ")
    assert lines == {
        "run/last.pt": f"intact: checksums of {len(names)} members",
        "run/model.safetensors": f"intact: {NO_CHECKSUMS}",
        "run/shards/model-1.safetensors": f"intact: {NO_CHECKSUMS}",
        "run/shards/model-2.safetensors": f"intact: {NO_CHECKSUMS}",
        "run/shards/model.safetensors.index.json": "intact: index of 2 tensors in 2 files",
    }


@pytest.mark.parametrize(
    "name", ["last.pt", "no_suffix", "model.safetensors", "shards/model-2.safetensors"]
)
def test_one_bad_file_is_the_status(folder: Path, name: str) -> None:
    """A truncated file fails, and the others are tested nevertheless."""
    path = folder / name
    path.write_bytes(path.read_bytes()[:-3])
    found = run("run")

    assert found.exit_code == 1
    failed = [line.split(": ")[0] for line in found.stdout.splitlines() if ": failed: " in line]
    # An index is not intact if one of its shards is not.
    also = ["run/shards/model.safetensors.index.json"] if "/" in name else []
    assert failed == [f"run/{name}", *also]
    assert len(found.stdout.splitlines()) == 6
    assert found.stderr == f"Error: {len(failed)} of 6 files failed\n"


def test_a_flipped_bit_is_found(folder: Path) -> None:
    """A checksum finds it in a file of torch; in a safetensors file only a list of sums does."""
    corrupt(folder / "last.pt")
    found = run("run/last.pt")
    assert found.exit_code == 1
    assert "run/last.pt: failed: corrupt: the content of " in found.stdout

    assert run("run/model.safetensors", "--write-sha256sums", "sums").exit_code == 0
    corrupt(folder / "model.safetensors")
    assert run("run/model.safetensors").exit_code == 0
    found = run("run/model.safetensors", "--sha256sums", "sums")
    assert found.exit_code == 1
    assert "it is another file" in found.stdout


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"<!DOCTYPE html>\n"),
        ("last.pt", b""),
        ("pytorch_model-00001-of-00002.bin", b"version https://git-lfs.github.com/spec/v1\n"),
        ("adapter_model.bin", bytes(range(256))),
    ],
)
def test_a_page_instead_of_a_model_is_not_skipped(folder: Path, name: str, content: bytes) -> None:
    """A file with the name of a model must be one."""
    (folder / name).write_bytes(content)
    found = run("run")

    assert found.exit_code == 1
    assert f"run/{name}: failed: a" in found.stdout


def test_an_index_is_tested_with_its_shards(folder: Path) -> None:
    """Each shard has a line, and a missing one is named."""
    index = folder / "shards" / "model.safetensors.index.json"
    assert len(run(index).stdout.splitlines()) == 3
    (folder / "shards" / "model-2.safetensors").unlink()
    found = run(index)

    assert found.exit_code == 1
    assert "model-2.safetensors is missing" in found.stdout
    assert f"model-1.safetensors: intact: {NO_CHECKSUMS}" in found.stdout


def test_a_shard_that_is_missing_in_a_folder(folder: Path) -> None:
    """The index of shards of any suffix is tested."""
    (folder / "m.pt.index.json").write_text('{"weight_map": {"w": "m-2.pt"}}')
    found = run("run")

    assert found.exit_code == 1
    assert "run/m.pt.index.json: failed: run/m-2.pt is missing" in found.stdout


def test_files_without_checksums_need_a_list(folder: Path) -> None:
    """Old files of torch.save pass only with their digest."""
    path = legacy({"weight": WEIGHT}, folder / "old.pt")
    refused = run(path)
    (folder / "sums").write_text(f"{digest(path)} *old.pt\n")
    found = run(path, "--sha256sums", folder / "sums")

    assert (refused.exit_code, "unverified: no checksums" in refused.stdout) == (1, True)
    assert (found.exit_code, found.stdout) == (0, f"{path}: intact: the expected SHA-256\n")


def test_the_json(folder: Path) -> None:
    """Each file is an object, with what was tested or what is wrong."""
    corrupt(folder / "last.pt")
    found = run("run/last.pt", "run/model.safetensors", "--json")
    failed, intact = json.loads(found.stdout)

    assert found.exit_code == 1
    assert (failed["path"], failed["intact"]) == ("run/last.pt", False)
    assert "does not match its checksum" in failed["error"]
    assert intact == {
        "path": "run/model.safetensors",
        "intact": True,
        "tested": NO_CHECKSUMS,
        "sha256": "",
    }


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
@pytest.mark.parametrize(
    "name", ["x.pt", "two words.pt", "back\\slash.pt", "line\nbreak.pt", "*star.pt"]
)
def test_lists_are_those_of_sha256sum(folder: Path, name: str) -> None:
    """``sha256sum -c`` accepts a list that was written, and the list that it writes is read."""
    path = folder / name
    torch.save({"weight": WEIGHT}, path)
    written = run("run", "--write-sha256sums", "run/SHA256SUMS")
    line = ["sha256sum", "-c", "--strict", "SHA256SUMS"]
    checked = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert (written.exit_code, checked.returncode) == (0, 0), checked.stderr
    assert checked.stdout.count(": OK\n") == 7

    line = ["sha256sum", "--", name, "config.json"]
    theirs = subprocess.run(line, cwd=folder, capture_output=True, check=True).stdout
    ours = (folder / "SHA256SUMS").read_bytes()
    assert theirs.splitlines()[0] in ours.splitlines()
    (folder / "theirs").write_bytes(theirs)
    found = run("--sha256sums", "run/theirs")
    assert (found.exit_code, len(found.stdout.splitlines())) == (0, 2), found.stdout
    assert "run/config.json: intact: the expected SHA-256" in found.stdout
    path.write_bytes(path.read_bytes() + b"x")
    assert run("--sha256sums", "run/theirs").exit_code == 1


def test_a_listed_file_that_is_missing_fails(folder: Path) -> None:
    """It fails with its folder and without PATH, and is not looked at with another PATH."""
    run("run", "--write-sha256sums", "run/SHA256SUMS")
    (folder / "last.pt").unlink()
    sums = ("--sha256sums", "run/SHA256SUMS")

    for paths in ([], ["run"]):
        found = run(*paths, *sums)
        assert found.exit_code == 1
        assert "run/last.pt: failed: [Errno 2] No such file" in found.stdout
    assert run("run/shards", *sums).exit_code == 0


def test_nothing_is_written_unless_all_files_are_intact(folder: Path) -> None:
    """A list of corrupt files would call them intact for ever."""
    corrupt(folder / "last.pt")
    found = run("run", "--write-sha256sums", "sums")

    assert found.exit_code == 1
    assert found.stderr == "Error: 1 of 6 files failed; sums was not written\n"
    assert not Path("sums").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "missing argument 'PATH...'"),
        (["missing"], 2, "does not exist"),
        (["run/config.json"], 1, "1 of 1 files failed"),
        (["."], 1, "there are no model files in ."),
        (["run/last.pt", "--write-sha256sums", "run/last.pt"], 2, "which is tested"),
        (["run", "--sha256sums", "run/README.md"], 1, "line 1 is not one that sha256sum writes"),
    ],
)
def test_wrong_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, message: str
) -> None:
    """The status is 2 for a wrong command line, 1 for a file; nothing is written."""
    if arguments == ["."]:
        (folder / "empty").mkdir()
        monkeypatch.chdir(folder / "empty")
    before = (folder / "last.pt").read_bytes()
    found = run(*arguments)

    assert (found.exit_code, message in found.stderr) == (status, True), found.stderr
    assert (folder / "last.pt").read_bytes() == before


def test_a_file_is_tested_once(folder: Path) -> None:
    """Links and repeated paths are one file; unfinished files of a save are not looked at."""
    (folder / "link.pt").symlink_to("last.pt")
    unfinished = folder / ".modkit-abc.tmp"
    unfinished.mkdir()
    (unfinished / "last.pt").write_bytes(b"PK\x03\x04")

    assert len(run("run", "run/last.pt").stdout.splitlines()) == 6
    (folder / "last.pt").rename(folder.parent / "blob")
    (folder / "link.pt").unlink()
    (folder / "last.pt").symlink_to("../blob")
    run("run/last.pt", "--write-sha256sums", "run/SHA256SUMS")
    assert (folder / "SHA256SUMS").read_text().endswith("  last.pt\n")
    assert run("--sha256sums", "run/SHA256SUMS").exit_code == 0
    # From the folder that a link leads to, the other folder has another path.
    Path("deep").mkdir()
    Path("deep", "run").symlink_to("../run")
    assert run("deep/run/no_suffix", "blob", "--write-sha256sums", "deep/run/SUMS").exit_code == 0
    assert (folder / "SUMS").read_text().endswith("  ../blob\n")
    assert run("--sha256sums", "deep/run/SUMS").exit_code == 0


def test_a_folder_that_cannot_be_read_is_not_left_out(folder: Path, monkeypatch) -> None:
    """Its files would count as intact."""
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if Path(path).name == "shards":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = run("run")

    assert (found.exit_code, found.stdout) == (1, "")
    assert found.stderr == "Error: [Errno 13] Permission denied: 'run/shards'\n"


def test_the_progress_is_in_percent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a bar shows it."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert "%" in run("run").stderr


def test_one_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums take one read of the tensors from the disk, in their order."""
    path = folder / "large.pt"
    torch.save({f"{n}": torch.full((50_000,), n) for n in range(200)}, path)
    reads: list[tuple[int, int]] = []
    read, read_into = zip_archive.read_at, zip_archive.read_into_at

    # Not the functions of ``os``, which some platforms lack.
    def read_at(file: int, count: int, start: int) -> bytes:
        reads.append((start, count))
        return read(file, count, start)

    def read_into_at(file: int, target: memoryview, start: int) -> int:
        reads.append((start, len(target)))
        return read_into(file, target, start)

    monkeypatch.setattr(zip_archive, "read_at", read_at)
    monkeypatch.setattr(zip_archive, "read_into_at", read_into_at)
    assert run(path).exit_code == 0

    size = path.stat().st_size
    assert sum(count for _, count in reads) < 1.2 * size
    large = [start for start, count in reads if count > 100_000]
    assert large
    steps = [after - before for before, after in pairwise(large)]
    assert min(steps) > -size / 2
