"""A second name of the module ``torch.nn.common_types``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.common_types import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.common_types"]
