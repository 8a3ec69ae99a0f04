"""A second name of the package ``torch.nn.quantizable``, whose files only forward to others."""

# pyright: reportWildcardImportFromLibrary=false

from typing import TYPE_CHECKING

import torch.nn.quantizable
from torch.nn.quantizable import *  # noqa: F403

from modkit.nn.modules._newer import upstream_names


__path__ = torch.nn.quantizable.__path__

if not TYPE_CHECKING:
    __getattr__ = upstream_names(__name__)
