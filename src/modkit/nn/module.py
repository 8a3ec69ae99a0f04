"""The class ``Module`` (stub while the mechanisms are being written)."""

import torch


class Module(torch.nn.Module):
    """Base class for all neural network modules."""
