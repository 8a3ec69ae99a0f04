"""Files that are written whole or not at all, and the optional libraries that read some of them."""

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def library(name: str) -> Any:
    """Import a part of safetensors, which modkit does not depend on."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("files in the format safetensors need the package safetensors") from error
