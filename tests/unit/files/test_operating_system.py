import ast
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modkit.files import operating_system
from modkit.files.operating_system import flush_folder, path_of, read_at, read_into_at
from tests.simulated_platform import ABSENT_ON_WINDOWS, SIGNALS_ABSENT_ON_WINDOWS


ABSENT = {"all calls": (), "no preadv": ("preadv",), "no pread": ("pread", "preadv")}


@pytest.fixture(params=ABSENT.values(), ids=ABSENT)
def descriptor(request, tmp_path, monkeypatch):
    """A file of 1,000 blocks of 64 bytes, each the digest of its number, read with fewer calls."""
    for name in request.param:
        monkeypatch.delattr(os, name, raising=False)
    path = tmp_path / "file"
    path.write_bytes(b"".join(map(block, range(1000))))
    with path.open("rb", buffering=0) as file:
        yield file.fileno()


def block(number):
    """Return 64 bytes that no other number has."""
    return hashlib.sha512(str(number).encode()).digest()


def test_reads_at_a_place_end_with_the_file(descriptor):
    """A read has fewer bytes at the end of the file, and none after it."""
    assert read_at(descriptor, 64, 64 * 7) == block(7)
    assert read_at(descriptor, 128, 64 * 999) == block(999)
    assert read_at(descriptor, 64, 64 * 1000) == b""

    target = bytearray(128)
    assert read_into_at(descriptor, memoryview(target), 64 * 999) == 64
    assert target == block(999) + bytes(64)
    assert read_into_at(descriptor, memoryview(target), 64 * 1000) == 0
    if hasattr(os, "pread"):
        # A process that was forked shares the position.
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0


def test_threads_share_a_descriptor(descriptor):
    """Each thread reads its own place, also where the file has only one position."""

    def read(number):
        target = bytearray(64)
        count = read_into_at(descriptor, memoryview(target), 64 * number)
        return count == 64 and target == block(number) == read_at(descriptor, 64, 64 * number)

    numbers = list(range(1000)) * 5
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, numbers))

    assert found == [True] * len(numbers)


@pytest.mark.posix
@pytest.mark.parametrize("folder", ["/proc/self/fd", "/dev/fd"])
def test_the_path_of_an_open_file(tmp_path, monkeypatch, folder):
    """It leads to the open file after another one has replaced it."""
    if not Path(folder).exists():
        pytest.skip(f"no {folder}")
    monkeypatch.setattr(operating_system, "_OPEN_FILES", ["/nowhere", folder])
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_text("old")
    other.write_text("new")
    with path.open("rb") as file:
        same = path_of(file.fileno(), path)
        other.replace(path)
        found = Path(same).read_text()

    assert found == "old"
    assert path.read_text() == "new"


def test_without_folders_of_open_files_the_path_itself(tmp_path, monkeypatch):
    """Windows has no such path; there, no file can replace one that is open."""
    monkeypatch.setattr(operating_system, "_OPEN_FILES", [])

    assert path_of(0, tmp_path / "file") == str(tmp_path / "file")


def test_a_folder_that_cannot_be_opened_is_not_flushed(tmp_path, monkeypatch):
    """Windows opens no folders; a save does not fail for that."""
    opened = []

    def refused(path, flags):
        opened.append(path)
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refused)
    flush_folder(tmp_path)

    assert opened == [tmp_path]


SOURCE = Path(operating_system.__file__).parents[1]
ABSENT_NAMES = {
    f"os.{name}" for name in (*ABSENT_ON_WINDOWS, "getuid", "getgid", "sendfile", "setuid")
}
ABSENT_NAMES |= {f"signal.{name}" for name in SIGNALS_ABSENT_ON_WINDOWS}
ABSENT_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}


def not_portable(source):
    """Return the names, modules and paths in a file that not every operating system has."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found |= {ast.unparse(node)} & ABSENT_NAMES
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & ABSENT_MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} & ABSENT_MODULES
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & ABSENT_NAMES
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("/proc/", "/dev/")):
            found.add(node.value)
    return found


def test_one_file_has_what_not_every_operating_system_has():
    """The other files of modkit have neither names nor paths that macOS or Windows lack."""
    found = {
        path.relative_to(SOURCE).as_posix(): names
        for path in SOURCE.rglob("*.py")
        if (names := not_portable(path.read_text(encoding="utf-8")))
    }

    assert set(found) == {"files/operating_system.py"}
    assert found["files/operating_system.py"] >= {"fcntl", "os.pread", "os.chown", "/proc/self/fd"}
