"""What makes a layer lazy, from ``torch.nn.modules.lazy``."""

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import lazy as upstream

from modkit.nn._layers import mark_leaf, rebased
from modkit.nn.modules._newer import upstream_names


__all__ = ["LazyModuleMixin"]


@rebased
class LazyModuleMixin(upstream.LazyModuleMixin):  # noqa: D101 - `rebased` takes over torch's text
    def _infer_parameters(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # The annotation of torch's method asks for the module that the mixin will be part of.
        super()._infer_parameters(module, args, kwargs)  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue]
        # The instance of a user's lazy class may have become an instance of exactly our layer.
        mark_leaf(module)


if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
