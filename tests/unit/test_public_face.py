import copy
import importlib
import inspect
import pickle
import types
import typing
from collections.abc import Iterator

import pytest
import torch

import modkit
from tests.cases import for_each
from tests.processes import python


# The names of each public namespace; the two that show torch's names have some of their own.
NAMESPACES = {
    **dict.fromkeys(["modkit", "modkit.distributed", "modkit.errors", "modkit.files"]),
    **dict.fromkeys(["modkit.integrations.lightning", "modkit.integrations.transformers"]),
    **dict.fromkeys(["modkit.models", "modkit.optim", "modkit.optim.swa_utils"]),
    **dict.fromkeys(["modkit.migrations", "modkit.posthoc", "modkit.schedules"]),
    "modkit.nn": ["Module"],
    "modkit.jit": sorted(type(modkit.jit).__own__),
}


def namespace(path: str) -> types.ModuleType:
    """Import a public namespace; skip if it needs a library that is not installed."""
    if path.startswith("modkit.integrations"):
        pytest.importorskip(path.rpartition(".")[2])
    return importlib.import_module(path)


def public_objects(path: str) -> Iterator[tuple[str, object]]:
    """Yield the classes and functions of modkit in a public namespace, by name."""
    module = namespace(path)
    for name in NAMESPACES[path] or module.__all__:
        found = getattr(module, name)
        if isinstance(found, (type, types.FunctionType)) and is_ours(found):
            yield name, found


def is_ours(found: type | types.FunctionType) -> bool:
    """Return False for what torch or the standard library defines."""
    return found.__module__.partition(".")[0] == "modkit"


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions that a class defines, class methods and static methods included."""
    for member in vars(cls).values():
        function = getattr(member, "__func__", member)
        if isinstance(function, types.FunctionType) and is_ours(function):
            yield function


@for_each("path", NAMESPACES)
def test_objects_show_their_public_path(path: str) -> None:
    """The module of each public class, method and function is the one that users import from."""
    for name, found in public_objects(path):
        assert (found.__module__, found.__qualname__) == (path, name)
        members = functions_of(found) if isinstance(found, type) else ()
        assert {member.__module__ for member in members} <= {path}


def test_objects_show_what_they_are() -> None:
    """No address of a function, and no tensor, where a notebook shows an object."""
    model = torch.nn.Linear(1, 1)
    kinds = ["Linear", "CountWarmup(decay=0.999, offset=10.0, min_decay=0.0)"]
    average = f"EMA({', '.join(kinds)}, step=0, n_averaged=0)"
    shown = {
        repr(modkit.EMACallback(model)): f"EMACallback({average}, index=0)",
        repr(modkit.migrations.merge(["q", "k"], "qk")): (
            "Step(kind='merge', old=('q', 'k'), new=('qk',), stacked=False)"
        ),
    }

    assert [*shown] == [*shown.values()]


@for_each("path", NAMESPACES)
def test_dir_lists_public_names_alone(path: str) -> None:
    """``dir()`` of a public namespace shows what is public, or torch's names where it shows those."""
    module = namespace(path)
    listed = {name for name in dir(module) if not name.startswith("__")}

    if NAMESPACES[path] is None:
        assert listed == set(module.__all__)
    else:
        theirs = dir(importlib.import_module(path.replace("modkit", "torch")))
        assert listed == {name for name in theirs if not name.startswith("__")}


@for_each("path", NAMESPACES)
def test_tools_find_public_objects(path: str) -> None:
    """Pickles name the public path, annotations of classes resolve, functions show their source."""
    for _, found in public_objects(path):
        is_class = isinstance(found, type)
        members = [*functions_of(found)] if is_class else [found]

        assert pickle.loads(pickle.dumps(found)) is found
        assert path.encode() in pickle.dumps(found, protocol=0)
        assert not is_class or typing.get_type_hints(found) is not None
        for function in members:
            # Functions that dataclasses generate have no source, in no module.
            if not inspect.unwrap(function).__code__.co_filename.startswith("<"):
                assert inspect.getsource(function)


ERRORS = [
    modkit.errors.FileError("a.pt is corrupt", "torch.save file"),
    modkit.errors.MigrationError("fc was saved in version 3"),
    modkit.errors.NameMismatchError("EMA", missing=["a"], unexpected=["b"], shapes=[]),
]


@for_each("error", ERRORS)
def test_exceptions_are_pickled_and_copied(error: Exception) -> None:
    """A pool of processes sends them to the caller; it breaks, or waits, if one cannot be read."""
    vars(error)["__notes__"] = ["a note"]

    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), vars(other)) == (str(error), vars(error))


def test_old_paths_load() -> None:
    """Pickles that name the file of a class still load."""
    old = b"cmodkit.averaging.ema\nEMA\n."

    assert pickle.loads(old) is modkit.EMA


def test_importing_modkit_does_not_modify_torch() -> None:
    """The names in torch's modules and in ``Module`` stay; modkit adds modules and a finder of its own."""
    code = """
import sys
import torch

def torchs():
    found = {n: dict(vars(m)) for n, m in list(sys.modules.items()) if n.split(".")[0] == "torch"}
    return {**found, "class Module": dict(vars(torch.nn.Module))}

torch.nn.Module.__annotations__  # Python 3.14 keeps what it evaluates, in the class
known, before, finders = set(sys.modules), torchs(), len(sys.meta_path)
import modkit.nn
modkit.load_state_dict, modkit.fast_inference
after = torchs()
print({
    f"{module}.{name}" for module, names in before.items() for name in {*names, *after[module]}
    if after[module].get(name) is not names.get(name)
    and f"{module}.{name}" not in sys.modules  # a part of torch that was not loaded before
})
print({name.split(".")[0] for name in set(sys.modules) - known} - {"torch"}, len(sys.meta_path) - finders)
"""

    assert python(code).stdout.splitlines() == ["set()", "{'modkit'} 1"]
