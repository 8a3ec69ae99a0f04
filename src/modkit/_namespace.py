"""The public face: public paths and help of objects, and the namespaces that mirror torch's.

``modkit.nn`` and ``modkit.jit`` are views: they have the attributes of the torch module of the same
name, live, except for modkit's own names. Every other module below them is torch's under an alias.
"""

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, Final


OwnNames = Mapping[str, object]


def publish(path: str, *objects: object) -> None:
    """Set ``__module__`` of modkit's classes, their methods and functions to the public ``path``.

    Those that torch has at the same path, such as ``torch.nn.Module.to``, get torch's docstring.
    """
    _publish(path, sys.modules.get(_torch_name(path)), objects)


def _publish(path: str, torch_owner: object, objects: Iterable[object]) -> None:
    """Publish members of a module or class; ``torch_owner`` is that of torch, or None."""
    for value in objects:
        # Class methods and static methods are objects around a function.
        function: Any = getattr(value, "__func__", value)
        if not isinstance(function, (type, types.FunctionType)):
            continue

        replaced = getattr(torch_owner, function.__name__, None) if torch_owner else None
        # Objects that modkit takes over from torch as they are keep their path.
        if function.__module__.partition(".")[0] == "modkit":
            function.__module__ = path
            _show_docstring_of(replaced, function)

        if isinstance(value, type) and value.__module__ == path:
            if "__firstlineno__" in vars(value):
                # Python 3.13 would show that line of the public module as the source of the class.
                delattr(value, "__firstlineno__")
            _publish(path, replaced, (m for m in vars(value).values() if not isinstance(m, type)))


# The beginning of the part of a docstring that says what differs from torch.
_DIFFERENCE: Final = "\n\nmodkit: "


def _show_docstring_of(replaced: object, function: Any) -> None:
    """Put torch's docstring in the place of our own up to the part that says what differs.

    In the source, a docstring stands alone: what comes before that part is torch's in short. An
    object without a docstring of torch, as all are with ``python -OO``, keeps its own.
    """
    if replaced is not None and replaced.__doc__:
        _, start, difference = inspect.cleandoc(function.__doc__ or "").partition(_DIFFERENCE)
        function.__doc__ = inspect.cleandoc(replaced.__doc__) + start + difference


def publish_all(namespace: dict[str, Any]) -> None:
    """Publish the names in a module's ``__all__``, and let ``dir()`` list nothing else."""
    names = namespace["__all__"]
    publish(namespace["__name__"], *(namespace.get(name) for name in names))
    dunders = [name for name in namespace if name.startswith("__") and name.endswith("__")]
    namespace["__dir__"] = lambda: sorted({*names, *dunders})


def _torch_name(name: str) -> str:
    """Return the name of torch's module for one of modkit."""
    return "torch" + name.removeprefix("modkit")


class _View(types.ModuleType):
    """A module that reads and assigns the attributes of the torch module of the same name.

    Of its own, it has modkit's names, the views below it, the files of its folder, and dunders.
    """

    __own__: frozenset[str]
    # Names of torch that the type has a property for.
    __mirrored__: set[str]

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        # Scripts look layers up by name or walk them: `[v for k, v in nn.__dict__.items() if "Norm"
        # in k]`. Attributes are read through the properties, which come before these entries.
        entries: dict[str, Any] = _dict_of_module(self)
        source = sys.modules[_torch_name(self.__name__)]
        mirrored = self.__mirrored__
        for name, value in vars(source).items():
            if name not in mirrored and (name in entries or name.startswith("__")):
                continue
            entries[name] = value
            if name not in mirrored:
                _mirror_name(type(self), source, name)
        for name in mirrored - vars(source).keys():
            entries.pop(name, None)
        return entries

    def __getattr__(self, name: str) -> Any:
        source = sys.modules[_torch_name(self.__name__)]
        if name == "__all__":
            # Without it, `from modkit.nn import *` binds only names in the view's own dict.
            return getattr(source, name, [public for public in dir(source) if public[0] != "_"])
        # Special names such as __path__ say what the module itself is, also when it lacks them.
        if name.startswith("__") or not hasattr(source, name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name, value):
            super().__setattr__(name, value)
        else:
            setattr(sys.modules[_torch_name(self.__name__)], name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name, _dict_of_module(self).get(name)):
            super().__delattr__(name)
        else:
            delattr(sys.modules[_torch_name(self.__name__)], name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # By reference: functions and classes that a pickler writes by value read the name ``nn``.
        # It knows modules of exactly one type, and cannot write one of another.
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*dir(sys.modules[_torch_name(self.__name__)]), *self.__own__})

    def _is_own(self, name: str, value: object) -> bool:
        # The import system enters each submodule in its package; torch's are there already.
        own_submodule = f"{self.__name__}.{name}"
        return (
            name in self.__own__
            or name.startswith("__")
            or (isinstance(value, types.ModuleType) and value.__name__ == own_submodule)
        )


_dict_of_module: Final[Any] = inspect.getattr_static(types.ModuleType, "__dict__").__get__


def _mirror_name(view: type[_View], source: types.ModuleType, name: str) -> None:
    """Give a type of view a property for a name: ``__getattr__`` takes ten times as long."""
    # It reads at each access, because attributes of torch may be replaced.
    setattr(view, name, property(lambda _: getattr(source, name)))
    view.__mirrored__.add(name)


class _Finder(MetaPathFinder, Loader):
    """Finds ``modkit.nn.X`` where ``torch.nn.X`` is; consulted for names below one root only.

    It stands first in ``sys.meta_path``: below an alias, such as ``modkit.nn.utils``, Python's own
    finder would find the file of torch and load it a second time.

    Args:
        root: The package that is a view, ``modkit.nn`` for instance.
        views: The names of its modules that are views, each with modkit's own names.
    """

    def __init__(self, root: str, views: Mapping[str, OwnNames]) -> None:
        self._root = root
        self._views = views

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of torch's; None for a file of modkit."""
        # Files of modkit are found by Python: they are in the folder of the root, not below
        # aliases.
        if not fullname.startswith(f"{self._root}.") or (
            path is sys.modules[self._root].__path__
            and PathFinder.find_spec(fullname, path) is not None
        ):
            return None

        try:
            spec = importlib.util.find_spec(_torch_name(fullname))
        # find_spec() imports the parents of a module, and one of them does not exist.
        except ModuleNotFoundError:
            return None
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=spec.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """Let Python create the module that becomes a view, or is discarded."""
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Turn a new module into a view, or replace it by torch's module."""
        name = module.__name__
        source = importlib.import_module(_torch_name(name))
        if name in self._views:
            self.become_view(module, source)
        else:
            # The import system returns what it finds here, and not the module that it created.
            sys.modules[name] = source
        self.name_loaded_modules()

    def name_loaded_modules(self) -> None:
        """Enter all loaded modules below torch's root under modkit's names, too.

        The import system does not search for them then. After a search it enters the file in its
        package, which would replace a function of the same name, as ``torch.nn.utils.weight_norm``.
        """
        # A copy, because another thread may be importing.
        for name, module in tuple(sys.modules.items()):
            if name.startswith(f"{_torch_name(self._root)}."):
                ours = "modkit" + name.removeprefix("torch")
                if ours not in self._views:
                    sys.modules.setdefault(ours, module)

    def become_view(self, module: types.ModuleType, source: types.ModuleType) -> None:
        """Make a module show one of torch, and import the views below it."""
        own_names = self._views[module.__name__]
        vars(module).update(own_names)

        parents = [name.rpartition(".") for name in self._views]
        below = [name for parent, _, name in parents if parent == module.__name__]
        module.__doc__ = module.__doc__ or source.__doc__
        # The module itself stays, since it may have been imported before it is a view.
        names = {"__own__": frozenset(own_names), "__mirrored__": set()}
        module.__class__ = type("Namespace", (_View,), names)
        for name in below:
            importlib.import_module(f"{module.__name__}.{name}")
        vars(module)  # mirrors all names


def mirror(root: str, views: Mapping[str, OwnNames]) -> None:
    """Make a package a view of torch's package of that name.

    This changes nothing of torch. It adds a finder to ``sys.meta_path``, and enters the loaded
    modules of torch in ``sys.modules`` under modkit's names.
    """
    finder = _Finder(root, views)
    sys.meta_path.insert(0, finder)
    finder.become_view(sys.modules[root], importlib.import_module(_torch_name(root)))
    finder.name_loaded_modules()
