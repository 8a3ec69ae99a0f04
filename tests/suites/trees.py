"""The trees that suites run in: downloaded and unpacked."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.suites.libraries import Library


def archive(library: Library, folder: Path) -> Path:
    """Return the source distribution, downloaded unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{library.name.replace('-', '_')}-{library.version}.tar.gz"
    if not (folder / pattern).exists():
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        wanted = ("--no-binary", library.name, f"{library.name}=={library.version}")
        subprocess.run([*pip, "--dest", folder, *wanted], check=True)
    return folder / pattern


def unpack(library: Library, folder: Path) -> Path:
    """Return the tree of a library, unpacked anew."""
    parent = folder / library.name
    shutil.rmtree(parent, ignore_errors=True)
    tree = parent / "tree"
    with tarfile.open(archive(library, folder / "archives")) as packed:
        packed.extractall(tree, filter="data")
    (top,) = tree.iterdir()
    return top
