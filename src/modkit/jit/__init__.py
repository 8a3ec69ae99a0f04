"""TorchScript: what is in its archives."""
