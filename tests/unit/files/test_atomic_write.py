import os

import pytest

from modkit.files.atomic_write import atomic_write


def test_the_file_appears_when_it_is_complete(tmp_path):
    """Inside of the block the path holds what it held before, after it the new content."""
    path = tmp_path / "file.txt"
    path.write_text("old")
    with atomic_write(path) as unfinished:
        unfinished.write_text("new")
        during = path.read_text()

    assert during == "old"
    assert path.read_text() == "new"
    assert [path] == list(tmp_path.iterdir())


def test_an_error_leaves_everything_as_it_was(tmp_path):
    """An error in the block passes through; the old file is there, and nothing else is."""
    path = tmp_path / "file.txt"
    path.write_text("old")

    with pytest.raises(ZeroDivisionError), atomic_write(path) as unfinished:
        unfinished.write_text("half")
        unfinished.write_text(str(1 / 0))
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


def test_a_block_that_writes_nothing(tmp_path):
    """A block that writes no file is an error."""
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "file.txt"):
        pass
    assert list(tmp_path.iterdir()) == []
