"""A second name of the module ``torch.nn.grad``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.grad import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.grad"]
