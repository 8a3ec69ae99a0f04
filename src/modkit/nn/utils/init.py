"""A second name of the module ``torch.nn.utils.init``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.utils.init import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.utils.init"]
