"""Processes forked from one that has imported torch, since the import takes longer than most tests."""

import atexit
import ctypes
import gc
import io
import os
import re
import subprocess
import sys
import tempfile
import types
import weakref
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import Any


# Without modkit: tests inspect the effects of importing it.
PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
]
METHOD = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"


def context() -> Any:
    """Return a context of multiprocessing whose processes start quickly."""
    found = get_context(METHOD)
    if METHOD == "forkserver":
        found.set_forkserver_preload(PRELOADED)
    return found


def python(
    code: str | Path,
    *arguments: object,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    stdout: str | Path | None = None,
    timeout: float = 120.0,
    finalize: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run code, or a script, as the main module of another process, and return what it printed.

    Args:
        code: The code, or the path of a script.
        *arguments: `sys.argv` from the second entry on.
        stdin: What it reads.
        env: Environment variables, in addition to those of this process.
        stdout: A file for its output, which is captured by default.
        timeout: Seconds after which it is killed.
        finalize: Whether code that runs to its end, or calls `sys.exit()` with a number, is followed
            by the exit of an interpreter, which flushes its output, clears modules, and prints what
            fails then. It takes about half a second.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "0").write_bytes(stdin)
        files = [f"{folder}/0", str(stdout or f"{folder}/1"), f"{folder}/2"]
        line = [str(code) if isinstance(code, Path) else "-c", *map(str, arguments)]
        environment = {**os.environ, **(env or {})}
        process = context().Process(
            target=_main, args=(code, line, files, environment, Path.cwd(), finalize)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        printed = [Path(file).read_text() if file.startswith(folder) else "" for file in files[1:]]
        # Triton, a part of torch's builds for CUDA, reports its own leaks as an interpreter ends, up to
        # the limit that a test sets for files.
        printed[1] = re.sub(r"nanobind: leaked[\s\S]*(refleaks\.html\n?|\Z)", "", printed[1])
        return subprocess.CompletedProcess(line, process.exitcode, *printed)


def _main(
    code: str | Path,
    line: list[str],
    files: list[str],
    environment: dict[str, str],
    folder: Path,
    finalize: bool,
) -> None:
    """Run in the other process."""
    for number, file in enumerate(files):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        os.dup2(os.open(file, flags, 0o600), number)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.argv = line
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Collections would look at all objects of the modules that are preloaded.
    gc.freeze()
    if finalize:
        # From Python 3.13 on, a process of multiprocessing begins without the functions that run at
        # exit. Torch's finalizers, which run there, would fail once its modules are cleared.
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    source = code.read_text(encoding="utf-8") if isinstance(code, Path) else code
    status = 0
    try:
        _run_as_main(source, line[0])
    except SystemExit as end:
        if not finalize:
            raise
        status = int(end.code or 0)
    if finalize:
        # Processes of multiprocessing end without clearing their modules.
        ctypes.pythonapi.Py_Exit(status)


def _run_as_main(source: str, file: str) -> None:
    """Run code in a new main module, which nothing else holds afterwards."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if file != "-c":
        main.__file__ = file
    exec(compile(source, file, "exec"), vars(main))


def peak_of_command(arguments: list[str]) -> int:
    """Return the bytes of memory that a command needs above what its imports take.

    Pages of mapped files do not count: the system takes them back when memory is short.

    Args:
        arguments: The command line after ``modkit``; the command may end with any status.
    """
    code = (
        "import torch, safetensors, threading, time, click\n"
        "import modkit.cli._commands as c\n"
        "def now():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return sum(int(l.split()[1]) for l in lines if l.startswith(('RssAnon', 'RssShmem')))\n"
        "peak = before = now(); done = False\n"
        "def watch():\n"
        "    global peak\n"
        "    while not done:\n"
        "        peak = max(peak, now()); time.sleep(0.002)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        f"c.commands({arguments!r}, standalone_mode=False)\n"
        "done = True; thread.join(); print(peak - before)"
    )
    found = python(code)
    assert found.returncode == 0, found.stderr
    return int(found.stdout.splitlines()[-1]) * 1024
