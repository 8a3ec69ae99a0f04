"""The parts of ``torch.optim`` that modkit has an own version of."""

from modkit.optim import swa_utils as swa_utils
