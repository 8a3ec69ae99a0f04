"""``modkit.nn``, ``modkit.nn.modules`` and ``modkit.nn.modules.module`` as views of torch's modules.

Each of the three shows the attributes of the torch module of the same name, live, and has
``Module`` of its own. Every other module below ``modkit.nn`` is torch's module under a second name.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, Final


_OURS: Final = "modkit.nn"
_VIEWS: Final = (_OURS, f"{_OURS}.modules", f"{_OURS}.modules.module")


def _torch_name(name: str) -> str:
    return "torch" + name.removeprefix("modkit")


class _View(types.ModuleType):
    """A module that reads and assigns the attributes of the torch module of the same name.

    What is in the view's own ``__dict__`` is its own: ``Module``, the views below it, the files of
    ``modkit/nn``, and what Python gives to every module.
    """

    def __getattr__(self, name: str) -> Any:
        source = sys.modules[_torch_name(self.__name__)]
        if name == "__all__":
            # Without it, `from modkit.nn import *` binds what is in the view's own dict alone.
            return getattr(source, name, [public for public in dir(source) if public[0] != "_"])
        if name.startswith("__") or not hasattr(source, name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name, value):
            super().__setattr__(name, value)
        else:
            setattr(sys.modules[_torch_name(self.__name__)], name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(sys.modules[_torch_name(self.__name__)], name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(sys.modules[_torch_name(self.__name__)]), "Module"})

    def _is_own(self, name: str, value: object) -> bool:
        # The import system enters each submodule in its package. Those that are torch's are there.
        own_submodule = f"{self.__name__}.{name}"
        return (
            name == "Module"
            or name.startswith("__")
            or (isinstance(value, types.ModuleType) and value.__name__ == own_submodule)
        )


def _reader(source: types.ModuleType, name: str) -> Callable[[object], Any]:
    return lambda _: getattr(source, name)


def _view_type(source: types.ModuleType, own: Sequence[str]) -> type[_View]:
    """Return a type of view that reads the names that ``source`` has now in a tenth of the time.

    ``__getattr__`` alone comes after an AttributeError, which takes longer than most layers do.
    """
    names = [name for name in vars(source) if not name.startswith("__") and name not in own]
    readers = {name: property(_reader(source, name)) for name in names}
    return type("Namespace", (_View,), readers)


class _Finder(MetaPathFinder, Loader):
    """Finds ``modkit.nn.X`` where ``torch.nn.X`` is; consulted for names below ``modkit.nn`` only."""

    def __init__(self, module_class: type) -> None:
        self._module_class = module_class

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of torch's; None for the files of ``modkit/nn``."""
        if not fullname.startswith(f"{_OURS}.") or (
            path is sys.modules[_OURS].__path__ and PathFinder.find_spec(fullname, path) is not None
        ):
            return None
        try:
            found = importlib.util.find_spec(_torch_name(fullname))
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=package)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """Leave it to Python to make the module that becomes a view, or is thrown away."""
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Turn ``module`` into a view, or enter torch's module in its place."""
        name = module.__name__
        source = importlib.import_module(_torch_name(name))
        if name in _VIEWS:
            _become_view(module, source, self._module_class)
        else:
            sys.modules[name] = source
        _name_loaded_modules()


def _name_loaded_modules() -> None:
    """Enter all modules of ``torch.nn`` that are loaded under modkit's names, too.

    What stands there already is not searched for. That matters where a package shows a function in
    the place of the file of the same name, ``torch.nn.utils.weight_norm`` for instance: after a
    search, the import system enters the file in its package, in the place of the function.
    """
    for name, module in tuple(sys.modules.items()):
        if name.startswith("torch.nn."):
            ours = "modkit" + name.removeprefix("torch")
            if ours not in _VIEWS:
                sys.modules.setdefault(ours, module)


def _become_view(module: types.ModuleType, source: types.ModuleType, module_class: type) -> None:
    own = {"Module": module_class}
    vars(module).update(own)
    below = [
        name.rpartition(".")[2] for name in _VIEWS if name.rpartition(".")[0] == module.__name__
    ]
    module.__doc__ = module.__doc__ or source.__doc__
    module.__class__ = _view_type(source, [*own, *below, *vars(module)])
    for name in below:
        importlib.import_module(f"{module.__name__}.{name}")


def mirror_torch_nn(module_class: type) -> None:
    """Make ``modkit.nn`` a view of ``torch.nn``, with ``module_class`` as its ``Module``."""
    sys.meta_path.insert(0, _Finder(module_class))
    _become_view(sys.modules[_OURS], importlib.import_module("torch.nn"), module_class)
    _name_loaded_modules()
