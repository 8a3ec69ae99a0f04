"""The public face: public paths of objects, and the namespaces that mirror torch's.

``modkit.nn`` and ``modkit.jit`` are views. A view has the attributes of the torch module of the same name, live, except for the names that are
modkit's. Every other module below it is torch's module under a second name.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


OwnNames = Mapping[str, object]


def publish(path: str, *objects: object) -> None:
    """Set ``__module__`` of modkit's classes, their methods and functions to the public ``path``."""
    for value in objects:
        function = getattr(value, "__func__", value)
        if isinstance(function, (type, types.FunctionType)) and (
            function.__module__.partition(".")[0] == "modkit"
        ):
            function.__module__ = path
        if isinstance(value, type) and value.__module__ == path:
            if "__firstlineno__" in vars(value):
                # Python 3.13 would show that line of the public module as the source of the class.
                delattr(value, "__firstlineno__")
            publish(path, *(m for m in vars(value).values() if not isinstance(m, type)))


def publish_all(namespace: dict[str, Any]) -> None:
    """Publish what a module's ``__all__`` names, and let ``dir()`` list nothing else.

    Args:
        namespace: ``globals()`` of the module, at its end. Names that are imported lazily may be
            missing.
    """
    names = namespace["__all__"]
    publish(namespace["__name__"], *(namespace.get(name) for name in names))
    dunders = [name for name in namespace if name.startswith("__") and name.endswith("__")]
    namespace["__dir__"] = lambda: sorted({*names, *dunders})


def _torch_name(name: str) -> str:
    return "torch" + name.removeprefix("modkit")


class _View(types.ModuleType):
    """A module that reads and assigns the attributes of the torch module of the same name.

    The view's own ``__dict__`` holds the names that are modkit's, the views below it, the files of
    its folder, and what Python gives to every module.
    """

    __own__: frozenset[str]

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
        return sorted({*dir(sys.modules[_torch_name(self.__name__)]), *self.__own__})

    def _is_own(self, name: str, value: object) -> bool:
        # The import system enters each submodule in its package. Those that are torch's are there.
        own_submodule = f"{self.__name__}.{name}"
        return (
            name in self.__own__
            or name.startswith("__")
            or (isinstance(value, types.ModuleType) and value.__name__ == own_submodule)
        )


def _reader(source: types.ModuleType, name: str) -> Callable[[object], Any]:
    return lambda _: getattr(source, name)


def _view_type(source: types.ModuleType, own: OwnNames, kept: Sequence[str]) -> type[_View]:
    """Return a type of view that reads the names that ``source`` has now in a tenth of the time.

    ``__getattr__`` alone comes after an AttributeError, which takes longer than most layers do.
    """
    names = [name for name in vars(source) if not name.startswith("__") and name not in kept]
    readers = {name: property(_reader(source, name)) for name in names}
    return type("Namespace", (_View,), {**readers, "__own__": frozenset(own)})


class _Finder(MetaPathFinder, Loader):
    """Finds ``modkit.nn.X`` where ``torch.nn.X`` is; consulted for names below one root only."""

    def __init__(self, root: str, views: Mapping[str, OwnNames]) -> None:
        self._root = root
        self._views = views

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of torch's; None for a file of modkit."""
        if not fullname.startswith(f"{self._root}.") or (
            path is sys.modules[self._root].__path__
            and PathFinder.find_spec(fullname, path) is not None
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
        if name in self._views:
            self.become_view(module, source)
        else:
            sys.modules[name] = source
        self.name_loaded_modules()

    def name_loaded_modules(self) -> None:
        """Enter all modules below torch's root that are loaded under modkit's names, too.

        What stands there already is not searched for. That matters where a package shows a function
        in the place of the file of the same name, ``torch.nn.utils.weight_norm`` for instance: after
        a search, the import system enters the file in its package, in the place of the function.
        """
        for name, module in tuple(sys.modules.items()):
            if name.startswith(f"{_torch_name(self._root)}."):
                ours = "modkit" + name.removeprefix("torch")
                if ours not in self._views:
                    sys.modules.setdefault(ours, module)

    def become_view(self, module: types.ModuleType, source: types.ModuleType) -> None:
        """Make ``module`` show ``source``, and import the views below it."""
        own = self._views[module.__name__]
        vars(module).update(own)
        parents = [name.rpartition(".") for name in self._views]
        below = [name for parent, _, name in parents if parent == module.__name__]
        module.__doc__ = module.__doc__ or source.__doc__
        module.__class__ = _view_type(source, own, [*own, *below, *vars(module)])
        for name in below:
            importlib.import_module(f"{module.__name__}.{name}")


def mirror(root: str, views: Mapping[str, OwnNames]) -> None:
    """Make the package ``root`` a view of the package of torch of the same name.

    Args:
        root: Name of the package, such as ``modkit.nn``; it is being imported.
        views: The names that are modkit's, for the package and for each module below it that has
            some. All other modules below it are torch's.
    """
    finder = _Finder(root, views)
    sys.meta_path.insert(0, finder)
    finder.become_view(sys.modules[root], importlib.import_module(_torch_name(root)))
    finder.name_loaded_modules()
