"""Atomic writes: a file is complete under its name, or not there."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Generator[Path]:
    """Give the path of a new file beside ``path``, which takes its place when the block ends well."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
