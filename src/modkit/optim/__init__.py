"""modkit's replacements for parts of ``torch.optim``."""

from modkit._namespace import publish_all as _publish_all
from modkit.optim import swa_utils


__all__ = ["swa_utils"]

_publish_all(globals())
