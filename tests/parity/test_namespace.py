import copy
import importlib
import pickle
import pkgutil
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from torch import nn

import modkit.nn
from tests.cases import for_each
from tests.helpers import Implementation


VIEWS = ("nn", "nn.modules", "nn.modules.module")


def submodules() -> list[str]:
    """Return the name of every module below ``torch.nn``, private ones included."""
    return sorted(found.name for found in pkgutil.walk_packages(nn.__path__, "torch.nn."))


@pytest.mark.parametrize(
    ("view", "own"),
    [
        ("nn", {"Module", "modules"}),
        ("nn.modules", {"Module", "module"}),
        ("nn.modules.module", {"Module"}),
    ],
)
def test_every_name_is_torchs_own_object(view: str, own: set[str]) -> None:
    """All that torch has is there and is the same object, except ``Module``."""
    theirs, mine = (importlib.import_module(f"{name}.{view}") for name in ("torch", "modkit"))
    names = [name for name in dir(theirs) if not name.startswith("__")]

    assert {name for name in names if getattr(mine, name) is not getattr(theirs, name)} == own
    assert mine.Module is modkit.nn.Module
    # torch.nn itself has no such list.
    assert view == "nn" or mine.__all__ == theirs.__all__


@pytest.mark.parametrize("view", [*VIEWS, "jit"])
def test_a_namespace_is_pickled_by_reference(impl: Implementation, view: str) -> None:
    """A namespace is pickled by its name, and is its own copy."""
    namespace = impl.submodule(view)

    assert pickle.loads(pickle.dumps(namespace)) is namespace
    assert copy.deepcopy(namespace) is namespace


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@for_each("name", submodules())
def test_every_module_below_is_torchs_own(name: str) -> None:
    """A module imported by modkit's name is torch's module, whether or not it was loaded before."""
    mine = importlib.import_module(name.replace("torch", "modkit", 1))

    if name in {"torch.nn.modules", "torch.nn.modules.module"}:
        assert isinstance(mine, types.ModuleType)
        assert mine.__name__ == name.replace("torch", "modkit", 1)
    else:
        assert mine is importlib.import_module(name)
        assert mine.__spec__.name == name


@pytest.mark.parametrize("view", [*VIEWS, "jit"])
def test_the_dict_of_a_namespace_has_the_names_of_torch(impl: Implementation, view: str) -> None:
    """Scripts walk ``nn.__dict__`` and look layers up in it, as YOLOv5 finds normalization layers."""
    namespace = impl.submodule(view)
    theirs = sys.modules[f"torch.{view}"]
    names = {name for name in vars(theirs) if not name.startswith("__")}

    assert vars(namespace) is namespace.__dict__
    assert names <= vars(namespace).keys()
    assert [name for name in names if vars(namespace)[name] is not getattr(namespace, name)] == []
    norms = [value for name, value in namespace.__dict__.items() if "Norm" in name]
    assert norms == [value for name, value in vars(theirs).items() if "Norm" in name]


@pytest.mark.parametrize("view", [*VIEWS, "jit"])
def test_the_dict_of_a_namespace_follows_torch(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are added, replaced and deleted are so in the dict, and as attributes."""
    namespace, theirs = sys.modules[f"modkit.{view}"], sys.modules[f"torch.{view}"]
    with monkeypatch.context() as patch:
        patch.setattr(theirs, "added", 1, raising=False)
        assert vars(namespace)["added"] == 1
        patch.setattr(namespace, "added", 2)
        assert (namespace.added, vars(namespace)["added"], theirs.added) == (2, 2, 2)

    assert "added" not in vars(namespace)
    assert not hasattr(namespace, "added")
    ours = {name: value for name, value in vars(namespace).items() if not name.startswith("__")}
    name = next(name for name, value in ours.items() if vars(theirs).get(name) is value)
    value = getattr(theirs, name)
    with monkeypatch.context() as patch:
        patch.delattr(namespace, name)
        assert name not in vars(namespace)
        assert not hasattr(theirs, name)
    assert vars(namespace)[name] is getattr(theirs, name) is value


def test_module_stays_modkits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assigning ``Module`` does not reach torch."""
    theirs = torch.nn.Module
    monkeypatch.setattr(modkit.nn, "Module", "replaced")

    assert torch.nn.Module is theirs


def test_a_missing_name_is_an_attribute_error() -> None:
    """The error names modkit's module."""
    with pytest.raises(AttributeError, match=r"module 'modkit.nn' has no attribute 'NoSuchLayer'"):
        modkit.nn.NoSuchLayer


@for_each(
    "statement",
    [
        "import {0}.nn.functional as F; F.relu",
        "from {0}.nn import functional as F; F.scaled_dot_product_attention",
        "from {0}.nn.utils import parametrize; parametrize.register_parametrization",
        "from {0}.nn.utils import spectral_norm; spectral_norm.__code__",
        "from {0}.nn.parameter import Buffer, Parameter, UninitializedParameter",
        "from {0}.nn.modules.conv import _ConvNd, _size_2_t",
        "from {0}.nn.modules.module import _IncompatibleKeys, _addindent, _WrappedHook",
        "from {0}.nn.modules.module import register_module_full_backward_pre_hook",
        "import {0}.nn.quantized.dynamic; {0}.nn.quantized.dynamic.Linear",
        "import {0}.nn.intrinsic.qat; {0}.nn.qat; {0}.nn.quantizable; {0}.nn.quantized.Linear",
        "from {0}.nn import quantized, qat; quantized.dynamic.LSTM",
        "from {0}.nn import _reduction",
        "from {0}.nn.modules.no_such_file import Linear",
        "from {0}.nn.modules.linear import NoSuchLayer",
        "import {0}.nn.no_such_file",
    ],
)
def test_statement_works_as_in_torch(statement):
    """Users' import statements have the same outcome with either library's name."""

    def outcome(library):
        try:
            exec(statement.format(library), {})
        except Exception as error:
            return type(error).__name__
        return "works"

    assert outcome("modkit") == outcome("torch")


def test_import_is_quiet_and_light():
    """``import modkit.nn`` warns of nothing and imports no part of torch that torch has not."""
    code = """
        import sys
        import torch
        before = set(sys.modules)
        import modkit.nn
        print(*(name for name in set(sys.modules) - before if not name.startswith("modkit")))
        """
    # In an interpreter of its own: no module has been imported, and every warning is an error.
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.stdout.split(), done.stderr) == ([], "")


def test_functions_that_hold_themselves_on_torchs_class():
    """A recursive function is left there by transformers, once it has built a model."""
    code = """
        import torch

        def patch():
            def apply_to_children(module, fn):
                for child in module.children():
                    apply_to_children(child, fn)

            def once(module):
                return gone(module)

            def gone(module):
                return module

            def wrapped(module, fn):
                return own(module, fn)

            own = torch.nn.Module._apply
            torch.nn.Module.apply_to_children = apply_to_children
            torch.nn.Module.once = once
            torch.nn.Module._apply = wrapped
            del gone
            return own

        own = patch()
        import modkit
        from modkit._upstream import original_methods

        modkit.EMA(torch.nn.Linear(1, 1)).update()
        assert original_methods["_apply"] is own
        """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert (done.returncode, done.stderr) == (0, "")
