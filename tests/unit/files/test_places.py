"""Paths and open files for ``save_checkpoint`` and ``load_checkpoint``, with torch as the oracle."""

import errno
import gzip
import io
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from modkit import load_checkpoint, save_checkpoint
from tests.cases import for_each
from tests.unit.files.faults import NOBODY, NotPossible, fork, own_mounts, syscall, wait


CONTENT = {"w": torch.arange(100_000.0), "epoch": 3}
# torch reads this content itself, and not modkit's own unpickler.
LEFT_TO_TORCH = {"w": torch.eye(3).to_sparse(), "epoch": 3}


def assert_read(found, expected=CONTENT):
    """Compare what was read with what was saved."""
    assert found["epoch"] == 3
    assert torch.equal(found["w"].to_dense(), expected["w"].to_dense())


def test_a_path_as_bytes(tmp_path):
    """A name that is not UTF-8 is written and read, as bytes, and by its name as a str."""
    path = os.fsencode(tmp_path) + b"/n\xff.pt"
    for atomic in (True, False):
        save_checkpoint(CONTENT, path, atomic=atomic)
        assert_read(load_checkpoint(path))
        assert_read(load_checkpoint(os.fsdecode(path), mmap=True))
    assert [os.fsencode(each.name) for each in tmp_path.iterdir()] == [b"n\xff.pt"]


@for_each("content", [CONTENT, LEFT_TO_TORCH])
def test_an_open_file(content, tmp_path):
    """Both sides read what both sides write, from the position of the file on."""
    for save in (torch.save, save_checkpoint):
        buffer = io.BytesIO(b"before")
        buffer.seek(6)
        save(content, buffer)
        assert buffer.getvalue().startswith(b"beforePK")
        for load in (torch.load, load_checkpoint):
            buffer.seek(6)
            assert_read(load(buffer), content)

        path = tmp_path / "file.pt"
        with path.open("wb") as file:
            save(content, file)
        for load in (torch.load, load_checkpoint):
            with path.open("rb") as file:
                assert_read(load(file), content)


def test_swapped_arguments(tmp_path: Path) -> None:
    """The error says in which order they are; torch speaks of a file 'f'."""
    with pytest.raises(TypeError, match=r"got a path first; pass \(checkpoint, path\)"):
        save_checkpoint(tmp_path / "last.pt", CONTENT)


def test_a_file_that_was_just_written():
    """It is read from its start; torch raises EOFError."""
    buffer = io.BytesIO()
    save_checkpoint(CONTENT, buffer)

    assert_read(load_checkpoint(buffer))


def test_a_pipe(tmp_path):
    """A file without positions is read, too; torch refuses it."""
    path = tmp_path / "file.pt"
    save_checkpoint({"w": torch.ones(3), "epoch": 3}, path)
    source, sink = os.pipe()
    os.write(sink, path.read_bytes())
    os.close(sink)
    with os.fdopen(source, "rb") as file:
        found = load_checkpoint(file)

    assert torch.equal(found["w"], torch.ones(3))


def test_the_content_of_an_open_file_is_verified(tmp_path):
    """A flipped bit in a tensor, and half of a file; the error has the name of a file with one."""
    buffer = io.BytesIO()
    save_checkpoint(CONTENT, buffer)
    content = bytearray(buffer.getvalue())
    content[len(content) // 2] ^= 1

    with pytest.raises(ValueError, match=r"the file is corrupt: .* does not match its checksum"):
        load_checkpoint(io.BytesIO(content))
    with pytest.raises(ValueError, match="the file is corrupt"):
        load_checkpoint(io.BytesIO(buffer.getvalue()[:1000]))
    path = tmp_path / "last.pt"
    path.write_bytes(content)
    with (
        path.open("rb") as file,
        pytest.raises(ValueError, match=r"the file .*last\.pt is corrupt"),
    ):
        load_checkpoint(file)


def error_of(function, *arguments):
    """Return the error that a function raises."""
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def places(folder):
    """Yield what cannot be written to."""
    yield 3
    yield None
    yield (folder / "text.txt").open("w", encoding="utf-8")
    yield io.StringIO()
    (folder / "empty").touch()
    yield (folder / "empty").open("rb")
    closed = (folder / "closed").open("wb")
    closed.close()
    yield closed


def sources(folder):
    """Yield what cannot be read from."""
    torch.save(CONTENT, folder / "file.pt")
    yield 3
    yield None
    yield (folder / "file.pt").open(encoding="utf-8")
    yield (folder / "file.pt").open(encoding="latin-1")
    yield (folder / "written").open("wb")
    closed = (folder / "file.pt").open("rb")
    closed.close()
    yield closed


@pytest.mark.parametrize(("yielded", "ours", "theirs"), [
    (places, save_checkpoint, torch.save),
    (sources, load_checkpoint, torch.load),
], ids=["save", "load"])  # fmt: skip
def test_what_is_no_binary_file(yielded, ours, theirs, tmp_path):
    """The types of the errors are those of torch; of a file that is open as text, a better text."""
    arguments = (CONTENT,) if theirs is torch.save else ()
    for place in yielded(tmp_path):
        expected = error_of(theirs, *arguments, place)
        found = error_of(ours, *arguments, place)
        if hasattr(place, "close"):
            place.close()

        assert isinstance(found, type(expected))
        # Where decoding stops depends on how much is read; Python says "closed file" in two ways.
        own = isinstance(found, UnicodeDecodeError) or "open as text" in str(found)
        assert own or str(found) in {str(expected), "read of closed file"}


def test_an_open_file_cannot_be_mapped():
    """The error is that of torch."""
    buffer = io.BytesIO()
    torch.save(CONTENT, buffer)
    buffer.seek(0)
    expected = error_of(lambda: torch.load(buffer, mmap=True))
    found = error_of(lambda: load_checkpoint(buffer, mmap=True))

    assert repr(found) == repr(expected)


def test_in_place(tmp_path):
    """The file stays the same one, with its hard links; a shorter checkpoint leaves no rest."""
    path, link = tmp_path / "last.pt", tmp_path / "link.pt"
    save_checkpoint({"w": torch.zeros(200_000), "epoch": 1}, path)
    link.hardlink_to(path)
    number = path.stat().st_ino
    save_checkpoint(CONTENT, path, atomic=False)
    save_checkpoint(CONTENT, tmp_path / "new.pt", atomic=False)

    assert path.stat().st_ino == number
    for each in (path, link, tmp_path / "new.pt"):
        assert_read(load_checkpoint(each))
    assert {each.name for each in tmp_path.iterdir()} == {"last.pt", "link.pt", "new.pt"}


def test_in_place_an_invalid_checkpoint_changes_nothing(tmp_path):
    """The checkpoint is complete in memory before the file is opened."""
    path = tmp_path / "last.pt"
    save_checkpoint(CONTENT, path)
    with pytest.raises(TypeError, match=r"checkpoint\['folder'\] is of type pathlib"):
        save_checkpoint({"w": torch.zeros(10), "folder": tmp_path}, path, atomic=False)

    assert_read(load_checkpoint(path))


def test_in_place_an_error_names_the_file():
    """A full disk is an OSError with ``errno`` and the path, as for atomic writes."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="/dev/full") as caught:
        save_checkpoint(CONTENT, "/dev/full", atomic=False)

    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")


def in_a_process(run):
    """Run a function in a process that may lose permissions and mounts; skip if that is impossible."""
    source, sink = os.pipe()

    def guarded():
        try:
            run()
        except NotPossible as reason:
            os.write(sink, str(reason).encode())

    wait(fork(guarded))
    os.close(sink)
    with os.fdopen(source) as stream:
        if reason := stream.read():
            pytest.skip(reason)


def refuse_then_write(path, number):
    """Fail atomically, and write in place."""
    torch.save({"epoch": 1}, path)
    with pytest.raises(OSError, match=r"last\.pt") as caught:
        save_checkpoint(CONTENT, path)
    assert caught.value.errno == number
    assert load_checkpoint(path) == {"epoch": 1}

    save_checkpoint(CONTENT, path, atomic=False)
    assert_read(load_checkpoint(path))
    assert [each.name for each in path.parent.iterdir()] == ["last.pt"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes with other permissions")
def test_a_file_that_is_mounted_by_itself(tmp_path):
    """As of ``docker run -v file:file``: it cannot be replaced (EBUSY), and torch.save writes to it."""
    folder, other = tmp_path / "folder", tmp_path / "other.pt"
    folder.mkdir()
    path = folder / "last.pt"
    path.touch()
    other.touch()

    def run():
        own_mounts()
        syscall("mount", os.fsencode(other), os.fsencode(path), None, 4096, None)
        refuse_then_write(path, errno.EBUSY)

    in_a_process(run)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes with other permissions")
def test_a_file_that_may_be_written_and_not_read(tmp_path):
    """It is replaced, and keeps its mode; torch writes into it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)

    def run():
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        for save in (torch.save, save_checkpoint):
            path = folder / f"{save.__name__}.pt"
            path.touch()
            path.chmod(0o222)
            save(CONTENT, path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o222
            path.chmod(0o666)
            assert_read(load_checkpoint(path))
            path.unlink()

    try:
        in_a_process(run)
    finally:
        folder.rmdir()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the names of open files")
@for_each("save", [torch.save, save_checkpoint])
def test_an_open_file_without_a_name(save, tmp_path):
    """A file that was deleted while it is open, or never had a name, is written to."""
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(1_000_000))
        file.flush()
        save(CONTENT, f"/proc/self/fd/{file.fileno()}")
        file.seek(0)

        assert_read(torch.load(file, weights_only=True))
    assert list(tmp_path.iterdir()) == []


@for_each("load", [torch.load, load_checkpoint])
def test_an_empty_path(load):
    """It is a missing file, not the current folder."""
    with pytest.raises(FileNotFoundError):
        load("")


class Short(io.RawIOBase):
    """A file without a buffer that takes at most 1,000 bytes at once, as a pipe does."""

    def __init__(self):
        self.content = b""

    def write(self, content):
        """Take the first 1,000 bytes."""
        taken = bytes(content[:1000])
        self.content += taken
        return len(taken)


def test_files_of_other_libraries(tmp_path):
    """Compressed files, temporary files, and those that take less than they are given."""
    short = Short()
    save_checkpoint(CONTENT, short)
    assert_read(load_checkpoint(io.BytesIO(short.content)))

    with gzip.open(tmp_path / "file.pt.gz", "wb", compresslevel=1) as file:
        save_checkpoint(CONTENT, file)
    with gzip.open(tmp_path / "file.pt.gz", "rb") as file:
        assert_read(load_checkpoint(file))

    with tempfile.NamedTemporaryFile() as file:
        save_checkpoint(CONTENT, file)
        assert_read(torch.load(file.name))
