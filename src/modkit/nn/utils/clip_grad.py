"""A second name of the module ``torch.nn.utils.clip_grad``."""

# pyright: reportWildcardImportFromLibrary=false

import sys

from torch.nn.utils.clip_grad import *  # noqa: F403 - read by type checkers


sys.modules[__name__] = sys.modules["torch.nn.utils.clip_grad"]
