"""Calls of the operating system on files in one folder, of which one fails once.

A small library in C, loaded before the C library, counts them in Python and in torch's C++ alike.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any


# Kinds of calls: the type of the result, the function, its parameters, its arguments, the file.
CALLS = {
    "write": [
        ("ssize_t", "write", "int f, const void *b, size_t n", "f, b, n", "of(f)"),
        ("ssize_t", "writev", "int f, const struct iovec *v, int n", "f, v, n", "of(f)"),
    ],
    "read": [
        ("ssize_t", "pread64", "int f, void *b, size_t n, off64_t o", "f, b, n, o", "of(f)"),
        (
            "ssize_t",
            "preadv",
            "int f, const struct iovec *v, int n, off_t o",
            "f, v, n, o",
            "of(f)",
        ),
    ],
    "fsync": [("int", "fsync", "int f", "f", "of(f)")],
    "rename": [("int", "rename", "const char *p, const char *q", "p, q", "at(-100, p)")],
    "close": [("int", "close", "int f", "f", "of(f)")],
    "open": [
        ("int", "open64", "const char *p, int o, mode_t m", "p, o, m", "at(-100, p)"),
        ("int", "openat64", "int d, const char *p, int o, mode_t m", "d, p, o, m", "at(d, p)"),
        ("FILE *", "fopen64", "const char *p, const char *m", "p, m", "at(-100, p)"),
        ("FILE *", "fopen", "const char *p, const char *m", "p, m", "at(-100, p)"),
    ],
    "mkdir": [("int", "mkdir", "const char *p, mode_t m", "p, m", "at(-100, p)")],
    "chmod": [
        ("int", "chmod", "const char *p, mode_t m", "p, m", "at(-100, p)"),
        ("int", "fchmodat", "int d, const char *p, mode_t m, int o", "d, p, m, o", "at(d, p)"),
    ],
    "chown": [("int", "chown", "const char *p, uid_t u, gid_t g", "p, u, g", "at(-100, p)")],
    "unlink": [
        ("int", "unlink", "const char *p", "p", "at(-100, p)"),
        ("int", "unlinkat", "int d, const char *p, int o", "d, p, o", "at(d, p)"),
        ("int", "rmdir", "const char *p", "p", "at(-100, p)"),
    ],
    "flock": [("int", "flock", "int f, int o", "f, o", "of(f)")],
    "stat": [
        ("int", "stat64", "const char *p, struct stat64 *s", "p, s", "at(-100, p)"),
        (
            "int",
            "fstatat64",
            "int d, const char *p, struct stat64 *s, int o",
            "d, p, s, o",
            "at(d, p)",
        ),
    ],
}
_HEAD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <sys/types.h>
struct iovec;
struct stat64;
static char folder[4096];
static int armed, chosen, number;
static long nth, counts[99];
void arm_calls(const char *name, int kind, long n, int error) {
    strcpy(folder, name); memset(counts, 0, sizeof counts);
    chosen = kind; nth = n; number = error; armed = 1;
}
long disarm_calls(int kind) { armed = 0; return counts[kind]; }
static int at(int directory, const char *path) {
    char link[64], found[4096];
    if (!armed) return 0;
    if (path && path[0] == '/') return !strncmp(path, folder, strlen(folder));
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t size = readlink(link, found, sizeof found - 1);
    return size > 0 && !strncmp(found, folder, strlen(folder));
}
static int of(int file) { return at(file, 0); }
static int fails(int kind, int is_inside) {
    if (!is_inside || ++counts[kind] != nth || kind != chosen) return 0;
    errno = number;
    return 1;
}
"""


def _function(kind: int, call: tuple[str, str, str, str, str]) -> str:
    result, name, parameters, arguments, file = call
    failure = "0" if "*" in result else "-1"
    types = ", ".join(
        part.rsplit(" ", 1)[0] + " *" * ("*" in part) for part in parameters.split(",")
    )
    # Linux closes a file also if it reports an error.
    before = "real(f); " if name == "close" else ""
    return (
        f"{result} {name}({parameters}) {{ static {result} (*real)({types});"
        f' if (!real) real = ({result} (*)({types}))dlsym(RTLD_NEXT, "{name}");'
        f" int inside = {file}; if (fails({kind}, inside)) {{ {before}errno = number; return {failure}; }}"
        f" return real({arguments}); }}\n"
    )


@functools.cache
def library() -> Path | None:
    """Compile the library; return None without a compiler or on another system."""
    compiler = shutil.which("cc")
    if compiler is None or not Path("/proc/self/fd").exists():
        return None
    folder = Path(tempfile.mkdtemp(prefix="modkit-calls-"))
    source = folder / "calls.c"
    kinds = enumerate(CALLS.values())
    source.write_text(_HEAD + "".join(_function(n, call) for n, calls in kinds for call in calls))
    built = folder / "calls.so"
    command = [compiler, "-shared", "-fPIC", "-w", "-o", str(built), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, check=False)
    return built if done.returncode == 0 else None


def arm(folder: Path, kind: str, nth: int, number: int) -> None:
    """Let the nth call of a kind fail with an error number; 0 to count calls only."""
    _loaded().arm_calls(os.fsencode(folder), [*CALLS].index(kind), ctypes.c_long(nth), number)


def disarm(kind: str) -> int:
    """Let all calls work again; return how many there were of a kind."""
    found: int = _loaded().disarm_calls([*CALLS].index(kind))
    return found


def is_loaded() -> bool:
    """Return True in a process that the library was loaded into."""
    return hasattr(_loaded(), "arm_calls")


@functools.cache
def _loaded() -> Any:
    return ctypes.CDLL(None)
