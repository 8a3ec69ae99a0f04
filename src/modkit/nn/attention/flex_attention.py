"""A second name of the module ``torch.nn.attention.flex_attention``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.attention.flex_attention import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.attention.flex_attention"]
