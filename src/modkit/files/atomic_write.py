"""Atomic writes: a file is complete under its name, or not there."""

import errno
import os
import shutil
import tempfile
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


@contextmanager
def atomic_write(path: Path) -> Generator[Path]:
    """Yield a path of the same name in a private folder; the file there replaces ``path`` at the end."""
    final = path.resolve()
    replaces = final.is_file() or not final.exists()
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryDirectory(
        prefix=".modkit-", suffix=".tmp", dir=final.parent if replaces else None
    ) as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        if replaces:
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
            unfinished.replace(final)
        else:
            with unfinished.open("rb") as file, final.open("wb") as target:
                shutil.copyfileobj(file, target)
