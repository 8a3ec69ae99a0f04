"""The parts of ``torch.optim`` that modkit has an own version of."""

from modkit._namespace import publish_all as _publish_all
from modkit.optim import swa_utils


__all__ = ["swa_utils"]

_publish_all(globals())
