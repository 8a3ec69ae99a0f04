"""Calls that not every operating system has, with replacements; the rest of this folder has none.

Linux has all of it. macOS has no ``/proc``, and no ``preadv`` before macOS 11. Windows has no reads
at a place, no locks of folders, no owners, and opens no folder.
"""

import contextlib
import os
import threading
from pathlib import Path
from typing import Any, Final, TypeAlias


fcntl: Any
try:
    import fcntl
except ImportError:
    fcntl = None

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
PATH_TYPES: Final = (str, bytes, os.PathLike)

# Folders in which an open file has its descriptor as its name.
_OPEN_FILES: Final = ["/proc/self/fd", "/dev/fd"]
_POSITION: Final = threading.Lock()


def read_at(descriptor: int, count: int, start: int) -> bytes:
    """Return bytes from a place in a file on; fewer at its end, or after a signal."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, start)
    # The threads that verify a file share its position.
    with _POSITION:
        os.lseek(descriptor, start, os.SEEK_SET)
        return os.read(descriptor, count)


def read_into_at(descriptor: int, target: memoryview, start: int) -> int:
    """Read into memory as :func:`read_at` does, and return the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target], start)
    content = read_at(descriptor, len(target), start)
    target[: len(content)] = content
    return len(content)


def path_of(descriptor: int, path: str | os.PathLike[str]) -> str:
    """Return a path to an open file that stays valid if another file replaces it.

    On Windows that is its own path: no file can replace one that is open.
    """
    candidates = (Path(folder, str(descriptor)) for folder in _OPEN_FILES)
    return next((str(name) for name in candidates if name.exists()), os.fspath(path))


def lock_folder(folder: Path) -> int | None:
    """Lock a folder, and return the descriptor that holds the lock, or None without locks.

    The kernel releases the lock of a killed process.

    Args:
        folder: Folder to lock.

    Returns:
        The open descriptor, or None if the folder does not exist or the system cannot lock it.

    Raises:
        BlockingIOError: If another writer has locked it.
        OSError: If the folder cannot be opened, or is a symbolic link.
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


def copy_owner(path: Path, owned: os.stat_result) -> None:
    """Give a file the owner of another one, where users may do so."""
    with contextlib.suppress(PermissionError, AttributeError):
        os.chown(path, owned.st_uid, owned.st_gid)


def flush(path: Path, flags: int = os.O_WRONLY) -> None:
    """Flush a file to disk."""
    # Windows flushes only what is open for writing; the file may not be readable.
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, on systems and file systems that can."""
    with contextlib.suppress(OSError):
        flush(folder, os.O_RDONLY)
