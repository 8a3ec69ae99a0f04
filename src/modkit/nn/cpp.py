"""A second name of the module ``torch.nn.cpp``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.cpp import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.cpp"]
