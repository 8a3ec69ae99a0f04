"""A second name of the module ``torch.nn.parallel.parallel_apply``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.parallel.parallel_apply import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.parallel.parallel_apply"]
