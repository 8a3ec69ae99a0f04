"""Files that are written whole or not at all; imports nothing of modkit."""

import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Generator[Path]:
    """Give the path of a new file, which takes the place of ``path`` when the block ends well.

    The new file has the same name, in a folder of its own beside ``path``: torch writes the name of a
    file into it, so the name under which it is written has to be the one that it gets. Whoever reads
    ``path`` meanwhile finds what it held before, and so does everybody after an error. A link keeps
    pointing to where it points, and a file that is replaced hands on its permissions.

    Args:
        path: Where the file goes; its folder has to be there.

    Raises:
        FileNotFoundError: The folder is not there, or the block has written no file.
        IsADirectoryError: ``path`` is a folder.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with atomic_write(path) as unfinished:
        ...     _ = unfinished.write_text("all of it")
        >>> path.read_text()
        'all of it'
    """
    final = Path(os.path.realpath(path))
    if final.is_dir():
        raise IsADirectoryError(f"{path} is a folder, so no file can take its place")
    folder = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.", suffix=".tmp"))
    unfinished = folder / final.name
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        if final.exists():
            unfinished.chmod(stat.S_IMODE(final.stat().st_mode))
        unfinished.replace(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
