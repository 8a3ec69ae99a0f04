"""``freeze`` and ``optimize_for_inference``: modules whose weights are constants of the code."""

from collections.abc import Sequence
from typing import Any

import torch

from modkit.jit._members import compiled
from modkit.jit._notice import give_notice
from modkit.jit._upstream import (
    freeze_module,
    optimize_for_inference as optimize,
    optimize_frozen_graph,
)
from modkit.jit._wrap import wrap_cpp
from modkit.jit.script_module import ScriptModule


def _require_script(mod: object, what: str) -> None:
    if not isinstance(mod, torch.jit.ScriptModule):
        raise RuntimeError(  # noqa: TRY004 - torch's type
            f"{what} expects a ScriptModule as input. "
            "Please use torch.jit.script or torch.jit.trace to script your 'nn.Module'."
        )


def _freeze(
    mod: torch.jit.ScriptModule, preserved: Sequence[str], optimize_numerics: bool
) -> ScriptModule:
    cpp = compiled(mod)
    if mod.training:
        raise RuntimeError(
            "Freezing is currently only implemented for modules in eval mode. "
            "Please call .eval() on your module before freezing."
        )
    frozen: Any = freeze_module(cpp, list(preserved))
    methods = ["forward", *(name for name in preserved if cpp._has_method(name))]
    for name in methods:
        if frozen._has_method(name):
            optimize_frozen_graph(frozen._get_method(name).graph, optimize_numerics)
    module: ScriptModule = wrap_cpp(ScriptModule, frozen)
    return module


def freeze(
    mod: torch.jit.ScriptModule,
    preserved_attrs: list[str] | None = None,
    optimize_numerics: bool = True,
) -> ScriptModule:
    """Return a copy whose weights, children and attributes are constants of its code.

    Args:
        mod: The module, in evaluation mode.
        preserved_attrs: Attributes and methods that stay what they are; ``forward`` always does,
            and so does what a method writes to.
        optimize_numerics: Also do what changes the last bits of results, such as to fold a batch
            normalization into the convolution before it.

    Raises:
        RuntimeError: it is no ScriptModule, or in training mode.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> frozen = jit.freeze(jit.script(nn.Linear(4, 2).eval()))
        >>> len(list(frozen.parameters())), frozen(torch.ones(3, 4)).shape
        (0, torch.Size([3, 2]))

    Same as ``torch.jit.freeze``.
    """
    give_notice()
    _require_script(mod, "Freezing")
    return _freeze(mod, preserved_attrs or [], optimize_numerics)


def optimize_for_inference(
    mod: torch.jit.ScriptModule, other_methods: list[str] | None = None
) -> ScriptModule:
    """Freeze a module, unless it is, and fit it to this machine.

    Args:
        mod: The module; it is put into evaluation mode.
        other_methods: Methods beside ``forward``.

    Raises:
        RuntimeError: it is no ScriptModule.

    Example:
        >>> import torch
        >>> import modkit.nn as nn
        >>> from modkit import jit
        >>> fast = jit.optimize_for_inference(jit.script(nn.Linear(4, 2)))
        >>> fast(torch.ones(3, 4)).shape
        torch.Size([3, 2])

    Same as ``torch.jit.optimize_for_inference``.
    """
    give_notice()
    _require_script(mod, "optimize_for_inference")
    methods = other_methods or []
    if hasattr(mod, "training"):
        module = _freeze(mod.eval(), methods, optimize_numerics=True)
    else:
        module = ScriptModule.from_torch(mod)
    optimize(module._c, methods)
    return module
