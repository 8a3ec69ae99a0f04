"""The trees that suites run in: downloaded, unpacked and rewritten."""

import shutil
import subprocess
import sys
import tarfile
import tokenize
from pathlib import Path

from modkit.compat.swap import swap_source
from tests.suites.libraries import Library


# torch: nothing is rewritten. whole: library and tests. user: only the tests.
SIDES = ("torch", "whole", "user")


def archive(library: Library, folder: Path) -> Path:
    """Return the source distribution, downloaded unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{library.name.replace('-', '_')}-{library.version}.tar.gz"
    if not (folder / pattern).exists():
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        wanted = ("--no-binary", library.name, f"{library.name}=={library.version}")
        subprocess.run([*pip, "--dest", folder, *wanted], check=True)
    return folder / pattern


def unpack(library: Library, side: str, folder: Path) -> Path:
    """Return the tree of one side, unpacked and rewritten anew."""
    tree = folder / library.name / side
    shutil.rmtree(tree, ignore_errors=True)
    with tarfile.open(archive(library, folder / "archives")) as packed:
        packed.extractall(tree, filter="data")
    (top,) = tree.iterdir()
    parts = {
        "torch": [],
        "whole": [top],
        "user": [p for each in library.user for p in top.glob(each)],
    }
    for each in parts[side]:
        for file in [each] if each.is_file() else each.rglob("*.py"):
            rewrite(file)
    return top


def rewrite(file: Path) -> None:
    """Make one file use modkit, unless it is not valid Python."""
    with tokenize.open(file) as opened:
        source = opened.read()
    try:
        swapped = swap_source(source)
    except SyntaxError:
        return
    if swapped != source:
        file.write_text(swapped, encoding="utf-8")
