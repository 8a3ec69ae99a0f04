"""Same as ``torch.nn.attention``; its names are looked up there, as one of them is a switch."""

# pyright: reportWildcardImportFromLibrary=false

from typing import TYPE_CHECKING

import torch.nn.attention

from modkit.nn.modules._newer import upstream_names


if TYPE_CHECKING:
    from torch.nn.attention import *  # noqa: F403
else:
    __all__ = torch.nn.attention.__all__
    __getattr__ = upstream_names(__name__)
