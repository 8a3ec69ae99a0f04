"""Training loops of public scripts, with one import changed."""
