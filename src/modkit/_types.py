"""Type aliases; imports nothing of modkit."""

from typing import TypeAlias

import torch


# The name that torch exports: type checkers regard ``from torch import Tensor`` as private.
Tensor: TypeAlias = torch.Tensor
