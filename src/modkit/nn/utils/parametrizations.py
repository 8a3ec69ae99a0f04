"""A second name of the module ``torch.nn.utils.parametrizations``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.utils.parametrizations import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.utils.parametrizations"]
