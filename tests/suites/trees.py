"""The trees that suites run in: downloaded and unpacked."""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.suites.libraries import Library


def archive(library: Library, folder: Path) -> Path:
    """Return the archive of a library with its tests, downloaded unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if library.repository:
        target = folder / f"{library.repository.replace('/', '-')}.tar.gz"
        if not target.exists():
            download_repository(library.repository, target)
        return target

    # Some projects name their distribution with a dash, some with an underscore.
    pattern = f"{library.name.replace('-', '?')}-{library.version}.tar.gz"
    if not any(folder.glob(pattern)):
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        wanted = ("--no-binary", library.name, f"{library.name}=={library.version}")
        subprocess.run([*pip, "--dest", folder, *wanted], check=True)
    return next(folder.glob(pattern))


def download_repository(repository: str, target: Path) -> None:
    """Write the archive of ``owner/name@revision``."""
    path, _, revision = repository.partition("@")
    with tempfile.TemporaryDirectory() as clone:
        git = ("git", "-C", clone)
        origin = f"https://github.com/{path}"
        subprocess.run([*git, "init", "--quiet"], check=True)
        subprocess.run([*git, "fetch", "--quiet", "--depth=1", origin, revision], check=True)
        packed = ("--prefix=tree/", "--output", target.resolve())
        subprocess.run([*git, "archive", *packed, "FETCH_HEAD"], check=True)


def unpack(library: Library, folder: Path) -> Path:
    """Return the tree of a library, unpacked anew."""
    parent = folder / library.name
    shutil.rmtree(parent, ignore_errors=True)
    tree = parent / "tree"
    with tarfile.open(archive(library, folder / "archives")) as packed:
        packed.extractall(tree, filter="data")
    (top,) = tree.iterdir()
    for package in library.packages:
        # The installed one is imported, which is built.
        shutil.rmtree(top / package.partition(".")[0], ignore_errors=True)
    return top
