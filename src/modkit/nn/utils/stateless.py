"""A second name of the module ``torch.nn.utils.stateless``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.utils.stateless import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.utils.stateless"]
