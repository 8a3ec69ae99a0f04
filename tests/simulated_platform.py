"""A pytest plugin that takes away what macOS or Windows does not have, before modkit is imported.

``SIMULATED_PLATFORM=windows python -m pytest -p tests.simulated_platform tests/unit/files``, or ``macos``.

What it simulates, in the process of the tests; processes that tests start have everything:

- names of ``os`` and ``signal``, and the module ``fcntl``, that the platform lacks do not exist;
- ``/proc`` has no open files; on Windows, ``/dev/fd`` has none either;
- on Windows, a folder cannot be opened, and a file that this process has open or mapped into memory cannot be
  replaced: a PermissionError.

What it does not simulate: paths, encodings, and libraries that are compiled for the platform.
"""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch  # noqa: F401 - it needs what is taken away


# Without a name, nothing is taken away.
PLATFORM: Final = os.environ.get("SIMULATED_PLATFORM", "")
IS_WINDOWS: Final = PLATFORM == "windows"
# Names of ``os``. ``preadv`` came with macOS 11.
ABSENT_ON_MACOS: Final = (
    *("O_DIRECT", "O_PATH", "memfd_create", "posix_fadvise", "posix_fallocate"),
    *("preadv", "pwritev", "sched_getaffinity", "splice"),
)
# Not what pytest, shutil and multiprocessing themselves need, such as ``getuid``.
ABSENT_ON_WINDOWS: Final = (
    *ABSENT_ON_MACOS,
    *("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fchown", "fork"),
    *("geteuid", "getpgid", "lchown", "lockf", "mkfifo", "mknod", "nice", "pread"),
    *("pwrite", "seteuid", "setsid", "statvfs", "sync", "sysconf", "uname", "wait4"),
)
SIGNALS_ABSENT_ON_WINDOWS: Final = (
    *("SIGALRM", "SIGCHLD", "SIGHUP", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2"),
    *("SIGXFSZ", "alarm", "pthread_kill", "setitimer", "sigwait"),
)


def is_in_use(path: str) -> bool:
    """Return True if this process has a file open or mapped into memory."""
    inode = Path(path).stat().st_ino
    for each in Path("/proc/self/fd").iterdir():
        # The descriptor that lists the folder is closed by now.
        if each.exists() and each.stat().st_ino == inode:
            return True
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return any(fields[4] == str(inode) for fields in map(str.split, lines))


_replace, _open = os.replace, os.open


def replace(source: Any, target: Any, **options: Any) -> None:
    """Replace a file as Windows does."""
    if Path(target).exists() and is_in_use(target):
        text = os.strerror(errno.EACCES)
        raise PermissionError(errno.EACCES, text, str(source), None, str(target))
    _replace(source, target, **options)


def open_file(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
    if not options and Path(path).is_dir():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return _open(path, flags, *arguments, **options)


def remove(module: Any, *names: str) -> None:
    """Remove those names that the platform of the tests has."""
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def simulate() -> None:
    """Take away what the platform does not have."""
    assert "modkit" not in sys.modules, "modkit has been imported before the simulation"
    remove(os, *(ABSENT_ON_WINDOWS if IS_WINDOWS else ABSENT_ON_MACOS))
    if IS_WINDOWS:
        sys.modules["fcntl"] = None  # type: ignore[assignment]
        remove(signal, *SIGNALS_ABSENT_ON_WINDOWS)
        os.replace, os.open = cast("Any", replace), cast("Any", open_file)
        # Otherwise it opens the folders that it removes.
        shutil._use_fd_functions = False  # type: ignore[attr-defined]

    from modkit.files import operating_system

    operating_system._OPEN_FILES[:] = [] if IS_WINDOWS else ["/dev/fd"]
    assert (operating_system.fcntl is None) is IS_WINDOWS
    if IS_WINDOWS:
        # Other libraries may need it.
        del sys.modules["fcntl"]


# The configuration of tests/ imports modkit, and comes before every hook of a plugin.
if PLATFORM:
    simulate()


def pytest_report_header() -> str:
    """Name the platform in the output."""
    return f"simulated platform: {PLATFORM}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the platform cannot do, as docs/files.md says."""
    for item in items:
        if IS_WINDOWS and item.get_closest_marker("posix"):
            item.add_marker(pytest.mark.skip(reason="needs what Windows does not have"))
