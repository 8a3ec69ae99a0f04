"""A second name of the module ``torch.nn.modules.utils``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.modules.utils import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.modules.utils"]
