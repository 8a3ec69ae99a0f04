"""Data parallelism in one process, re-based on modkit's ``Module``."""

# ruff: noqa: D101 - `rebased` takes over torch's documentation.

from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch.nn.parallel.data_parallel import data_parallel

from modkit.nn._layers import rebased
from modkit.nn.module import Module
from modkit.nn.modules._newer import upstream_names


__all__ = ["DataParallel", "data_parallel"]

T = TypeVar("T", bound=torch.nn.Module)


@rebased
class DataParallel(torch.nn.DataParallel[T], Module, Generic[T]): ...


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
