"""A second name of the module ``torch.nn.modules.linear_cross_entropy_options``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.modules.linear_cross_entropy_options import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.modules.linear_cross_entropy_options"]
