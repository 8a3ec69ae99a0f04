"""Containers of modules and of parameters: torch's layers, re-based on modkit's ``Module``."""

# ruff: noqa: A001, A002, D101, D102 - names and documentation are torch's, see `_layers.py`.
# Torch declares some members otherwise than the bases of the class do; that stays as it is.
# pyright: reportIncompatibleVariableOverride=false, reportDeprecated=false

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

from modkit.nn._layers import leaf_forward, rebase, rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["Container", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"]


with warnings.catch_warnings():
    # Torch warns of each subclass of a deprecated class; `rebased` makes ours do the same.
    warnings.simplefilter("ignore", FutureWarning)

    @rebased
    class Container(torch.nn.Container, Module): ...


@rebased
class Sequential(torch.nn.Sequential, Module):
    @leaf_forward(torch.nn.Sequential)
    def forward(self, input: Any) -> Any:
        if type(self) is Sequential:
            for module in self._modules.values():
                input = module(input)
            return input
        return torch.nn.Sequential.forward(self, input)  # type: ignore[no-untyped-call]

    # Torch's operators return a plain Sequential, whatever the class of the operand.

    def __add__(self, other: torch.nn.Sequential) -> "Sequential":
        return cast("Sequential", rebase(super().__add__(other)))

    def __mul__(self, other: int) -> "Sequential":
        return cast("Sequential", rebase(super().__mul__(other)))


@rebased
class ModuleList(torch.nn.ModuleList, Module):
    def __add__(self, other: Iterable[torch.nn.Module]) -> "ModuleList":
        return cast("ModuleList", rebase(super().__add__(other)))


@rebased
class ModuleDict(torch.nn.ModuleDict, Module): ...


@rebased
class ParameterList(torch.nn.ParameterList, Module): ...


@rebased
class ParameterDict(torch.nn.ParameterDict, Module):
    # The operators ``|`` and ``|=`` are made of ``copy`` and ``update``.

    def copy(self) -> "ParameterDict":
        """Return a new ParameterDict of the same entries."""
        return cast("ParameterDict", rebase(super().copy()))

    def fromkeys(self, keys: Iterable[str], default: Any | None = None) -> "ParameterDict":
        """Return a new ParameterDict with the given keys, each holding ``default``."""
        return cast("ParameterDict", rebase(super().fromkeys(keys, default)))


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
