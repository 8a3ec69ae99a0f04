"""Real faults while a file is saved, and what must hold after each; nothing is mocked.

``fault_runs`` runs each trial in a process of its own, which may be killed, limited or put into namespaces.
"""

import ctypes
import errno
import functools
import os
import random
import signal
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from modkit.files.atomic_write import atomic_write
from tests.unit.files import failing_calls
from tests.unit.files.writers import Writer


NOBODY: Final = 65534
_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000
_READ_ONLY, _BIND, _REMOUNT, _RECURSIVE, _PRIVATE = 1, 4096, 32, 16384, 1 << 18


class NotPossible(Exception):
    """The fault cannot be made here, or does not apply to the writer."""


@dataclass(frozen=True)
class Fault:
    """One fault: ``run(writer, folder, count)`` raises if a file is lost.

    ``large`` faults save several MB. ``count`` is the number of saves in one trial, 0 where it is one.
    """

    name: str
    run: Callable[[Writer, Path, int], str | None]
    large: bool = False
    saves: bool = False
    random: bool = False


FAULTS: Final[dict[str, Fault]] = {}


def fault(**options: Any) -> Callable[[Any], Any]:
    """Register a fault."""

    def register(run: Callable[[Writer, Path, int], str | None]) -> Any:
        FAULTS[run.__name__] = Fault(run.__name__, run, **options)
        return run

    return register


# Conditions.


def names_in(folder: Path) -> set[str]:
    """Return all names in a folder, hidden ones too."""
    return {path.name for path in folder.iterdir()}


def check(writer: Writer, target: Path, *versions: int, beside: tuple[str, ...] = ()) -> None:
    """Check that the target is a complete version, with nothing left beside it."""
    found = writer.load(target)
    assert found in versions, f"version {found} is not one of {versions}"
    assert names_in(target.parent) == {target.name, *beside}, names_in(target.parent)


def failed(writer: Writer, target: Path, named: Path | None = None) -> BaseException:
    """Save, which must fail and name a path, by default the target; return the error."""
    error: BaseException | None = None
    try:
        writer.save(target, 2)
    except BaseException as raised:
        error = raised
    assert error is not None, "no error"
    path = str(named or (target.parent if writer.name == "average" else target))
    assert path in str(error) or path in repr(error), f"no path in {error!r}"
    # The command line shows the text of an error, which is the cause.
    while writer.name == "average" and error.__cause__ and not getattr(error, "errno", None):
        error = error.__cause__
    return error


def failed_with(writer: Writer, target: Path, *numbers: int) -> None:
    """Save, which must fail with one of these errors of the operating system."""
    error = failed(writer, target)
    if writer.name == "average" and getattr(error, "errno", None) is None:
        return  # the command line looks at the folder first, and names it in words
    assert isinstance(error, OSError), repr(error)
    assert error.errno in numbers, repr(error)
    assert error.filename == str(target), f"the error names {error.filename!r}"


# Processes and namespaces.


def fork(run: Callable[[], Any]) -> int:
    """Run a function in a process that exits with 1 after an error; return its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return number
    code = 1
    # The threads of OpenMP are not forked, and a parallel loop would wait for them.
    torch.set_num_threads(1)
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(*numbers: int) -> None:
    """Wait for processes, which must not fail."""
    for number in numbers:
        _, status = os.waitpid(number, 0)
        assert status == 0, f"a process ended with status {status}"


def syscall(name: str, *arguments: Any) -> None:
    """Call a function of the C library, for root only."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NotPossible("needs root on Linux")
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise NotPossible(f"{name}: {os.strerror(number)}")


def own_mounts() -> None:
    """Give this process mounts that nothing else sees."""
    syscall("unshare", _NEW_MOUNTS)
    syscall("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)


# The faults.


@fault(large=True, random=True)
def killed(writer: Writer, folder: Path, count: int) -> str:
    """The file is the last version that was saved, or the one after; the next save cleans up."""
    target = folder / writer.file
    started = time.perf_counter()
    writer.save(target, 1)
    duration = time.perf_counter() - started
    reader, announcer = os.pipe()

    def save_on() -> None:
        for version in range(2, 1000):
            writer.save(target, version)
            os.write(announcer, struct.pack("i", version))

    child = fork(save_on)
    os.close(announcer)
    done = struct.unpack("i", os.read(reader, 4))[0]
    time.sleep(random.uniform(0, 3 * duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while announced := os.read(reader, 4):
        done = struct.unpack("i", announced)[0]
    interrupted = names_in(folder) != {target.name}
    found = writer.load(target)
    assert found in {done, done + 1}, f"version {found} after {done}"
    writer.save(target, found + 1)
    check(writer, target, found + 1)
    return "left a temporary file" if interrupted else "between two saves"


def compete(writer: Writer, target: Path, count: int, start: Callable[..., Any]) -> None:
    """Save half of the versions in each of two workers, and read all the while."""
    writer.save(target, 1)
    start(lambda own, first: [own.save(target, v) for v in range(first, count + 2, 2)])
    check(writer, target, count, count + 1)


@fault(saves=True)
def two_threads(writer: Writer, folder: Path, count: int) -> None:
    """Each save succeeds, and each read in between finds a complete version."""
    target, errors = folder / writer.file, []

    def guarded(run: Callable[[], Any]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    def start(save: Callable[[Writer, int], Any]) -> None:
        workers = [type(writer)(writer.elements) for _ in range(2)]
        threads = [
            threading.Thread(target=guarded, args=(functools.partial(save, own, first),))
            for own, first in zip(workers, (2, 3), strict=True)
        ]
        for thread in threads:
            thread.start()
        while not errors and any(thread.is_alive() for thread in threads):
            guarded(lambda: writer.load(target))
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    compete(writer, target, count, start)


def in_two_processes(writer: Writer, folder: Path, count: int, prepare: Callable[[], Any]) -> None:
    """Let two processes compete, each of which calls a function first."""

    def start(save: Callable[[Writer, int], Any]) -> None:
        def alone(first: int) -> None:
            prepare()
            # The first child after `unshare` is the one with PID 1.
            wait(fork(lambda: save(writer, first)))

        children = {fork(functools.partial(alone, first)) for first in (2, 3)}
        while children:
            writer.load(folder / writer.file)
            for child in list(children):
                number, status = os.waitpid(child, os.WNOHANG)
                assert status == 0, "a writer failed"
                children -= {number}

    compete(writer, folder / writer.file, count, start)


@fault(saves=True)
def two_processes(writer: Writer, folder: Path, count: int) -> None:
    """Each save succeeds, and each read in between finds a complete version."""
    in_two_processes(writer, folder, count, lambda: None)


@fault(saves=True)
def same_pid(writer: Writer, folder: Path, count: int) -> None:
    """As in two containers with one shared folder, where each has PID 1."""
    in_two_processes(writer, folder, count, lambda: syscall("unshare", _NEW_PIDS))


@fault()
def full_disk(writer: Writer, folder: Path, count: int) -> None:
    """The error names the path, and the old file stays."""
    writer.save(folder / writer.file, 1)
    size = (folder / writer.file).stat().st_size
    own_mounts()
    options = f"size={int(1.6 * size) // 4096 * 4096}".encode()
    syscall("mount", b"none", os.fsencode(folder), b"tmpfs", 0, options)
    target = folder / writer.file
    writer.save(target, 1)

    failed_with(writer, target, errno.ENOSPC)
    check(writer, target, 1)


@fault()
def size_limit(writer: Writer, folder: Path, count: int) -> None:
    """The error names the path, and the old file stays."""
    target = folder / writer.file
    writer.save(target, 1)
    import resource  # POSIX alone has it

    resource.setrlimit(resource.RLIMIT_FSIZE, (target.stat().st_size // 2,) * 2)

    failed_with(writer, target, errno.EFBIG)
    check(writer, target, 1)


@fault()
def read_only_folder(writer: Writer, folder: Path, count: int) -> None:
    """The error names the path, and the old file stays."""
    target = folder / writer.file
    writer.save(target, 1)
    check(writer, target, 1)
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.chown(target, NOBODY, NOBODY)
        os.seteuid(NOBODY)  # permissions mean nothing to root

    failed_with(writer, target, errno.EACCES)
    os.seteuid(user)
    check(writer, target, 1)


@fault()
def read_only_system(writer: Writer, folder: Path, count: int) -> None:
    """The error names the path, and the old file stays."""
    target = folder / writer.file
    writer.save(target, 1)
    own_mounts()
    path = os.fsencode(folder)
    syscall("mount", path, path, None, _BIND, None)
    syscall("mount", b"none", path, None, _BIND | _REMOUNT | _READ_ONLY, None)

    failed_with(writer, target, errno.EROFS, errno.EACCES)
    check(writer, target, 1)


def under_name(writer: Writer, folder: Path, name: str) -> None:
    """Save twice to a file of this name, or in a folder of it."""
    suffix = Path(writer.file).suffix
    if writer.any_name:
        target = folder / f"{name}{suffix}"
    else:
        target = folder / name / writer.file
        target.parent.mkdir()
    for version in (1, 2):
        writer.save(target, version)
        check(writer, target, version)


@fault()
def long_name(writer: Writer, folder: Path, count: int) -> None:
    """The longest name that file systems allow."""
    under_name(writer, folder, "n" * (255 - len(Path(writer.file).suffix)))


@fault()
def odd_name(writer: Writer, folder: Path, count: int) -> None:
    """Names that are unusual and allowed."""
    for number, name in enumerate(("two words", "two\nlines", "größe-重み-🙂", "-o", "[red]")):
        (folder / str(number)).mkdir()
        under_name(writer, folder / str(number), name)


@fault()
def undecodable_name(writer: Writer, folder: Path, count: int) -> None:
    """A name of bytes that no text has."""
    try:
        (folder / "\udcff").touch()
    except OSError as error:
        raise NotPossible(str(error)) from error
    (folder / "\udcff").unlink()
    under_name(writer, folder, "latin-\udce9")


@fault()
def link(writer: Writer, folder: Path, count: int) -> None:
    """The link stays, and the file that it leads to is replaced; in another folder too."""
    (folder / "data").mkdir()
    real, linked = folder / "data" / writer.file, folder / writer.file
    writer.save(real, 1)
    linked.symlink_to(Path("data", writer.file))
    writer.save(linked, 2)

    assert linked.is_symlink()
    check(writer, real, 2)
    check(writer, linked, 2, beside=("data",))


@fault()
def dangling_link(writer: Writer, folder: Path, count: int) -> None:
    """The file that the link leads to is made."""
    (folder / "data").mkdir()
    real, linked = folder / "data" / writer.file, folder / writer.file
    linked.symlink_to(real)
    writer.save(linked, 1)

    assert linked.is_symlink()
    check(writer, real, 1)
    check(writer, linked, 1, beside=("data",))


@fault()
def link_loop(writer: Writer, folder: Path, count: int) -> None:
    """The error names the path, and the links stay."""
    target = folder / writer.file
    target.symlink_to(folder / "other")
    (folder / "other").symlink_to(target)

    failed_with(writer, target, errno.ELOOP)
    assert names_in(folder) == {target.name, "other"}
    assert target.is_symlink()


@fault()
def mode_and_owner(writer: Writer, folder: Path, count: int) -> None:
    """They stay; a new file gets the mode that the umask leaves."""
    target = folder / writer.file
    os.umask(0o027)
    writer.save(target, 1)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    for version, mode in enumerate((0o600, 0o664, 0o444), 2):
        target.chmod(mode)
        if mode == 0o444 and os.geteuid() != 0:
            failed_with(writer, target, errno.EACCES)
            break
        writer.save(target, version)
        assert stat.S_IMODE(target.stat().st_mode) == mode
        check(writer, target, version)
    if os.geteuid() == 0:
        os.chown(target, NOBODY, NOBODY)
        writer.save(target, 9)
        assert (target.stat().st_uid, target.stat().st_gid) == (NOBODY, NOBODY)


def special(target: Path, kind: int, device: int = 0) -> None:
    """Make a special file, never one of the system's own."""
    try:
        os.mknod(target, kind | 0o666, device)
        os.close(os.open(target, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        raise NotPossible(f"no special files here: {error}") from error


@fault()
def fifo(writer: Writer, folder: Path, count: int) -> None:
    """The reader of a pipe gets a complete file, and the pipe stays a pipe."""
    target, received = folder / writer.file, folder / "received" / writer.file
    received.parent.mkdir()
    special(target, stat.S_IFIFO)

    def receive() -> None:
        with target.open("rb") as source:
            received.write_bytes(source.read())

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    writer.save(target, 1)
    thread.join(10)

    assert stat.S_ISFIFO(target.stat().st_mode)
    assert names_in(folder) == {target.name, "received"}
    check(writer, received, 1)


@fault()
def open_pipe(writer: Writer, folder: Path, count: int) -> None:
    """As for ``-o /dev/stdout | gzip``: the reader gets a complete file."""
    if not writer.any_name or ".safetensors" in writer.file:
        raise NotPossible("the name is the writer's, or chooses the format")
    source, sink = os.pipe()
    received = folder / writer.file
    thread = threading.Thread(
        target=lambda: received.write_bytes(os.fdopen(source, "rb").read()), daemon=True
    )
    thread.start()
    writer.save(Path(f"/proc/self/fd/{sink}"), 1)
    os.close(sink)
    thread.join(10)

    check(writer, received, 1)


@fault()
def null_device(writer: Writer, folder: Path, count: int) -> None:
    """The device is still a device afterwards."""
    target = folder / writer.file
    special(target, stat.S_IFCHR, os.makedev(1, 3))
    writer.save(target, 1)

    assert stat.S_ISCHR(target.stat().st_mode)
    assert names_in(folder) == {target.name}


@fault()
def full_device(writer: Writer, folder: Path, count: int) -> None:
    """The error names the path, and the device is still a device."""
    target = folder / writer.file
    special(target, stat.S_IFCHR, os.makedev(1, 7))

    failed_with(writer, target, errno.ENOSPC)
    assert stat.S_ISCHR(target.stat().st_mode)
    assert names_in(folder) == {target.name}


@fault()
def folder_as_target(writer: Writer, folder: Path, count: int) -> None:
    """The error names the path, and the folder is unchanged."""
    target = folder / writer.file
    target.mkdir()
    (target / "content").write_text("of the user")
    error = failed(writer, target)

    if writer.name != "average":  # where click refuses the option
        assert isinstance(error, IsADirectoryError), repr(error)
    assert names_in(folder) == {target.name}
    assert (target / "content").read_text() == "of the user"


# Exceptions if the folder of the target does not exist; the other writers create it.
_NO_FOLDER: Final = {
    "plain": FileNotFoundError,
    "jit": RuntimeError,
    "export_average": FileNotFoundError,
    "export_average-safetensors": FileNotFoundError,
    "average": Exception,
}


@fault()
def missing_folder(writer: Writer, folder: Path, count: int) -> None:
    """The error names the path, and nothing is created."""
    target = folder / "missing" / writer.file
    if writer.name not in _NO_FOLDER:
        raise NotPossible("the writer makes the folder")
    error = failed(writer, target, target.parent)

    assert isinstance(error, _NO_FOLDER[writer.name]), repr(error)
    assert names_in(folder) == set()


# An interrupt in these, which make and remove the private folder, may leave it.
_HOUSEKEEPING: Final = {"_private_folder", "_remove", "remove_stale", "_replaced"}


@fault(large=True, random=True)
def interrupted(writer: Writer, folder: Path, count: int) -> str:
    """The old or the new file is there, and nothing beside it.

    An interrupt in the removal of the private folder leaves it to the save of the next process.
    """
    target = folder / writer.file
    started = time.perf_counter()
    writer.save(target, 1)
    duration = time.perf_counter() - started
    places: list[str] = []

    def interrupt(number: int, frame: Any) -> NoReturn:
        functions = [called.f_code.co_name for called, _ in traceback.walk_stack(frame)]
        places.extend(functions[: functions.index("save") + 1])
        raise KeyboardInterrupt

    def save() -> None:
        signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.05, 0.95) * duration)
            writer.save(target, 2)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:
            # Click's Abort is that of a command whose arguments are still being read.
            if type(error).__name__ not in {"KeyboardInterrupt", "Abort"}:
                raise
        if not _HOUSEKEEPING & {*places}:
            assert names_in(folder) == {target.name}, places
        assert writer.load(target) in ({1, 2} if places else {2})
        os.write(announcer, b"x" if places else b"")

    reader, announcer = os.pipe()
    wait(fork(save))
    os.close(announcer)
    writer.save(target, 3)
    check(writer, target, 3)
    return "during the save" if os.read(reader, 1) else "after the save"


@fault()
def leftovers(writer: Writer, folder: Path, count: int) -> None:
    """Stale files of every target in the folder are removed; those of running writers are not."""
    target, other = folder / writer.file, folder / "other.pt"
    writer.save(target, 1)

    def die(path: Path) -> None:
        with atomic_write(path) as unfinished:
            unfinished.write_bytes(bytes(100_000))
            os.kill(os.getpid(), signal.SIGKILL)

    def leave(path: Path) -> None:
        os.waitpid(fork(functools.partial(die, path)), 0)

    leave(target)
    assert len(names_in(folder)) == 2
    with atomic_write(other) as unfinished:
        living = unfinished.parent.name
        assert names_in(folder) == {target.name, living}
        leave(folder / "third.pt")
        assert len(names_in(folder)) == 3
        writer.save(target, 2)
        assert names_in(folder) == {target.name, living}
        unfinished.write_bytes(b"whole")
    assert other.read_bytes() == b"whole"
    other.unlink()
    check(writer, target, 2)


# The last calls of these are those that clean up.
_MAY_LEAVE: Final = {"unlink", "close", "open", "stat"}


def failing_once(kind: str, writer: Writer, folder: Path, count: int) -> str | None:
    """The save succeeds, or raises an OSError with the number and the path; no file is lost."""
    if not failing_calls.is_loaded():
        raise NotPossible("no compiler")
    target = folder / writer.file
    writer.save(target, 1)
    failing_calls.arm(folder, kind, 0, 0)
    writer.save(target, 1)
    calls = failing_calls.disarm(kind)
    for nth in range(1, min(calls, 40) + 1):
        for number in (errno.EIO, errno.ESTALE, errno.ENOSPC):
            writer.save(target, 1)
            previous = target.stat().st_ino
            found: BaseException | None = None
            failing_calls.arm(folder, kind, nth, number)
            try:
                writer.save(target, 2)
            except BaseException as error:
                found = error
            failing_calls.disarm(kind)

            where = f"call {nth} of {calls}, {errno.errorcode[number]}: {found!r}"
            assert writer.load(target) in ({1, 2} if found else {2}), where
            assert found or target.stat().st_ino != previous, f"{where}: written in place"
            # Path.mkdir(exist_ok=True) of Python 3.14.
            hidden = sys.version_info >= (3, 14) and isinstance(found, FileExistsError)
            if found is not None and writer.name != "average":
                assert isinstance(found, OSError), where
                assert found.errno in {number, errno.EIO} or hidden, where
                assert found.filename in {str(target), str(folder)}, f"{where}, {found.filename!r}"
            if kind not in _MAY_LEAVE:
                assert names_in(folder) == {target.name}, f"{where}: {names_in(folder)}"
    writer.save(target, 3)
    check(writer, target, 3)
    return f"{calls} calls"


for _kind in failing_calls.CALLS:
    _name = f"{_kind}_fails_once"
    _run = functools.partial(failing_once, _kind)
    FAULTS[_name] = Fault(_name, _run)
