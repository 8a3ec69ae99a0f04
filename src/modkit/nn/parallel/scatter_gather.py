"""A second name of the module ``torch.nn.parallel.scatter_gather``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.parallel.scatter_gather import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.parallel.scatter_gather"]
