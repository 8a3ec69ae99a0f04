"""A second name of the module ``torch.nn.functional``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.functional import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.functional"]
