"""modkit: a thin, typed facade over PyTorch."""
