"""A second name of the package ``torch.nn.intrinsic``, whose files only forward to others."""

# pyright: reportWildcardImportFromLibrary=false

from typing import TYPE_CHECKING

import torch.nn.intrinsic
from torch.nn.intrinsic import *  # noqa: F403

from modkit.nn.modules._newer import upstream_names


__path__ = torch.nn.intrinsic.__path__

if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
