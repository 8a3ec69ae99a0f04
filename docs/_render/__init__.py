"""Writes the generated pages and blocks of the documentation: see README.md, and docs/render.py, the command."""
