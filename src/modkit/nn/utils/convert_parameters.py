"""A second name of the module ``torch.nn.utils.convert_parameters``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.utils.convert_parameters import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.utils.convert_parameters"]
