"""Drop-in for ``torch.nn``."""

from modkit.nn.module import Module as Module
