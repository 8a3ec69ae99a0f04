"""Atomic writes: a file appears complete under its name, or the previous file stays."""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from modkit.files.operating_system import AnyPath, copy_owner, flush, flush_folder, lock_folder


# Without locks, a private folder is stale after this many seconds without a change. A save may
# pause, the clocks of two machines may differ, and Windows updates the time of a file when it is
# closed.
_STALE_AFTER: Final = 24 * 3600
# Why a file cannot be replaced, and what to do.
_MOUNTED: Final = (
    "a mounted file cannot be replaced: mount its folder instead, or write into it with "
    "save_checkpoint(..., atomic=False)"
)
_IN_USE: Final = (
    "Windows does not replace a file that is open or mapped into memory: delete tensors of "
    "load_checkpoint(mmap=True), close other readers, or save to another path"
)
_PROBE: Final = bytes(1 << 20)
# The errors of torch's writer of zip files.
_OF_CPP: Final = re.compile("inline_container|PytorchStreamWriter|iostream error|cannot be opened")
# The name of a private folder.
_PREFIX: Final = ".modkit-"
_SUFFIX: Final = ".tmp"


@contextmanager
def atomic_write(path: AnyPath) -> Generator[Path]:
    """Yield a temporary path; if the block ends without an error, that file replaces ``path``.

    The temporary file has the name of the target and lies in a private folder beside it. It is
    flushed to disk, gets the mode of the file that it replaces, and is renamed. The next write of
    any file in the folder removes what killed processes have left. Symbolic links are followed;
    other hard links keep the previous content. A FIFO, a device or an open file without a name
    (``/proc/self/fd/3``) is written to, which is not atomic.

    Args:
        path: The target; its folder must exist.

    Raises:
        OSError: If the file cannot be written, with ``errno`` and the target, also where a C++
            writer inside the block raises an error without ``errno``, for instance on a full disk.
    """
    given = os.fsdecode(path)
    target = Path(os.path.realpath(given))
    try:
        previous, is_named = None, False
        # Since Python 3.14, Path.exists() is False also if the disk fails.
        with contextlib.suppress(FileNotFoundError):
            previous = Path(given).stat()
            is_named = stat.S_IFMT(target.stat().st_mode) in {stat.S_IFREG, stat.S_IFDIR}

        writing = _replaced(target, previous)
        if previous is not None and not is_named:
            # By the given name: the real path of an open pipe (/dev/fd/1) does not exist, nor that
            # of an open file that was deleted.
            writing = _streamed(Path(given), target.name)
        elif previous is not None:
            # A rename would replace a write-protected file, too; torch.save refuses it. And a
            # folder.
            os.close(os.open(given, os.O_WRONLY))

        with writing as unfinished:
            yield unfinished
    except OSError as error:
        # Name the target, not a temporary file.
        name = error.filename
        is_ours = name is None or _PREFIX in str(name) or Path(name) in {target.parent, target}
        if error.errno is None or not is_ours:
            raise
        raise OSError(error.errno, error.strerror, given) from error


@contextmanager
def _replaced(target: Path, previous: os.stat_result | None) -> Generator[Path]:
    """Yield a path in a private folder; then set the mode of the file, and rename it."""
    remove_stale(target.parent)
    folder, lock = _private_folder(target.parent)
    try:
        unfinished = folder / target.name
        # Some writers create private files; this finds the mode that the umask gives to a new one.
        unfinished.touch()
        mode = unfinished.stat().st_mode
        unfinished.unlink()

        try:
            yield unfinished
        except Exception as error:
            if not isinstance(error, OSError) or error.errno is None:
                # C++ writers lose the error of the system: write on to raise it.
                with unfinished.open("ab") as file:
                    file.write(_PROBE)
                    file.flush()
                    os.fsync(file.fileno())
            # A fault that does not last is in the text alone, if anywhere.
            if type(error) is RuntimeError and _OF_CPP.search(str(error)):
                text = str(error).partition("\n")[0]
                codes = [code for code in errno.errorcode if os.strerror(code) in text]
                raise OSError((codes or [errno.EIO])[0], text) from error
            raise

        # A compiler makes its file executable.
        mode |= unfinished.stat().st_mode
        if previous is not None:
            mode = previous.st_mode
            copy_owner(unfinished, previous)
        unfinished.chmod(stat.S_IMODE(mode))
        flush(unfinished)
        _replace(target, unfinished)
        flush_folder(target.parent)
    finally:
        _remove(folder, lock)


@contextmanager
def _streamed(target: Path, name: str) -> Generator[Path]:
    """Collect the content in a temporary file, then copy it into a FIFO or a device."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, name)
        with Path(folder, name).open("rb") as content, target.open("wb") as sink:
            shutil.copyfileobj(content, sink, len(_PROBE))


def _replace(target: Path, unfinished: Path) -> None:
    try:
        unfinished.replace(target)
    except OSError as error:
        if error.errno == errno.EBUSY:
            error.strerror = f"{error.strerror}; {_MOUNTED}"
        elif error.errno == errno.EACCES:
            # EPERM is that of another user's file in a folder with the sticky bit.
            error.strerror = f"{error.strerror}; {_IN_USE}"
        raise


def _private_folder(parent: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(_SUFFIX, _PREFIX, parent))
        lock = None
        try:
            lock = lock_folder(folder)
            if folder.is_dir():
                return folder, lock
        except BlockingIOError:
            continue
        except OSError:
            _remove(folder, lock)
            raise
        # Before it was locked, another writer took it for a stale one and removed it.
        _remove(folder, lock)


def remove_stale(parent: Path) -> None:
    """Remove the private folders that killed writers have left in a folder, whatever they wrote.

    Args:
        parent: The folder. Private folders of writers that are alive stay.
    """
    private: list[Path] = []
    # A folder may be writable, and not readable.
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        ours = (entry for entry in entries if entry.name.startswith(_PREFIX))
        private = [Path(entry) for entry in ours if entry.name.endswith(_SUFFIX)]
    for folder in private:
        # It may belong to another user, or to a writer that is alive.
        with contextlib.suppress(OSError):
            lock = lock_folder(folder)
            last_change = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if lock is not None or time.time() - last_change >= _STALE_AFTER:
                _remove(folder, lock)


def _remove(folder: Path, lock: int | None) -> None:
    """Remove a folder and release its lock, also if a KeyboardInterrupt comes in between."""
    # An error here would hide the result of the save; the next one removes what is left.
    with contextlib.suppress(OSError):
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            if lock is not None:
                os.close(lock)
