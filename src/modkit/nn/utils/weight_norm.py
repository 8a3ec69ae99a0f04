"""A second name of the module ``torch.nn.utils.weight_norm``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.utils.weight_norm import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.utils.weight_norm"]
