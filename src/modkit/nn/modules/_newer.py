"""Names of the installed torch that no file here spells out, among them newer layers."""

import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from modkit.nn._layers import REBASED, composite, rebased
from modkit.nn.module import Module


# Classes from anywhere else, say torch.ao, are not layers of ``torch.nn`` and stay what they are.
_LAYER_HOMES = ("torch.nn.modules.", "torch.nn.parallel.")


def layer_class(source: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return modkit's class for a layer class of torch, making it if nobody has written it.

    The class is made once, below the modkit classes of the bases of ``source``, and says that it
    lives in modkit's file of the same name, so that instances can be pickled.
    """
    if source is torch.nn.Module:
        return Module
    if source not in REBASED:
        bases = [
            layer_class(base) if issubclass(base, torch.nn.Module) else REBASED[base]
            for base in source.__bases__
            if base in REBASED or issubclass(base, torch.nn.Module)
        ]
        home = source.__module__.replace("torch", "modkit", 1)
        names = {"__module__": home if home in sys.modules else "modkit.nn"}
        with warnings.catch_warnings():
            # A deprecated class warns when it is subclassed; `rebased` makes ours do the same.
            warnings.simplefilter("ignore", FutureWarning)
            layer = types.new_class(
                source.__name__, (source, *bases), {}, lambda body: body.update(names)
            )
        rebased(composite()(layer))
    return REBASED[source]


def upstream_names(here: str) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for the modkit module that is called ``here``.

    It finds what the torch module of the same name has at that moment: layers as modkit's,
    submodules as modkit's where there is a file for them, everything else as it is.
    """
    upstream = importlib.import_module(here.replace("modkit", "torch", 1))

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name.startswith("__") or not hasattr(upstream, name):
            raise AttributeError(f"module {here!r} has no attribute {name!r}")
        value = getattr(upstream, name)
        if isinstance(value, type) and issubclass(value, torch.nn.Module):
            return layer_class(value) if value.__module__.startswith(_LAYER_HOMES) else value
        if isinstance(value, types.ModuleType) and value.__name__ == f"{upstream.__name__}.{name}":
            try:
                return importlib.import_module(f"{here}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{here}.{name}":
                    raise
        return value

    return __getattr__
