import errno
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from modkit.files.atomic_write import atomic_write


def test_the_file_appears_when_it_is_complete(tmp_path):
    """Inside the block the path has the previous content, after it the new content."""
    path = tmp_path / "file.txt"
    path.write_text("old")
    with atomic_write(path) as unfinished:
        unfinished.write_text("new")
        during = path.read_text()

    assert during == "old"
    assert path.read_text() == "new"
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_error_leaves_everything_as_it_was(tmp_path, error):
    """An error in the block, or an interrupt, passes through; the old file stays, and nothing else."""
    path = tmp_path / "file.txt"
    path.write_text("old")

    with pytest.raises(error), atomic_write(path) as unfinished:
        unfinished.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert [path] == list(tmp_path.iterdir())


def test_a_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch):
    """If the content cannot be made durable, the old file stays."""
    path = tmp_path / "file.txt"
    path.write_text("old")

    def disk_full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="no space left"), atomic_write(path) as unfinished:
        unfinished.write_text("new")
    assert path.read_text() == "old"
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize(("made", "expected"), [(0o600, 0o644), (0o755, 0o755)])
def test_the_mode_of_a_new_file(tmp_path, made, expected):
    """The umask decides; what the writer makes executable stays so, and nothing becomes private."""
    path = tmp_path / "file"
    before = os.umask(0o022)
    try:
        with atomic_write(path) as unfinished:
            unfinished.write_text("new")
            unfinished.chmod(made)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == expected


def test_a_block_that_writes_nothing(tmp_path):
    """A block that writes no file is an error."""
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "file.txt"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.posix
def test_a_second_interrupt_leaves_no_lock(tmp_path, monkeypatch):
    """If the removal of the private folder is interrupted, the next write of this process removes it."""
    path = tmp_path / "file.txt"

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", interrupted)
        with atomic_write(path) as unfinished:
            unfinished.write_text("first")
    left = len(list(tmp_path.iterdir()))
    with atomic_write(path) as unfinished:
        unfinished.write_text("second")

    assert left == 2
    assert path.read_text() == "second"
    assert [path] == list(tmp_path.iterdir())


def leave(folder, age=0.0):
    """Leave what a killed writer of another file leaves, written to ``age`` seconds ago."""
    stale = folder / ".modkit-12345678-abcdefgh.tmp"
    stale.mkdir()
    unfinished = stale / "step-1.pt"
    unfinished.write_bytes(b"half")
    for path in (unfinished, stale):
        os.utime(path, (time.time() - age,) * 2)
    return stale


@pytest.mark.parametrize(("hours", "stays"), [(1.5, True), (23, True), (25, False)])
def test_without_locks_the_last_change_decides(tmp_path, monkeypatch, hours, stays):
    """Only what has not changed for a day is stale, however old its folder is: saves may take hours."""
    age = hours * 3600
    monkeypatch.setattr("modkit.files.operating_system.fcntl", None)
    stale = leave(tmp_path, age)
    os.utime(stale, (0, 0))
    with atomic_write(tmp_path / "step-2.pt") as unfinished:
        unfinished.write_text("whole")

    assert stale.exists() is stays


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "open or mapped"),
        (errno.EBUSY, "mount its folder"),
        # In a folder with the sticky bit; there is no advice.
        (errno.EPERM, f"{os.strerror(errno.EPERM)}: "),
    ],
)
def test_a_file_that_cannot_be_replaced(tmp_path, monkeypatch, number, advice):
    """The error names the target and says what to do; the previous file stays, and nothing else."""
    path = tmp_path / "file.txt"
    path.write_text("old")

    def refused(source, target):
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(OSError, match=advice) as caught, atomic_write(path) as unfinished:
        unfinished.write_text("new")

    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert path.read_text() == "old"
    assert [path] == list(tmp_path.iterdir())


def test_writers_of_one_target_do_not_see_one_another(tmp_path):
    """Each has a folder of its own; the last one to finish wins, and nothing is left."""
    path = tmp_path / "file.txt"
    with atomic_write(path) as first:
        with atomic_write(path) as second:
            first.write_text("first")
            second.write_text("second")
        between = path.read_text()

    assert between == "second"
    assert path.read_text() == "first"
    assert [path] == list(tmp_path.iterdir())
