"""A second name of the module ``torch.nn.parallel.comm``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.parallel.comm import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.parallel.comm"]
