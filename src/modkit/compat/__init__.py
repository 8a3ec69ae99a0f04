"""Comparing modkit with the installed torch."""
