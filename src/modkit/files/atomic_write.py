"""Atomic writing: a file appears complete under its name, or what was there before stays."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final


fcntl: Any
try:
    import fcntl
except ImportError:  # pragma: no cover - Windows: an open file cannot be deleted there anyway
    fcntl = None

# Where a file system has no locks, a leftover is a leftover after this many seconds.
_ABANDONED_AFTER: Final = 3600
_PROBE: Final = bytes(1 << 20)


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Generator[Path]:
    """Yield a path to write to; when the block ends without an error, the file replaces ``path``.

    The new file has the name of the target and lies in a private folder beside it. It is flushed to the
    disk, gets the mode of the file that it replaces, and is renamed. A killed process leaves that folder
    behind; the next write of the same target removes it. Symbolic links are followed. A target that is
    not a regular file, such as a pipe or a device, is written to and never replaced, which cannot be
    atomic. Other hard links to the target keep the old content.

    Args:
        path: The target. Its folder must exist.

    Raises:
        OSError: If the file cannot be written, with ``errno`` and the path of the target, also where
            the writer inside the block has lost the number: on a full disk, for instance.
    """
    given = os.fspath(path)
    target = Path(os.path.realpath(given))
    with _naming(given, target):
        found = _existing(given)
        if found is not None and not stat.S_ISREG(found.st_mode):
            # By the name as it was given: the real path of an open pipe (/dev/fd/1) does not exist.
            writing = _streamed(Path(given), target.name)
        else:
            writing = _replaced(target, found)
        with writing as unfinished:
            yield unfinished


def _existing(given: str) -> os.stat_result | None:
    """Return the status of the target; raise if it is a folder or is write-protected."""
    try:
        found = Path(given).stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), given)
    if stat.S_ISREG(found.st_mode):
        # A rename would replace a write-protected file too; torch.save refuses.
        os.close(os.open(given, os.O_WRONLY))
    return found


@contextmanager
def _naming(given: str, target: Path) -> Generator[None]:
    """Let errors of the operating system name the target, not a temporary file."""
    try:
        yield
    except OSError as error:
        ours = error.filename is None or Path(error.filename) in {target.parent, target}
        ours = ours or ".modkit-" in str(error.filename)
        if error.errno is None or not ours:
            raise
        raise OSError(error.errno, os.strerror(error.errno), given) from error


@contextmanager
def _replaced(target: Path, found: os.stat_result | None) -> Generator[Path]:
    prefix = f".modkit-{zlib.crc32(os.fsencode(target.name)):08x}-"
    _remove_leftovers(target.parent, prefix)
    folder, lock = _private_folder(target.parent, prefix)
    try:
        unfinished = folder / target.name
        # Some writers make private files; this tells which mode the umask gives to a new one.
        unfinished.touch()
        mode = unfinished.stat().st_mode
        unfinished.unlink()
        try:
            yield unfinished
        except Exception as error:
            _raise_lost_errno(unfinished, error)
            raise
        # A compiler makes its file executable.
        mode |= unfinished.stat().st_mode
        if found is not None:
            mode = found.st_mode
            if hasattr(os, "chown"):
                with contextlib.suppress(PermissionError):
                    os.chown(unfinished, found.st_uid, found.st_gid)
        unfinished.chmod(stat.S_IMODE(mode))
        _flush(unfinished, os.O_RDWR)
        unfinished.replace(target)
        # Not every system can flush a folder.
        with contextlib.suppress(OSError):
            _flush(target.parent, os.O_RDONLY)
    finally:
        _remove(folder, lock)


@contextmanager
def _streamed(target: Path, name: str) -> Generator[Path]:
    """Collect the content elsewhere, then write it into a pipe or a device."""
    with tempfile.TemporaryDirectory() as folder:
        unfinished = Path(folder, name)
        yield unfinished
        with unfinished.open("rb") as content, target.open("wb") as sink:
            shutil.copyfileobj(content, sink, len(_PROBE))


def reserve(unfinished: Path, size: int) -> None:
    """Raise if there is no room for a file, for writers that do not survive a full disk.

    Args:
        unfinished: The path that ``atomic_write`` has yielded. Nothing is left under it.
        size: Size in bytes.

    Raises:
        OSError: If the disk is full, or a quota or a limit is exceeded.
    """
    if size and hasattr(os, "posix_fallocate"):
        with unfinished.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
                    raise
        unfinished.unlink()


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_lost_errno(unfinished: Path, error: Exception) -> None:
    """Raise what the system says about writing on, if it refuses: C++ writers do not tell."""
    if isinstance(error, OSError) and error.errno is not None:
        return
    try:
        with unfinished.open("ab") as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as reason:
        raise reason from error


# A folder is locked for as long as its writer lives: the kernel releases the lock of a killed process.


def _private_folder(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """Make a folder that only this writer uses, and lock it."""
    while True:
        folder = Path(tempfile.mkdtemp(".tmp", prefix, parent))
        # Between the two calls another writer may take it for a leftover and remove it.
        with contextlib.suppress(BlockingIOError):
            lock = _locked(folder)
            if folder.is_dir():
                return folder, lock
            if lock is not None:
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder and return the descriptor that holds the lock, or None without locks.

    Raises:
        BlockingIOError: If a living writer holds it.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove the folders that killed writers of the same target have left."""
    with os.scandir(parent) as entries:
        found = [Path(entry) for entry in entries if entry.name.startswith(prefix)]
    for folder in found:
        # Another user's, or a living writer's.
        with contextlib.suppress(OSError):
            lock = _locked(folder)
            if lock is None and time.time() - folder.stat().st_mtime < _ABANDONED_AFTER:
                continue
            _remove(folder, lock)


def _remove(folder: Path, lock: int | None) -> None:
    """Remove a folder and release its lock, also if a KeyboardInterrupt comes in between."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        if lock is not None:
            os.close(lock)
