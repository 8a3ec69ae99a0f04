"""Imports with modkit in place of ``torch.nn``, for chosen packages and folders.

No file is written.
"""

from __future__ import annotations

import importlib.util
import io
import tokenize
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from modkit.compat.swap import swap_source


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

# Installed libraries may lie inside a project, in a virtual environment of its own.
_INSTALLED: Final = {"site-packages", "dist-packages"}
# Both sides run on torch, whose layers are also modkit's.
_NEVER: Final = {"torch", "modkit"}
# Holds the options of a run as JSON, so that the workers of pytest-xdist have them before they
# import the first ``conftest.py``.
VARIABLE: Final = "MODKIT_COMPAT"
# A misspelled package would be compared with itself.
UNTOUCHED: Final = "none of its modules was imported, or none uses torch.nn, so it was not compared"


def untouched(packages: Iterable[str], swapped: Iterable[str]) -> list[str]:
    """Return the packages of which no module was rewritten."""
    names = [f"{name}." for name in swapped]
    return [p for p in packages if not any(name.startswith(f"{p}.") for name in names)]


class Options(NamedTuple):
    """Options of one run: where outcomes are written, and what imports modkit instead of torch."""

    outcomes: str
    packages: Sequence[str] = ()
    paths: Sequence[str] = ()


class SwappedImports:
    """Imports of some modules with modkit in place of ``torch.nn``.

    Args:
        packages: Names of packages whose modules are rewritten, wherever they are installed.
        paths: Folders and files whose modules are rewritten, except libraries that are installed
            in a virtual environment below them.
        report: Called with the name of each module that the rewriting changed.
    """

    def __init__(
        self,
        packages: Collection[str] = (),
        paths: Collection[Path] = (),
        report: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._packages = set(packages) - _NEVER
        self._paths = {path.resolve() for path in paths}
        self._report = report

    def install(self) -> Callable[[], None]:
        """Rewrite the modules that this process imports from now on.

        The source is rewritten where Python's loader reads it. Type checkers such as typeguard,
        jaxtyping and beartype have loaders that derive from it, and tests load scripts with
        ``importlib.util.spec_from_file_location``: no finder sees these.
        """
        get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

        def swapped_data(loader: SourceFileLoader, path: str) -> bytes:
            data = get_data(loader, path)
            return self._swapped(loader.name, data) if self.rewrites(loader.name, path) else data

        def swapped_stats(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
            # Without them, Python neither reads nor writes bytecode: it is of the original source.
            if self.rewrites(loader.name, path):
                raise OSError(path)
            return path_stats(loader, path)

        def replace(data: Any, stats: Any) -> None:
            SourceFileLoader.get_data = data  # type: ignore[method-assign]
            SourceFileLoader.path_stats = stats  # type: ignore[method-assign]

        replace(swapped_data, swapped_stats)
        return lambda: replace(get_data, path_stats)

    def _swapped(self, name: str, data: bytes) -> bytes:
        """Return the rewritten source of a module, in its encoding."""
        try:
            source = importlib.util.decode_source(data)
            # Python warns when it compiles the source, with the name of the file.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                swapped = swap_source(source)
        # Python raises this again, with the name of the file.
        except (SyntaxError, ValueError):
            return data

        if swapped == source:
            return data
        self._report(name)
        return swapped.encode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])

    def rewrites(self, name: str, path: str) -> bool:
        """Return True if a module is rewritten."""
        if not path.endswith(".py"):
            return False
        if any(f"{name}.".startswith(f"{package}.") for package in self._packages):
            return True
        # Torch's own test models can be named, torch as a whole cannot.
        if name.partition(".")[0] in _NEVER:
            return False

        file = Path(path).resolve()
        for folder in self._paths:
            if file == folder or folder in file.parents:
                return not _INSTALLED.intersection(file.relative_to(folder).parts)
        return False
