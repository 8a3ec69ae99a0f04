"""A second name of the module ``torch.nn.parameter``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.parameter import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.parameter"]
