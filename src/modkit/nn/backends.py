"""A second name of the package ``torch.nn.backends``, whose files only forward to others."""

# pyright: reportWildcardImportFromLibrary=false

from typing import TYPE_CHECKING

import torch.nn.backends
from torch.nn.backends import *  # noqa: F403

from modkit.nn.modules._newer import upstream_names


__path__ = torch.nn.backends.__path__

if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
