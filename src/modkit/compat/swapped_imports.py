"""Imports with modkit in place of ``torch.nn``, for chosen packages and folders.

No file is written.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from modkit.compat.swap import swap_source


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from types import CodeType

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
    """Return the packages of which no module was rewritten.

    Args:
        packages: The packages that were to be rewritten.
        swapped: Names of the modules that were.
    """
    names = [f"{name}." for name in swapped]
    return [p for p in packages if not any(name.startswith(f"{p}.") for name in names)]


class Options(NamedTuple):
    """Options of one run: where outcomes are written, and what imports modkit instead of torch."""

    outcomes: str
    packages: Sequence[str] = ()
    paths: Sequence[str] = ()


class _SwappingLoader(SourceFileLoader):
    """Compiles the rewritten source; cached bytecode is that of the original source."""

    def __init__(self, fullname: str, path: str, report: Callable[[str], object]) -> None:
        super().__init__(fullname, path)
        self._report = report

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        swapped = swap_source(source)
        if swapped != source:
            self._report(fullname)
        code: CodeType = compile(swapped, path, "exec", dont_inherit=True)
        return code


class SwappedImports(MetaPathFinder):
    """Finder for ``sys.meta_path`` that imports some modules with modkit in place of ``torch.nn``.

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
        # The names that are being looked up, by thread.
        self._searches: set[tuple[int, str]] = set()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a source file that is rewritten, and None for all other modules."""
        # Torch's own test models can be named, torch as a whole cannot.
        if fullname.partition(".")[0] in _NEVER and not self._is_named(fullname):
            return None

        # A finder that asks all others, as this one does, would ask for ever.
        search = (threading.get_ident(), fullname)
        if search in self._searches:
            return None
        self._searches.add(search)
        try:
            return self._with_loader(self._spec_of_others(fullname, path, target))
        finally:
            self._searches.remove(search)

    def _spec_of_others(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        # The other finders know installed, editable and zipped packages. pytest's finder rewrites
        # assertions from the file, and would not see the rewritten source.
        for finder in sys.meta_path:
            if finder is self or type(finder).__module__.startswith("_pytest."):
                continue
            # Finders for Python 3.3 have another method, and Python leaves them out.
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def _with_loader(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        """Return the spec with the rewriting loader; None if the module is not to be rewritten."""
        if spec is None or type(spec.loader) is not SourceFileLoader or not self._is_chosen(spec):
            return None
        spec.loader = _SwappingLoader(spec.name, spec.loader.path, self._report)
        return spec

    def _is_named(self, fullname: str) -> bool:
        return any(f"{fullname}.".startswith(f"{package}.") for package in self._packages)

    def _is_chosen(self, spec: ModuleSpec) -> bool:
        if self._is_named(spec.name):
            return True

        file = Path(spec.origin or "").resolve()
        for path in self._paths:
            if file == path or path in file.parents:
                return not _INSTALLED.intersection(file.relative_to(path).parts)
        return False
