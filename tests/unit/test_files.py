import os
import stat
import threading

import pytest
import torch

from modkit._files import atomic_write


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


def test_missing_folders_and_folders_in_the_way(tmp_path):
    """The folder has to be there, and the path must not be one."""
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "no" / "file"):
        pass
    with pytest.raises(IsADirectoryError, match="is a folder"), atomic_write(tmp_path):
        pass


def test_the_name_inside_of_the_file_is_the_right_one(tmp_path):
    """Torch writes the name of a file into it; it is that which the file gets."""
    names = []
    for write in (lambda path: torch.save([1], path), _save_atomically):
        write(tmp_path / "model.pt")
        names.append((tmp_path / "model.pt").read_bytes().count(b"model/data.pkl"))

    assert names[0] == names[1] > 0


def _save_atomically(path):
    """Save with torch, in one step."""
    with atomic_write(path) as unfinished:
        torch.save([1], unfinished)


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_permissions(tmp_path):
    """A new file has the usual permissions, and one that is replaced keeps its own."""
    new, old, usual = (tmp_path / name for name in ("new", "old", "usual"))
    usual.touch()
    old.touch()
    old.chmod(0o640)
    for path in (new, old):
        with atomic_write(path) as unfinished:
            unfinished.write_text("text")

    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


@pytest.mark.skipif(os.name != "posix", reason="making links needs a privilege elsewhere")
def test_links(tmp_path):
    """A link stays a link, and what it points to is replaced."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with atomic_write(link) as unfinished:
        unfinished.write_text("new")

    assert link.is_symlink()
    assert target.read_text() == "new"


def test_several_writers(tmp_path):
    """Writers do not get into each other's way: one of the whole contents is left."""
    path, contents = tmp_path / "file", [str(number) * 10_000 for number in range(8)]

    def write(content):
        with atomic_write(path) as unfinished:
            unfinished.write_text(content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert path.read_text() in contents
    assert [path] == list(tmp_path.iterdir())
